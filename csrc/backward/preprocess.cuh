// What runs once per backward around the hops: LSE and D in padded rows and a dQ of zeros before
// them; after them dQ in the output dtype.
//
// Letters in shapes: M rows of a block of the row grid, D head dim.
#pragma once

#include "backward/shapes.cuh"
#include "hopper/launch.cuh"
#include "hopper/store.cuh"
#include "hopper/sync.cuh"

namespace ringfa3 {

using namespace cute;

constexpr int kPreprocessThreads = 256;

// The sum over eight 16-bit elements of each of a * b.
template <class Element>
CUTE_DEVICE float dot_eight(uint4 const& a, uint4 const& b) {
  auto const* x = reinterpret_cast<Element const*>(&a);
  auto const* y = reinterpret_cast<Element const*>(&b);
  float sum = 0.f;
  CUTE_UNROLL
  for (int i = 0; i < 8; ++i) sum += static_cast<float>(x[i]) * static_cast<float>(y[i]);
  return sum;
}

// A CTA for each block of rows and head. A row that sees nothing gets LSE = +inf, so that P = 0,
// and D = 0, whatever its gradients are; so do rows of padding.
template <class Traits>
__global__ void __launch_bounds__(kPreprocessThreads)
    preprocess_kernel(__grid_constant__ PreprocessArgs const a) {
  using Element = typename Traits::Element;
  constexpr int M = Traits::M, D = Traits::D;
  constexpr int kLanes = D / 8;  // of a row, 16 bytes each
  launch_next_kernel();
  int64_t const head = blockIdx.y;
  int64_t const target = head * a.grid.num_blocks + blockIdx.x;
  auto* const dq = reinterpret_cast<float4*>(a.grid.dq + target * (M * D));
  for (int i = threadIdx.x; i < M * D / 4; i += kPreprocessThreads) {
    dq[i] = make_float4(0.f, 0.f, 0.f, 0.f);
  }
  GridBlock const block = a.grid.blocks[blockIdx.x];
  int const lane = threadIdx.x % kLanes;
  for (int row = threadIdx.x / kLanes; row < M; row += kPreprocessThreads / kLanes) {
    int64_t const token = block.row0 + row;
    float sum = 0.f;
    if (row < block.rows) {
      auto eight = [&](Tensor3 const& x) {
        auto* const at = static_cast<Element const*>(x.data) + token * x.token_stride;
        return *reinterpret_cast<uint4 const*>(at + head * x.head_stride + 8 * lane);
      };
      sum = dot_eight<Element>(eight(a.out), eight(a.dout));
    }
    CUTE_UNROLL
    for (int i = kLanes / 2; i > 0; i /= 2) sum += __shfl_xor_sync(0xffffffff, sum, i);
    if (lane == 0) {
      float const lse = row < block.rows ? a.lse[head * a.lse_head_stride + token] : -INFINITY;
      bool const blind = lse == -INFINITY;
      a.grid.lse[target * M + row] = blind ? INFINITY : lse * kLog2e;
      float const dlse =
          blind || a.dlse == nullptr ? 0.f : a.dlse[head * a.dlse_head_stride + token];
      a.grid.delta[target * M + row] = blind ? 0.f : sum - dlse;
    }
  }
}

// A CTA for each piece of dQ, (64, 64) as the accumulators of the backward kernel held it.
template <class Traits>
__global__ void __launch_bounds__(kWarpgroup)
    postprocess_kernel(__grid_constant__ PostprocessArgs const a) {
  using Element = typename Traits::Element;
  constexpr int D = Traits::D, kColumnPieces = D / 64;
  wait_for_earlier_kernels();
  int const thread = threadIdx.x, lane = thread % kWarp;
  int const block = blockIdx.x / Traits::DqTiles, piece = blockIdx.x % Traits::DqTiles;
  int64_t const head = blockIdx.y;
  int64_t const number = (head * a.grid.num_blocks + block) * Traits::DqTiles + piece;
  auto const* from = reinterpret_cast<float4 const*>(a.grid.dq + number * kDqTile) + thread;
  Tensor dq = make_tensor<float>(Shape<_32>{});
  CUTE_UNROLL
  for (int i = 0; i < 8; ++i) {
    float4 const x = from[i * kWarpgroup];
    dq(4 * i) = x.x * a.softmax_scale, dq(4 * i + 1) = x.y * a.softmax_scale;
    dq(4 * i + 2) = x.z * a.softmax_scale, dq(4 * i + 3) = x.w * a.softmax_scale;
  }
  GridBlock const rows = a.grid.blocks[block];
  int const row = piece / kColumnPieces * 64 + thread / kWarp * 16 + lane / 4;
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) {
    int64_t const token = rows.row0 + row + 8 * r;
    auto* const to = static_cast<Element*>(a.dq.data) + token * a.dq.token_stride +
                     head * a.dq.head_stride + piece % kColumnPieces * 64;
    store_row<Element, 64>(to, dq, r, lane, row + 8 * r < rows.rows);
  }
}

template <class Traits>
cudaError_t launch_preprocess(PreprocessArgs const& a, cudaStream_t stream) {
  dim3 const grid(static_cast<unsigned>(a.grid.num_blocks), static_cast<unsigned>(a.out.heads));
  preprocess_kernel<Traits><<<grid, kPreprocessThreads, 0, stream>>>(a);
  return cudaGetLastError();
}

template <class Traits>
cudaError_t launch_postprocess(PostprocessArgs const& a, cudaStream_t stream) {
  dim3 const grid(static_cast<unsigned>(a.grid.num_blocks * Traits::DqTiles),
                  static_cast<unsigned>(a.dq.heads));
  return launch_early(postprocess_kernel<Traits>, grid, kWarpgroup, 0, stream, a);
}

}  // namespace ringfa3
