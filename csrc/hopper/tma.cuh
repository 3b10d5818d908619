// TMA: boxes of rows of one head, (rows, D), between a (tokens, heads, D) tensor and shared memory.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <cute/arch/copy_sm90_desc.hpp>
#include <cute/arch/copy_sm90_tma.hpp>
#include <cutlass/arch/barrier.h>
#include <cutlass/numeric_types.h>

#include "params.h"

namespace ringfa3 {

using namespace cute;

// A box in shared memory consists of slabs of (rows, 128 bytes) with a 128-byte swizzle, as the
// GMMA layouts SW128 of Q, K and V describe them. Slabs of 64 or 32 bytes have a swizzle of as many
// (SW64, SW32).
constexpr int kSlab = 64;  // columns of 16-bit elements

template <class Element>
constexpr int slab_columns(int columns) {
  int const most = 128 / static_cast<int>(sizeof(Element));
  return columns < most ? columns : most;
}

constexpr CUtensorMapSwizzle swizzle_of(int slab_bytes) {
  return slab_bytes == 32   ? CU_TENSOR_MAP_SWIZZLE_32B
         : slab_bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                            : CU_TENSOR_MAP_SWIZZLE_128B;
}

using MapEncoder = decltype(&cuTensorMapEncodeTiled);

// cuTensorMapEncodeTiled from the driver's entry points, so that nothing links libcuda; null if the
// driver has none. Looked up once.
inline MapEncoder map_encoder() {
  static auto const found = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result;
    cudaError_t const status = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                                12000, cudaEnableDefault, &result);
    bool const there = status == cudaSuccess && result == cudaDriverEntryPointSuccess;
    return there ? reinterpret_cast<MapEncoder>(function) : nullptr;
  }();
  return found;
}

// Encodes the map of a tensor of 8 or 16 bits for boxes of `rows` rows, of which shared memory
// holds `width` columns; at most `boxes` of them cover the head dim. Rows past the last token and
// columns past the head dim read as zeros, and stores leave them out. Returns false if the tensor
// is wider or the driver refuses it.
template <class Element>
bool encode(CUtensorMap& map, Tensor3 const& x, int rows, int width, int boxes = 1) {
  static_assert(sizeof(Element) <= 2);
  constexpr auto kType = sizeof(Element) == 1                  ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                         : is_same_v<Element, cutlass::half_t> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                               : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  int const columns = slab_columns<Element>(width);
  cuuint64_t const shape[3] = {static_cast<cuuint64_t>(x.head_dim),
                               static_cast<cuuint64_t>(x.tokens), static_cast<cuuint64_t>(x.heads)};
  cuuint64_t const stride[2] = {x.token_stride * sizeof(Element), x.head_stride * sizeof(Element)};
  cuuint32_t const box[3] = {static_cast<cuuint32_t>(columns), static_cast<cuuint32_t>(rows), 1};
  cuuint32_t const step[3] = {1, 1, 1};
  auto const encoder = map_encoder();
  return encoder && x.head_dim <= width * boxes &&
         encoder(&map, kType, 3, x.data, shape, stride, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
                 swizzle_of(columns * sizeof(Element)), CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                 CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// One thread: loads rows [row, row + Rows) of a head, D columns from `first_column` on, to `to`, in
// slabs of `Slab` columns, or the widest; the bytes complete `full`.
template <int Rows, int D, int Slab = 0, class Element>
CUTE_DEVICE void load_box(CUtensorMap const& map, cutlass::arch::ClusterTransactionBarrier& full,
                          Element* to, int row, int head, int first_column = 0) {
  constexpr int kColumns = slab_columns<Element>(Slab ? Slab : D);
  full.arrive_and_expect_tx(Rows * D * sizeof(Element));
  CUTE_UNROLL
  for (int column = 0; column < D; column += kColumns) {
    SM90_TMA_LOAD_3D::copy(&map, reinterpret_cast<uint64_t*>(&full),
                           static_cast<uint64_t>(TMA::CacheHintSm90::EVICT_NORMAL),
                           to + column * Rows, first_column + column, row, head);
  }
}

}  // namespace ringfa3
