// After the last hop: dQ in the output dtype. That of dequantised operands is rotated back.
#pragma once

#include "backward/rotate.cuh"
#include "backward/shapes.cuh"
#include "hopper/launch.cuh"
#include "hopper/store.cuh"
#include "hopper/sync.cuh"

namespace ringfa3 {

using namespace cute;

template <class Shapes>
constexpr int dq_tiles_of_cta = Shapes::Dequantised ? Shapes::D / Shapes::kDqColumns : 1;

// A CTA per 64 rows and head, and per dQ tile unless dQ is that of rotated operands: scales dQ,
// whose tiles (64, kDqColumns) have the accumulators' order, rotates it back and stores it in rows.
template <class Shapes>
__global__ void __launch_bounds__(kWarpgroup)
    postprocess_kernel(__grid_constant__ PostprocessArgs const a) {
  using Element = typename Shapes::Element;
  constexpr int D = Shapes::D, kTiles = dq_tiles_of_cta<Shapes>,
                kColumns = Shapes::kDqColumns * kTiles;
  constexpr int kCtas = Shapes::DqTiles / kTiles, kColumnCtas = D / kColumns;  // of a block
  wait_for_earlier_kernels();
  int const thread = threadIdx.x, lane = thread % kWarp;
  int const block = blockIdx.x / kCtas, cta = blockIdx.x % kCtas;
  int64_t const head = blockIdx.y;
  int64_t const number = ((head * a.padded.num_blocks + block) * kCtas + cta) * kTiles;
  auto const* from =
      reinterpret_cast<float4 const*>(a.padded.dq + number * Shapes::kDqTile) + thread;
  Tensor dq = make_tensor<float>(Shape<Int<kColumns / 2>>{});
  CUTE_UNROLL
  for (int i = 0; i < kColumns / 8; ++i) {
    float4 const x = from[i * kWarpgroup];
    dq(4 * i) = x.x, dq(4 * i + 1) = x.y, dq(4 * i + 2) = x.z, dq(4 * i + 3) = x.w;
  }
  finish_gradient<Shapes>(dq, a.softmax_scale, lane);
  PaddedBlock const rows = a.padded.blocks[block];
  int const column = cta % kColumnCtas * kColumns;
  int const row = cta / kColumnCtas * 64 + thread / kWarp * 16 + lane / 4;
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) {
    int64_t const token = rows.row0 + row + 8 * r;
    auto* const to = static_cast<Element*>(a.dq.data) + token * a.dq.token_stride +
                     head * a.dq.head_stride + column;
    store_row<Element, kColumns>(to, dq, r, lane, row + 8 * r < rows.rows, a.dq.head_dim - column);
  }
}

template <class Shapes>
cudaError_t launch_postprocess(PostprocessArgs const& a, cudaStream_t stream) {
  int64_t const ctas = a.padded.num_blocks * Shapes::DqTiles / dq_tiles_of_cta<Shapes>;
  dim3 const grid(static_cast<unsigned>(ctas), static_cast<unsigned>(a.dq.heads));
  return launch_early(postprocess_kernel<Shapes>, grid, kWarpgroup, 0, stream, a);
}

}  // namespace ringfa3
