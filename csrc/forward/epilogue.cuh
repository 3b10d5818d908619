// The end of a tile: storing O and LSE. With two stages of Q, the next tile's S and a tile's last
// P V are issued together (`ForwardConsumer::finish_tile`):
//
//   wgmma       | S of the next tile, PV(last)              |
//   registers   | LSE and weight of O | begin the next tile | wait for both | store O, LSE
//
// The LSE of a first hop is stored during the products (`early_lse`). A later hop waits: an item
// that is issued again reads the LSE of earlier hops. With use_row_max only the recorded rows are
// stored. With one stage of Q, PV(last) runs alone, and S of the next tile follows the stores.
#pragma once

#include "hopper/store.cuh"
#include "forward/partial_output.cuh"
#include "forward/shapes.cuh"
#include "forward/softmax.cuh"

namespace ringfa3 {

using namespace cute;

// One warp: stores its 16 rows of O by TMA, from a box (16, DV) in shared memory, while it
// continues.
template <class Shapes, class Output>
CUTE_DEVICE void store_box(CUtensorMap const& map, typename Shapes::Element* box, Output const& o,
                           int lane, int token, int head) {
  using Element = typename Shapes::Element;
  constexpr int kLine = kSlab * sizeof(Element);
  tma_store_wait<0>();  // the store of the last tile has read the box
  __syncwarp();
  uint32_t const line = cast_smem_ptr_to_uint(box) + lane % kWarpRows * kLine;
  CUTE_UNROLL
  for (int j = 0; j < Shapes::DV / 8; j += 2) {  // lanes 0-15: column 8j; 16-31: column 8j + 8
    int const unit = (j + lane / 16) % 8 ^ lane % 8;
    uint32_t const at = line + j / 8 * kWarpRows * kLine + unit * 16;
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at),
                 "r"(packed<Element>(o, 0, j)), "r"(packed<Element>(o, 1, j)),
                 "r"(packed<Element>(o, 0, j + 1)), "r"(packed<Element>(o, 1, j + 1))
                 : "memory");
  }
  tma_store_fence();
  __syncwarp();
  if (lane == 0) {
    CUTE_UNROLL
    for (int column = 0; column < Shapes::DV; column += kSlab) {
      SM90_TMA_STORE_3D::copy(&map, box + column * kWarpRows, column, token, head);
    }
    tma_store_arrive();
  }
}

// Rows whose last block is in P: computes the LSE, and the factor `weight` that normalises O after
// the last product. The last hop counts the sink.
template <class Shapes, class Element>
CUTE_DEVICE void finish_rows(ForwardParams<Shapes> const& p, WorkItem const& work,
                             OnlineSoftmax<Element> const& rows, float (&weight)[2],
                             float (&lse)[2]) {
  float const sink = sink_of<Shapes>(p.args, work.tile, work.head);
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) {
    float const total = quad_sum(rows.total[r]);
    float const divisor = Shapes::kPolicy.sums_rounded ? quad_sum(rows.rounded[r]) : total;
    weight[r] = divisor == 0.f ? 0.f : 1.f / divisor;
    lse[r] = total == 0.f ? sink : (rows.shift[r] + __log2f(total)) * kLn2;
    if (sink != -INFINITY && total != 0.f) {  // both true for NaN
      float const own = rows.shift[r] + __log2f(total), other = sink * kLog2e;
      float const both = fmaxf(own, other) + __log2f(1.f + exp2f(-fabsf(own - other)));
      weight[r] *= exp2f(own - both);
      lse[r] = both * kLn2;
    }
  }
}

// The number of [-most, most] that is nearest to x; NaN stays.
CUTE_DEVICE float clamp_or_nan(float x, float most) {
  asm("min.ftz.NaN.f32 %0, %0, %1;" : "+f"(x) : "f"(most));
  asm("max.ftz.NaN.f32 %0, %0, %1;" : "+f"(x) : "f"(-most));
  return x;
}

// E4M3 V: normalises rows by `weight`, which is 0 for a fully masked row; applies V's scale and
// mean. Rounded P may sum to more than P, so the mean of V's numbers may exceed them all: it is
// limited to e4m3's range. With V's mean, O may still exceed V by the rounding of V's numbers:
// float16 O is limited to float16's range, else it would be infinite for V near 65504.
template <class Shapes, class Output>
CUTE_DEVICE void scale_values(ForwardParams<Shapes> const& p, WorkItem const& work, int lane,
                              Output& o, float const (&weight)[2]) {
  float const seen[2] = {weight[0] == 0.f ? 0.f : 1.f, weight[1] == 0.f ? 0.f : 1.f};
  int const at = work.kv_head * Shapes::DV + 2 * (lane % 4);
  CUTE_UNROLL
  for (int j = 0; j < Shapes::DV / 8; ++j) {
    float2 const scale = __ldg(reinterpret_cast<float2 const*>(p.scales.v_scale + at + 8 * j));
    float2 const mean = __ldg(reinterpret_cast<float2 const*>(p.scales.v_mean + at + 8 * j));
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      float& x = o(4 * j + 2 * r);
      float& y = o(4 * j + 2 * r + 1);
      x = fmaf(clamp_or_nan(x * weight[r], 448.f), scale.x, seen[r] * mean.x);
      y = fmaf(clamp_or_nan(y * weight[r], 448.f), scale.y, seen[r] * mean.y);
      if constexpr (is_same_v<typename Shapes::Element, cutlass::half_t>) {
        x = clamp_or_nan(x, 65504.f), y = clamp_or_nan(y, 65504.f);
      }
    }
  }
}

