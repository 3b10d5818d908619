// One unit of the forward: compiled once per element type and head dim, see ringfa3/build.py.
#include "forward/kernel.cuh"

extern "C" int ringfa3_forward(ringfa3::ForwardArgs const* args, void* stream) {
  using Traits = ringfa3::ForwardTraits<RINGFA3_ELEMENT, RINGFA3_HEAD_DIM, RINGFA3_TILE_N,
                                        RINGFA3_TILE_M / 64>;
  return ringfa3::launch_forward<Traits>(*args, static_cast<cudaStream_t>(stream));
}
