// Sums of K and V, and the range of V, per KV head and channel. Sums have one order, whatever the
// order of the CTAs: equal bits from run to run.
#pragma once

#include <cute/tensor.hpp>

#include "hopper/launch.cuh"
#include "hopper/sync.cuh"
#include "quantise/rotation.cuh"

namespace ringfa3 {

using namespace cute;

constexpr int kStatistics = 4;  // the sum of K; the sum, maximum and minimum of V
constexpr int kStatisticsThreads = 256, kCombineThreads = 512;

CUTE_DEVICE float nothing(int statistic) {
  return statistic < 2 ? 0.f : statistic == 2 ? -INFINITY : INFINITY;
}

CUTE_DEVICE float combined(int statistic, float a, float b) {
  return statistic < 2 ? a + b : statistic == 2 ? fmaxf(a, b) : fminf(a, b);
}

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
  auto vector = [&](Tensor3 const& x, int64_t token) {
    auto const* const at = static_cast<Element const*>(x.data) + token * x.token_stride;
    return __ldg(reinterpret_cast<uint4 const*>(at + head * x.head_stride + channel));
  };
  for (int64_t first = begin + row; first < end; first += kUnroll * kRows) {
    uint4 k[kUnroll], v[kUnroll];
    CUTE_UNROLL
    for (int i = 0; i < kUnroll; ++i) {
      k[i] = v[i] = make_uint4(~0u, ~0u, ~0u, ~0u);  // NaN does not count
      if (int64_t const token = first + i * kRows; token < end) {
        k[i] = vector(a.k, token), v[i] = vector(a.v, token);
      }
    }
    CUTE_UNROLL
    for (int i = 0; i < kUnroll; ++i) {
      CUTE_UNROLL
      for (int c = 0; c < 8; ++c) {
        float const x = static_cast<float>(reinterpret_cast<Element const*>(&k[i])[c]);
        float const y = static_cast<float>(reinterpret_cast<Element const*>(&v[i])[c]);
        if (fabsf(x) < INFINITY) sums[0][c] += x;
        if (fabsf(y) < INFINITY) {
          sums[1][c] += y;
          sums[2][c] = fmaxf(sums[2][c], y), sums[3][c] = fminf(sums[3][c], y);
        }
      }
    }
  }
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
    a.partial[((int64_t{blockIdx.x} * kStatistics + s) * a.k.heads + head) * D + c] = total;
  }
}

// A CTA per head and statistic: the splits in kStrips strips, then these.
template <class S>
__global__ void __launch_bounds__(kCombineThreads)
    combine_statistics_kernel(__grid_constant__ StatisticsArgs const a) {
  constexpr int D = S::D, kStrips = kCombineThreads / D;
  __shared__ float parts[kStrips][D];
  wait_for_earlier_kernels();
  int64_t const heads = a.k.heads, head = blockIdx.x;
  int const statistic = blockIdx.y, c = threadIdx.x % D, strip = threadIdx.x / D;
  float total = nothing(statistic);
  CUTE_UNROLL
  for (int split = strip; split < a.splits; split += kStrips) {
    int64_t const from = (int64_t{split} * kStatistics + statistic) * heads + head;
    total = combined(statistic, total, a.partial[from * D + c]);
  }
  parts[strip][c] = total;
  __syncthreads();
  if (strip > 0) return;
  for (int n = 1; n < kStrips; ++n) total = combined(statistic, total, parts[n][c]);
  a.statistics[(statistic * heads + head) * D + c] = total;
}

template <class S>
cudaError_t launch_statistics(StatisticsArgs const& a, cudaStream_t stream) {
  auto const heads = static_cast<unsigned>(a.k.heads);
  statistics_kernel<S><<<dim3(a.splits, heads), kStatisticsThreads, 0, stream>>>(a);
  if (cudaError_t const status = cudaGetLastError(); status != cudaSuccess) return status;
  return launch_early(combine_statistics_kernel<S>, dim3(heads, kStatistics), kCombineThreads, 0,
                      stream, a);
}

}  // namespace ringfa3
