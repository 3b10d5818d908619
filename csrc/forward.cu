// A unit of the forward: one element type, head dim and precision, defined by
// ringfa3/build/compile.py.
#include "forward/kernel.cuh"
#include "ring/publish.cuh"

#ifndef RINGFA3_CLIPS
#define RINGFA3_CLIPS false
#endif

using Shapes =
    ringfa3::ForwardShapes<RINGFA3_ELEMENT, RINGFA3_HEAD_DIM, RINGFA3_TILE_N, RINGFA3_TILE_M / 64,
                           ringfa3::Precision::RINGFA3_PRECISION, RINGFA3_CLIPS, RINGFA3_V_DIM>;

extern "C" int ringfa3_forward(Shapes::Args const* args, void* stream) {
  return ringfa3::launch_forward<Shapes>(*args, static_cast<cudaStream_t>(stream));
}

extern "C" int ringfa3_publish(ringfa3::PublishArgs const* args, void* stream) {
  return ringfa3::launch_publish(*args, static_cast<cudaStream_t>(stream));
}
