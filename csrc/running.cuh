// O and LSE of rows between hops, in global memory: O normalised, in float32.
#pragma once

#include "traits.cuh"

namespace ringfa3 {

using namespace cute;

// Where row `row` of a tile has its LSE, and where a lane has its first two columns of O. The
// others follow 8 by 8.
template <class Traits>
struct RunningRow {
  static constexpr int D = Traits::D;
  float* lse;
  float* o;

  CUTE_DEVICE RunningRow(ForwardParams<Traits> const& p, Work const& work, int row, int lane) {
    int64_t const token = work.tile.row0 + row;
    lse = p.args.lse + work.head * p.args.lse_head_stride + token;
    o = p.args.running + (token * p.heads + work.head) * D + 2 * (lane % 4);
  }

  // Row r of the two that a quad of lanes holds; element n of the accumulator, 4 * j + 2 * r + c,
  // is column 8 * j + 2 * (lane % 4) + c.
  template <class Output>
  CUTE_DEVICE void load(Output& to, int r) const {
    CUTE_UNROLL
    for (int n = 2 * r; n < D / 2; n += 4) {
      float2 const pair = *reinterpret_cast<float2 const*>(o + 2 * (n - 2 * r));
      to(n) = pair.x, to(n + 1) = pair.y;
    }
  }

  template <class Output>
  CUTE_DEVICE void store(Output const& from, int r) const {
    CUTE_UNROLL
    for (int n = 2 * r; n < D / 2; n += 4) {
      *reinterpret_cast<float2*>(o + 2 * (n - 2 * r)) = make_float2(from(n), from(n + 1));
    }
  }
};

// The O and LSE that earlier hops left of a thread's rows, `row` and `row + 8` of the tile. Of rows
// past its end O keeps what it has, and the LSE is -inf.
template <class Traits, class Output>
CUTE_DEVICE void load_running(ForwardParams<Traits> const& p, Work const& work, int row, int lane,
                              Output& o, float (&lse)[2]) {
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) {
    lse[r] = -INFINITY;
    if (row + 8 * r < work.tile.rows) {
      RunningRow<Traits> const at(p, work, row + 8 * r, lane);
      lse[r] = *at.lse;
      at.load(o, r);
    }
  }
}

}  // namespace ringfa3
