// One unit of the backward: compiled once per element type and head dim, see ringfa3/build.py.
#include "backward/kernel.cuh"
#include "backward/preprocess.cuh"

using Traits =
    ringfa3::BackwardTraits<RINGFA3_ELEMENT, RINGFA3_HEAD_DIM, RINGFA3_TILE_M, RINGFA3_TILE_N>;

extern "C" int ringfa3_preprocess(ringfa3::PreprocessArgs const* args, void* stream) {
  return ringfa3::launch_preprocess<Traits>(*args, static_cast<cudaStream_t>(stream));
}

extern "C" int ringfa3_backward(ringfa3::BackwardArgs const* args, void* stream) {
  return ringfa3::launch_backward<Traits>(*args, static_cast<cudaStream_t>(stream));
}

extern "C" int ringfa3_postprocess(ringfa3::PostprocessArgs const* args, void* stream) {
  return ringfa3::launch_postprocess<Traits>(*args, static_cast<cudaStream_t>(stream));
}
