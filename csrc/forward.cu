// One unit of the forward: compiled once per element type and head dim, see ringfa3/build.py.
#include "forward.cuh"
#ifdef RINGFA3_UNSPECIALISED
#include "unspecialised.cuh"
#endif

#ifndef RINGFA3_OVERLAP
#define RINGFA3_OVERLAP true
#endif
#ifndef RINGFA3_PING_PONG
#define RINGFA3_PING_PONG true
#endif

extern "C" int ringfa3_forward(ringfa3::ForwardArgs const* args, void* stream) {
  using Traits = ringfa3::ForwardTraits<RINGFA3_ELEMENT, RINGFA3_HEAD_DIM, RINGFA3_TILE_N,
                                        RINGFA3_TILE_M / 64, RINGFA3_OVERLAP, RINGFA3_PING_PONG>;
#ifdef RINGFA3_UNSPECIALISED
  return ringfa3::launch_unspecialised<Traits>(*args, static_cast<cudaStream_t>(stream));
#else
  return ringfa3::launch_forward<Traits>(*args, static_cast<cudaStream_t>(stream));
#endif
}
