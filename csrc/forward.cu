// A unit of the forward: one element type and head dim, defined by ringfa3/build/compile.py.
#include "forward/kernel.cuh"

extern "C" int ringfa3_forward(ringfa3::ForwardArgs const* args, void* stream) {
  using Shapes = ringfa3::ForwardShapes<RINGFA3_ELEMENT, RINGFA3_HEAD_DIM, RINGFA3_TILE_N,
                                        RINGFA3_TILE_M / 64>;
  return ringfa3::launch_forward<Shapes>(*args, static_cast<cudaStream_t>(stream));
}
