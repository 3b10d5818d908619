// After the hops: the parts of a rank's dK/dV that peers have returned.
#pragma once

#include <cutlass/numeric_conversion.h>

#include "ring/rows.cuh"

namespace ringfa3 {

// Adds four float32 at once. The warps share the rows of all runs.
__global__ void __launch_bounds__(kRowThreads, kRowCtas)
    add_returns_kernel(__grid_constant__ AddReturnsArgs const a) {
  wait_for_earlier_kernels();
  int64_t const thread = int64_t{blockIdx.x} * kRowThreads + threadIdx.x;
  int64_t const threads = int64_t{gridDim.x} * kRowThreads;
  auto* const sum = reinterpret_cast<float4*>(a.sum);                        // (n, row_floats / 4)
  auto const* const returned = reinterpret_cast<float4 const*>(a.returned);  // the same
  int64_t const parts = a.row_floats / 4;
  for (int run = 0; run < a.runs.count; ++run) {
    int64_t const end = a.runs.end[run] * parts;
#pragma unroll 4
    for (int64_t i = a.runs.begin[run] * parts + thread; i < end; i += threads) {
      float4 x = sum[i];
      float4 const y = returned[i];
      x.x += y.x, x.y += y.y, x.z += y.z, x.w += y.w;
      sum[i] = x;
    }
  }
}

CUTE_DEVICE void add_eight(float (&x)[8], float const* from) {
  auto const* const y = reinterpret_cast<float4 const*>(from);
  float4 const low = y[0], high = y[1];
  x[0] += low.x, x[1] += low.y, x[2] += low.z, x[3] += low.w;
  x[4] += high.x, x[5] += high.y, x[6] += high.z, x[7] += high.w;
}

// A warp rounds the dK and dV of a token, 8 numbers a lane at once: the rank's own, then the sum of
// what peers returned, then what came last.
template <class Element>
__global__ void __launch_bounds__(kRowThreads, kRowCtas)
    round_gradients_kernel(__grid_constant__ RoundGradientsArgs const a) {
  wait_for_earlier_kernels();
  launch_next_kernel();
  int const lane = threadIdx.x % kWarp;
  int const of_k = a.row_floats / 16;  // groups of 8 numbers
  each_token(a.tokens, [&](int64_t token) {
    int const row = published_row(a.rows, token);
    bool const seen = a.sum != nullptr && is_published(a.rows, row);
    bool const returned = seen && holds(a.runs, row);
#pragma unroll 2
    for (int i = lane; i < 2 * of_k; i += kWarp) {
      int64_t const there = int64_t{row} * a.row_floats + 8 * i;
      float x[8] = {};
      add_eight(x, a.own + token * a.row_floats + 8 * i);
      if (seen) add_eight(x, a.sum + there);
      if (returned) add_eight(x, a.returned + there);
      cutlass::Array<float, 8> const eight = reinterpret_cast<cutlass::Array<float, 8> const&>(x);
      auto const rounded = cutlass::NumericArrayConverter<Element, float, 8>{}(eight);
      auto* const to = static_cast<uint4*>(i < of_k ? a.dk : a.dv);  // (t, hk, d)
      to[token * of_k + (i < of_k ? i : i - of_k)] = reinterpret_cast<uint4 const&>(rounded);
    }
  });
}

inline cudaError_t launch_add_returns(AddReturnsArgs const& a, cudaStream_t stream) {
  int64_t rows = 0;
  for (int i = 0; i < a.runs.count; ++i) rows += a.runs.end[i] - a.runs.begin[i];
  return launch_warps(add_returns_kernel, rows, stream, a);
}

template <class Element>
cudaError_t launch_round_gradients(RoundGradientsArgs const& a, cudaStream_t stream) {
  return launch_warps(round_gradients_kernel<Element>, a.tokens, stream, a);
}

}  // namespace ringfa3
