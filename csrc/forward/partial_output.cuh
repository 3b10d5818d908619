// The partial output between hops, in global memory: normalised O in float32, and LSE.
#pragma once

#include "forward/shapes.cuh"

namespace ringfa3 {

using namespace cute;

// Elements 4j, ..., 4j + 3 of a thread's accumulator: columns 8j + 2 (lane % 4) and the next one of
// rows `row` and `row + 8`. O lies in this order, so that a warp's accesses are contiguous:
// (padded rows / 64, heads, DV / 8, 128 threads) of float4. Returns the slice of consumer
// `warpgroup`.
template <class Shapes>
CUTE_DEVICE float4* partial_o(ForwardParams<Shapes> const& p, WorkItem const& work, int warpgroup) {
  int64_t const group = work.tile.padded_row0 / 64 + warpgroup;
  return reinterpret_cast<float4*>(p.args.partial_out) +
         (group * p.heads + work.head) * (Shapes::DV / 8 * kWarpgroup);
}

// One thread: brings O of earlier hops into L2 for all consumers.
template <class Shapes>
CUTE_DEVICE void prefetch_partial(ForwardParams<Shapes> const& p, WorkItem const& work) {
  constexpr int kBytes = 64 * Shapes::DV * sizeof(float);
  for (int warpgroup = 0; 64 * warpgroup < work.tile.rows; ++warpgroup) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(partial_o(p, work, warpgroup)),
                 "r"(kBytes)
                 : "memory");
  }
}

// A consumer thread's part of its warpgroup's slice.
template <class Shapes>
CUTE_DEVICE float4* own_partial_o(ForwardParams<Shapes> const& p, WorkItem const& work) {
  return partial_o(p, work, threadIdx.x / kWarpgroup - Shapes::Producers) +
         threadIdx.x % kWarpgroup;
}

// The address of the LSE of a lane's row `row`; the LSE of `row + 8` is 8 floats further.
template <class Shapes>
CUTE_DEVICE float* lse_of(ForwardParams<Shapes> const& p, WorkItem const& work, int row) {
  return p.args.lse + work.head * p.args.lse_head_stride + work.tile.row0 + row;
}

// Loads the LSE of earlier hops for rows `row` and `row + 8` of the tile; -inf past its end.
template <class Shapes>
CUTE_DEVICE void load_lse(ForwardParams<Shapes> const& p, WorkItem const& work, int row,
                          float (&lse)[2]) {
  float const* const at = lse_of(p, work, row);
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) lse[r] = row + 8 * r < work.tile.rows ? at[8 * r] : -INFINITY;
}

// Loads O of earlier hops. Rows past the tile's end are padding.
template <class Shapes, class Output>
CUTE_DEVICE void load_partial(ForwardParams<Shapes> const& p, WorkItem const& work, Output& o) {
  float4 const* const at = own_partial_o(p, work);
  CUTE_UNROLL
  for (int j = 0; j < Shapes::DV / 8; ++j) {
    float4 const x = at[j * kWarpgroup];
    o(4 * j) = x.x, o(4 * j + 1) = x.y, o(4 * j + 2) = x.z, o(4 * j + 3) = x.w;
  }
}

// Adds earlier hops to rows of this hop, which are normalised; `lse` becomes that of both.
template <class Shapes, class Output>
CUTE_DEVICE void merge_earlier(ForwardParams<Shapes> const& p, WorkItem const& work, int row,
                               Output& o, float (&lse)[2]) {
  float earlier[2], by[2], by_earlier[2];
  load_lse<Shapes>(p, work, row, earlier);
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) {
    bool const seen = earlier[r] != -INFINITY, here = lse[r] != -INFINITY;  // true for NaN
    float const high = fmaxf(lse[r], earlier[r]);
    by[r] = here ? exp2f((lse[r] - high) * kLog2e) : 0.f;
    by_earlier[r] = seen ? exp2f((earlier[r] - high) * kLog2e) : 0.f;
    float const sum = by[r] + by_earlier[r];
    if (sum == 0.f) continue;
    lse[r] = high + __log2f(sum) * kLn2;
    by[r] = __fdividef(by[r], sum), by_earlier[r] = __fdividef(by_earlier[r], sum);
  }
  float4 const* const at = own_partial_o(p, work);
  CUTE_UNROLL
  for (int j = 0; j < Shapes::DV / 8; ++j) {
    float4 const x = at[j * kWarpgroup];
    float const old[4] = {x.x, x.y, x.z, x.w};
    CUTE_UNROLL
    for (int n = 0; n < 4; ++n) {
      float const added = by_earlier[n / 2] == 0.f ? 0.f : old[n] * by_earlier[n / 2];
      o(4 * j + n) = fmaf(o(4 * j + n), by[n / 2], added);
    }
  }
}

// Stores O of the rows that are `stored`.
template <class Shapes, class Output>
CUTE_DEVICE void store_partial(ForwardParams<Shapes> const& p, WorkItem const& work,
                               Output const& o, bool const (&stored)[2]) {
  float4* const at = own_partial_o(p, work);
  if (stored[0] && stored[1]) {
    CUTE_UNROLL
    for (int j = 0; j < Shapes::DV / 8; ++j) {
      at[j * kWarpgroup] = make_float4(o(4 * j), o(4 * j + 1), o(4 * j + 2), o(4 * j + 3));
    }
    return;
  }
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) {
    if (!stored[r]) continue;
    CUTE_UNROLL
    for (int j = 0; j < Shapes::DV / 8; ++j) {
      float2* const pairs = reinterpret_cast<float2*>(at + j * kWarpgroup);
      pairs[r] = make_float2(o(4 * j + 2 * r), o(4 * j + 2 * r + 1));
    }
  }
}

}  // namespace ringfa3
