// A unit of the backward: one element type and head dim, defined by ringfa3/build/compile.py.
#include "backward/kernel.cuh"
#include "backward/postprocess.cuh"
#include "backward/preprocess.cuh"
#include "ring/gradients.cuh"
#include "ring/publish.cuh"

#ifndef RINGFA3_CLIPS
#define RINGFA3_CLIPS false
#endif

using Shapes =
    ringfa3::BackwardShapes<RINGFA3_ELEMENT, RINGFA3_HEAD_DIM, RINGFA3_TILE_M, RINGFA3_TILE_N,
                            ringfa3::BackwardOperands::RINGFA3_PRECISION ==
                                ringfa3::BackwardOperands::Dequantised,
                            RINGFA3_CLIPS, RINGFA3_V_DIM>;

extern "C" int ringfa3_preprocess(ringfa3::PreprocessArgs const* args, void* stream) {
  return ringfa3::launch_preprocess<Shapes>(*args, static_cast<cudaStream_t>(stream));
}

extern "C" int ringfa3_backward(ringfa3::BackwardArgs const* args, void* stream) {
  return ringfa3::launch_backward<Shapes>(*args, static_cast<cudaStream_t>(stream));
}

extern "C" int ringfa3_postprocess(ringfa3::PostprocessArgs const* args, void* stream) {
  return ringfa3::launch_postprocess<Shapes>(*args, static_cast<cudaStream_t>(stream));
}

extern "C" int ringfa3_publish(ringfa3::PublishArgs const* args, void* stream) {
  return ringfa3::launch_publish(*args, static_cast<cudaStream_t>(stream));
}

extern "C" int ringfa3_add_returns(ringfa3::AddReturnsArgs const* args, void* stream) {
  return ringfa3::launch_add_returns(*args, static_cast<cudaStream_t>(stream));
}

extern "C" int ringfa3_round_gradients(ringfa3::RoundGradientsArgs const* args, void* stream) {
  return ringfa3::launch_round_gradients<RINGFA3_ELEMENT>(*args, static_cast<cudaStream_t>(stream));
}
