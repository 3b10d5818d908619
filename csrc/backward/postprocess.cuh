// After the last hop: dQ in the output dtype.
#pragma once

#include "backward/shapes.cuh"
#include "hopper/launch.cuh"
#include "hopper/store.cuh"
#include "hopper/sync.cuh"

namespace ringfa3 {

using namespace cute;

// A CTA per dQ tile and head: scales the tile (64, 64), which has the accumulators' order, and
// stores it in rows.
template <class Shapes>
__global__ void __launch_bounds__(kWarpgroup)
    postprocess_kernel(__grid_constant__ PostprocessArgs const a) {
  using Element = typename Shapes::Element;
  constexpr int D = Shapes::D, kColumnTiles = D / 64;
  wait_for_earlier_kernels();
  int const thread = threadIdx.x, lane = thread % kWarp;
  int const block = blockIdx.x / Shapes::DqTiles, tile = blockIdx.x % Shapes::DqTiles;
  int64_t const head = blockIdx.y;
  int64_t const number = (head * a.padded.num_blocks + block) * Shapes::DqTiles + tile;
  auto const* from = reinterpret_cast<float4 const*>(a.padded.dq + number * kDqTile) + thread;
  Tensor dq = make_tensor<float>(Shape<_32>{});
  CUTE_UNROLL
  for (int i = 0; i < 8; ++i) {
    float4 const x = from[i * kWarpgroup];
    dq(4 * i) = x.x * a.softmax_scale, dq(4 * i + 1) = x.y * a.softmax_scale;
    dq(4 * i + 2) = x.z * a.softmax_scale, dq(4 * i + 3) = x.w * a.softmax_scale;
  }
  PaddedBlock const rows = a.padded.blocks[block];
  int const column = tile % kColumnTiles * 64;
  int const row = tile / kColumnTiles * 64 + thread / kWarp * 16 + lane / 4;
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) {
    int64_t const token = rows.row0 + row + 8 * r;
    auto* const to = static_cast<Element*>(a.dq.data) + token * a.dq.token_stride +
                     head * a.dq.head_stride + column;
    store_row<Element, 64>(to, dq, r, lane, row + 8 * r < rows.rows, a.dq.head_dim - column);
  }
}

template <class Shapes>
cudaError_t launch_postprocess(PostprocessArgs const& a, cudaStream_t stream) {
  dim3 const grid(static_cast<unsigned>(a.padded.num_blocks * Shapes::DqTiles),
                  static_cast<unsigned>(a.dq.heads));
  return launch_early(postprocess_kernel<Shapes>, grid, kWarpgroup, 0, stream, a);
}

}  // namespace ringfa3
