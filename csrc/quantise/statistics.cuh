// Statistics of K and V per KV head and channel.
#pragma once

#include <cute/tensor.hpp>

#include "hopper/launch.cuh"
#include "hopper/sync.cuh"
#include "quantise/centres.cuh"
#include "quantise/rotation.cuh"

namespace ringfa3 {

using namespace cute;

constexpr int kStatisticsThreads = 256;

// A CTA per split of the tokens and head. A thread has 8 channels of every kRows-th token.
template <class S>
__global__ void __launch_bounds__(kStatisticsThreads, 3)
    statistics_kernel(__grid_constant__ StatisticsArgs const a) {
  using Element = typename S::Element;
  constexpr int D = S::D, kLanes = D / 8, kRows = kStatisticsThreads / kLanes, kUnroll = 4;
  __shared__ alignas(16) float parts[kRows][kStatistics][D];
  launch_next_kernel();
  int64_t const head = blockIdx.y;
  int const channel = threadIdx.x % kLanes * 8, row = threadIdx.x / kLanes;
  int64_t const begin = int64_t{blockIdx.x} * a.rows;
  int64_t const end = cute::min(begin + a.rows, a.k.tokens);
  float sums[kStatistics][8];
  CUTE_UNROLL
  for (int s = 0; s < kStatistics; ++s) {
    CUTE_UNROLL
    for (int c = 0; c < 8; ++c) sums[s][c] = nothing(s);
  }
  auto add = [&](uint4 const& of_k, uint4 const& of_v) {
    uint32_t const k[4] = {of_k.x, of_k.y, of_k.z, of_k.w}, v[4] = {of_v.x, of_v.y, of_v.z, of_v.w};
    CUTE_UNROLL
    for (int c = 0; c < 8; ++c) {
      float2 const xs = unpacked<Element>(k[c / 2]), ys = unpacked<Element>(v[c / 2]);
      float const x = c % 2 == 0 ? xs.x : xs.y, y = c % 2 == 0 ? ys.x : ys.y;
      if (fabsf(x) < INFINITY) sums[0][c] += x;
      if (fabsf(y) < INFINITY) {
        sums[1][c] += y;
        sums[2][c] = fmaxf(sums[2][c], y), sums[3][c] = fminf(sums[3][c], y);
      }
    }
  };
  auto address = [&](Tensor3 const& x) {
    auto const* const at = static_cast<Element const*>(x.data) + (begin + row) * x.token_stride;
    return reinterpret_cast<char const*>(at + head * x.head_stride + channel);
  };
  auto load = [](char const* from) { return __ldg(reinterpret_cast<uint4 const*>(from)); };
  int64_t const k_step = kRows * a.k.token_stride * sizeof(Element);
  int64_t const v_step = kRows * a.v.token_stride * sizeof(Element);
  char const *k_at = address(a.k), *v_at = address(a.v);
  int64_t left = end - begin - row;  // tokens from the thread's next one on
  for (; left > (kUnroll - 1) * kRows; left -= kUnroll * kRows) {
    uint4 k[kUnroll], v[kUnroll];
    CUTE_UNROLL
    for (int i = 0; i < kUnroll; ++i, k_at += k_step, v_at += v_step) {
      k[i] = load(k_at), v[i] = load(v_at);
    }
    CUTE_UNROLL
    for (int i = 0; i < kUnroll; ++i) add(k[i], v[i]);
  }
#pragma unroll 1
  for (; left > 0; left -= kRows, k_at += k_step, v_at += v_step) add(load(k_at), load(v_at));
  CUTE_UNROLL
  for (int s = 0; s < kStatistics; ++s) {
    CUTE_UNROLL
    for (int c = 0; c < 8; ++c) parts[row][s][channel + c] = sums[s][c];
  }
  __syncthreads();
  for (int n = threadIdx.x; n < kStatistics * D; n += kStatisticsThreads) {
    int const s = n / D, c = n % D;
    float total = parts[0][s][c];
    for (int r = 1; r < kRows; ++r) total = combined(s, total, parts[r][s][c]);
    a.splits[((int64_t{blockIdx.x} * kStatistics + s) * a.k.heads + head) * D + c] = total;
  }
}

template <class S>
cudaError_t launch_statistics(StatisticsArgs const& a, cudaStream_t stream) {
  dim3 const grid(a.centres.num_parts, static_cast<unsigned>(a.k.heads));
  statistics_kernel<S><<<grid, kStatisticsThreads, 0, stream>>>(a);
  if (cudaError_t const status = cudaGetLastError(); status != cudaSuccess) return status;
  return launch_centres<S::D>(a.centres, stream);
}

}  // namespace ringfa3