// Whether the two rows of a lane hold finite numbers below 1e18. Larger numbers may count as not
// finite: their squares overflow.
template <class Output>
CUTE_DEVICE void finite_rows(Output const& o, bool (&finite)[2]) {
  float probe[2][2] = {};
  CUTE_UNROLL
  for (int n = 0; n < size(o); n += 2) {
    float& sum = probe[n / 2 % 2][n / 4 % 2];
    sum = fmaf(o(n), o(n + 1), sum);
  }
  finite[0] = fabsf(probe[0][0] + probe[0][1]) < INFINITY;
  finite[1] = fabsf(probe[1][0] + probe[1][1]) < INFINITY;
}

// The rows that a lane stores of its two, the same in a quad:
//
//   the queue repeats no item   all rows of the tile
//   the first pass              rows of the tile that are finite; the work item records the others
//   a pass with use_row_max     the rows that the item has recorded
template <bool Repeats>
CUTE_DEVICE void select_rows(WorkItem& work, bool const (&finite)[2], int warp, int row, int lane,
                             bool (&stored)[2]) {
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) {
    stored[r] = row + 8 * r < work.tile.rows;
    if constexpr (Repeats) {
      uint32_t lanes = __ballot_sync(0xffffffff, stored[r] && !finite[r]);
      if (work.use_row_max) {
        lanes = work.overflow[warp][r];
      } else if (lane == 0) {
        work.overflow[warp][r] = lanes;
      }
      bool const overflows = (lanes >> (lane & ~3) & 15) != 0;
      stored[r] = stored[r] && overflows == bool(work.use_row_max);
    }
  }
}

// Stores the LSE of the rows that are `stored`.
template <class Shapes>
CUTE_DEVICE void store_lse(ForwardParams<Shapes> const& p, WorkItem const& work, int row, int lane,
                           float const (&lse)[2], bool const (&stored)[2]) {
  float* const at = lse_of(p, work, row);
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) {
    if (lane % 4 == 0 && stored[r]) at[8 * r] = lse[r];
  }
}

// Stores the normalised O of a warp's 16 rows, those that are `stored`: the output dtype if the
// tile is kLast, else the float32 partial output. `box` is the warp's box in shared memory. `all`:
// every row of the warp is stored. A quad of lanes holds two rows, 8 apart.
template <class Shapes, class Output>
CUTE_DEVICE void store_rows(ForwardParams<Shapes> const& p, WorkItem const& work, int warp,
                            int lane, Output const& o, bool const (&stored)[2], bool all,
                            typename Shapes::Element* box) {
  using Element = typename Shapes::Element;
  ForwardArgs const& a = p.args;
  Tile const& tile = work.tile;
  if (!(tile.flags & kLast)) {
    store_partial<Shapes>(p, work, o, stored);
    return;
  }
  if constexpr (Shapes::kPolicy.boxed_o) {
    if (all) {
      store_box<Shapes>(p.out, box, o, lane, tile.row0 + kWarpRows * warp, work.head);
      return;
    }
  }
  int const row = kWarpRows * warp + lane / 4;
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) {
    Element* const out = static_cast<Element*>(a.out.data) +
                         (tile.row0 + row + 8 * r) * a.out.token_stride +
                         work.head * a.out.head_stride;
    store_row<Element, Shapes::DV, !Shapes::kPolicy.boxed_o>(out, o, r, lane, stored[r],
                                                             a.out.head_dim);
  }
}

// A consumer: normalises O of a tile, whose products have ended, and stores it; stores LSE unless
// it was stored `early`. `inside`: which of the lane's rows belong to the tile.
template <class Consumer>
CUTE_DEVICE void store_tile(Consumer& c, WorkItem& work, bool const (&inside)[2], bool use_row_max,
                            bool early_lse, float (&lse)[2]) {
  using Shapes = typename Consumer::Shapes;
  if constexpr (Shapes::QuantisedV) {
    scale_values<Shapes>(c.p, work, c.lane, c.o, c.o_scale);
    if (!(work.tile.flags & kFirst)) merge_earlier<Shapes>(c.p, work, c.row, c.o, lse);
  } else {
    scale_rows(c.o, c.o_scale);
  }
  bool finite[2] = {true, true};
  if constexpr (Shapes::MayOverflow) finite_rows(c.o, finite);
  bool stored[2] = {inside[0] && finite[0], inside[1] && finite[1]};
  bool const all = __all_sync(0xffffffff, stored[0] && stored[1] && !use_row_max);
  if (!all) select_rows<Shapes::MayOverflow>(work, finite, c.warp, c.row, c.lane, stored);
  if (!early_lse) store_lse<Shapes>(c.p, work, c.row, c.lane, lse, stored);
  auto* const box = c.smem.o + kWarpRows * Shapes::DV * c.warp;
  store_rows<Shapes>(c.p, work, c.warp, c.lane, c.o, stored, all, box);
}

}  // namespace ringfa3
