// O and LSE of rows between hops, in global memory: O normalised, in float32.
#pragma once

#include "forward/shapes.cuh"

namespace ringfa3 {

using namespace cute;

// Where a lane has its part of two rows of a tile, `row` and `row + 8`: element 4 * j + 2 * r + c
// of an accumulator is column 8 * j + 2 * (lane % 4) + c of row r.
template <class Traits>
struct PartialRows {
  static constexpr int kSize = Traits::D / 2;  // of the accumulator
  float* lse;                                  // of the first; the other's is 8 on
  float* o;                                    // the first column
  int64_t offset;                              // from the first row of O to the other

  CUTE_DEVICE PartialRows(ForwardParams<Traits> const& p, Work const& work, int row, int lane) {
    int64_t const token = work.tile.row0 + row;
    lse = p.args.lse + work.head * p.args.lse_head_stride + token;
    o = p.args.partial_out + (token * p.heads + work.head) * Traits::D + 2 * (lane % 4);
    offset = int64_t{8} * p.heads * Traits::D;
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

// The O and LSE that earlier hops left of a thread's rows, `row` and `row + 8` of the tile. Of rows
// past its end O keeps what it has, and the LSE is -inf.
template <class Traits, class Output>
CUTE_DEVICE void load_partial(ForwardParams<Traits> const& p, Work const& work, int row, int lane,
                              Output& o, float (&lse)[2]) {
  PartialRows<Traits> const at(p, work, row, lane);
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
