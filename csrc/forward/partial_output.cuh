// The partial output between hops, in global memory: normalised O in float32, and LSE.
#pragma once

#include "forward/shapes.cuh"

namespace ringfa3 {

using namespace cute;

// Addresses of a lane's part of rows `row` and `row + 8` of a tile. Element 4j + 2r + c of an
// accumulator is column 8j + 2 (lane % 4) + c of row r.
template <class Shapes>
struct PartialRows {
  static constexpr int kSize = Shapes::D / 2;  // of the accumulator
  float* lse;                                  // of `row`; that of `row + 8` is 8 floats on
  float* o;                                    // the lane's first column of `row`
  int64_t offset;                              // from `row` to `row + 8` of O, in floats

  CUTE_DEVICE PartialRows(ForwardParams<Shapes> const& p, WorkItem const& work, int row, int lane) {
    int64_t const token = work.tile.row0 + row;
    lse = p.args.lse + work.head * p.args.lse_head_stride + token;
    o = p.args.partial_out + (token * p.heads + work.head) * Shapes::D + 2 * (lane % 4);
    offset = int64_t{8} * p.heads * Shapes::D;
  }

  template <class Output>
  CUTE_DEVICE void load(Output& to, int r) const {
    CUTE_UNROLL
    for (int n = 2 * r; n < kSize; n += 4) {
      float2 const pair = *reinterpret_cast<float2 const*>(o + r * offset + 2 * (n - 2 * r));
      to(n) = pair.x, to(n + 1) = pair.y;
    }
  }

  template <class Output>
  CUTE_DEVICE void store(Output const& from, int r) const {
    CUTE_UNROLL
    for (int n = 2 * r; n < kSize; n += 4) {
      float2 const pair = make_float2(from(n), from(n + 1));
      *reinterpret_cast<float2*>(o + r * offset + 2 * (n - 2 * r)) = pair;
    }
  }
};

// Loads O and LSE of earlier hops for rows `row` and `row + 8` of the tile. In rows past its end O
// is left unchanged and LSE is -inf.
template <class Shapes, class Output>
CUTE_DEVICE void load_partial(ForwardParams<Shapes> const& p, WorkItem const& work, int row,
                              int lane, Output& o, float (&lse)[2]) {
  PartialRows<Shapes> const at(p, work, row, lane);
  lse[0] = lse[1] = -INFINITY;
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) {
    if (row + 8 * r < work.tile.rows) {
      lse[r] = at.lse[8 * r];
      at.load(o, r);
    }
  }
}

}  // namespace ringfa3
