// The centres of K and V, which are subtracted from them, and V's scale, from statistics of parts
// of the tokens. Sums have one order, whatever the order of the CTAs: equal bits from run to run.
#pragma once

#include <cute/tensor.hpp>

#include "hopper/launch.cuh"
#include "hopper/sync.cuh"
#include "params.h"
#include "quantise/formats.cuh"

namespace ringfa3 {

using namespace cute;

constexpr int kStatistics = 4;  // the sum of K; the sum, maximum and minimum of V
constexpr int kCentresThreads = 1024;

CUTE_DEVICE float nothing(int statistic) {
  return statistic < 2 ? 0.f : statistic == 2 ? -INFINITY : INFINITY;
}

CUTE_DEVICE float combined(int statistic, float a, float b) {
  return statistic < 2 ? a + b : statistic == 2 ? fmaxf(a, b) : fminf(a, b);
}

// Rounds to the nearest finite bfloat16.
CUTE_DEVICE float rounded_centre(float x) {
  constexpr float kMost = 0x1.fep127f;
  return static_cast<float>(cutlass::bfloat16_t(fminf(fmaxf(x, -kMost), kMost)));
}

// The mean rounded to bfloat16; 0 where the sum has overflowed.
CUTE_DEVICE float mean_of(float sum, int64_t tokens) {
  float const mean = __fdiv_rn(sum, static_cast<float>(cute::max(tokens, int64_t{1})));
  return fabsf(sum) < INFINITY ? rounded_centre(mean) : 0.f;
}

// The largest distance of a number of [low, high] from `centre`.
CUTE_DEVICE float reach(float low, float high, float centre) {
  return fmaxf(high - centre, centre - low);
}

// A CTA per head. Strip n of a statistic's threads combines parts n, n + kStrips, ...; then the
// strips are combined in order. So up to kStrips parts are combined in their own order.
template <int D>
__global__ void __launch_bounds__(kCentresThreads)
    centres_kernel(__grid_constant__ CentresArgs const a) {
  constexpr int kStrips = kCentresThreads / (kStatistics * D);
  __shared__ float strips[kStrips][kStatistics][D];
  wait_for_earlier_kernels();
  int64_t const heads = a.heads, head = blockIdx.x;
  int const c = threadIdx.x % D, s = threadIdx.x / D % kStatistics;
  int const strip = threadIdx.x / (D * kStatistics);
  float total = nothing(s);
  CUTE_UNROLL
  for (int part = strip; part < a.num_parts; part += kStrips) {
    total = combined(s, total, a.parts[((int64_t{part} * kStatistics + s) * heads + head) * D + c]);
  }
  strips[strip][s][c] = total;
  __syncthreads();
  if (strip == 0) {
    for (int n = 1; n < kStrips; ++n) total = combined(s, total, strips[n][s][c]);
    a.statistics[(s * heads + head) * D + c] = strips[0][s][c] = total;
  }
  __syncthreads();
  if (threadIdx.x >= D) return;
  float const high = strips[0][2][c], low = strips[0][3][c];
  float v_mean = a.int8 ? 0.f : mean_of(strips[0][1][c], a.tokens);
  // Where the sum, or the distance from the mean, has overflowed: the middle of the range.
  bool const summed = fabsf(strips[0][1][c]) < INFINITY;  // false for NaN
  if (!a.int8 && !(summed && reach(low, high, v_mean) < INFINITY)) {
    v_mean = rounded_centre(0.5f * high + 0.5f * low);
  }
  // Differences of float32 numbers are 0 or at least 2^-24 of one of them, so the second number is
  // the larger one where all are 0: mean / scale must not overflow.
  float const amax = fmaxf(reach(low, high, v_mean), 0x1p-60f * fabsf(v_mean));
  auto centre = [&](int n) -> float& { return a.centres[(n * heads + head) * D + c]; };
  centre(0) = mean_of(strips[0][0][c], a.tokens);
  centre(1) = v_mean;
  centre(2) = a.int8 ? 1.f : scale_of<E4M3>(amax, kLeastVScale);
}

template <int D>
cudaError_t launch_centres(CentresArgs const& a, cudaStream_t stream) {
  return launch_early(centres_kernel<D>, dim3(a.heads), kCentresThreads, 0, stream, a);
}

}  // namespace ringfa3
