// A unit of the quantisation: one element type and head dim, defined by ringfa3/build/compile.py.
#include "quantise/key_values.cuh"
#include "quantise/queries.cuh"
#include "quantise/statistics.cuh"

using Shapes = ringfa3::RowShapes<RINGFA3_ELEMENT, RINGFA3_HEAD_DIM>;
static_assert(ringfa3::kKeyTile == RINGFA3_TILE_N);

extern "C" int ringfa3_statistics(ringfa3::StatisticsArgs const* args, void* stream) {
  return ringfa3::launch_statistics<Shapes>(*args, static_cast<cudaStream_t>(stream));
}

extern "C" int ringfa3_centres(ringfa3::CentresArgs const* args, void* stream) {
  return ringfa3::launch_centres<Shapes::D>(*args, static_cast<cudaStream_t>(stream));
}

extern "C" int ringfa3_quantise_q(ringfa3::QuantiseQArgs const* args, void* stream) {
  return ringfa3::launch_quantise_q<Shapes>(*args, static_cast<cudaStream_t>(stream));
}

extern "C" int ringfa3_quantise_kv(ringfa3::QuantiseKVArgs const* args, void* stream) {
  return ringfa3::launch_quantise_kv<Shapes>(*args, static_cast<cudaStream_t>(stream));
}
