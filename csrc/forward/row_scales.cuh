// The factors of a thread's two rows of scores, and the offset that 8-bit operands add to LSE.
#pragma once

#include "forward/shapes.cuh"
#include "forward/softmax.cuh"
#include "hopper/wgmma.cuh"

namespace ringfa3 {

using namespace cute;

// Operands in 16 bits: one number of the launch.
template <class Shapes, bool Quantised = Shapes::Quantised>
struct RowScales {
  CUTE_DEVICE void begin_tile(ForwardParams<Shapes> const&, WorkItem const&, int) {}
  CUTE_DEVICE void begin_block(typename Shapes::SharedStorage&, int) {}
  CUTE_DEVICE void load_offset(ForwardParams<Shapes> const&, WorkItem const&, int) {}
  CUTE_DEVICE void take_offset(ForwardParams<Shapes> const&, WorkItem const&, int, float (&)[2]) {}
  CUTE_DEVICE void finish(float (&)[2], float (&)[2]) const {}
  CUTE_DEVICE void to_float(auto const&) {}
  CUTE_DEVICE void to_float_again(auto const&) {}
  CUTE_DEVICE float of_block(ForwardParams<Shapes> const& p) const { return p.scale_log2; }
};

// 8-bit operands: a scale for each row, times the scale of the block's key tile.
template <class Shapes>
struct RowScales<Shapes, true> {
  // The lower bound of row_scale; fmaxf also replaces a NaN by it. Times the smallest scale of K it
  // stays normal: --use_fast_math flushes subnormals to 0, and a masked score, -inf, times 0 is
  // NaN.
  static constexpr float kLeast = 0x1p-65f;
  float row_scale[2];  // of Q, to log2 units
  float k_scale;       // of the block of S
  float offset[2];     // nats by which centring K lowers the scores of each row; NaN: Q had a NaN

  // `row` and `row + 8` of the tile are those of the thread.
  CUTE_DEVICE void begin_tile(ForwardParams<Shapes> const& p, WorkItem const& work, int row) {
    load(p, work, row, p.scales.q_scale, p.scale_log2, row_scale);
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) row_scale[r] = fmaxf(row_scale[r], kLeast);
  }
  // Before the stage of K is released.
  CUTE_DEVICE void begin_block(typename Shapes::SharedStorage& smem, int stage) {
    k_scale = *static_cast<float volatile*>(&smem.k_scale[stage]);
  }
  CUTE_DEVICE void load_offset(ForwardParams<Shapes> const& p, WorkItem const& work, int row) {
    load(p, work, row, p.scales.k_offset, p.args.softmax_scale, offset);
  }
  // Rows that are not fully masked: adds the offset to LSE; O becomes NaN where Q had a NaN.
  CUTE_DEVICE void finish(float (&lse)[2], float (&weight)[2]) const {
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      if (lse[r] == -INFINITY) continue;
      lse[r] += offset[r];
      if (isnan(offset[r])) weight[r] = NAN;
    }
  }
  CUTE_DEVICE void take_offset(ForwardParams<Shapes> const& p, WorkItem const& work, int row,
                               float (&lse)[2]) {
    load_offset(p, work, row);
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      if (lse[r] != -INFINITY) lse[r] -= offset[r];
    }
  }
  CUTE_DEVICE RowScale of_block(ForwardParams<Shapes> const&) const {
    return {{row_scale[0] * k_scale, row_scale[1] * k_scale}};
  }
  // Makes integers of S float32.
  template <class Scores>
  CUTE_DEVICE void to_float(Scores& s) {
    if constexpr (kIntegers) to_float_bits(s), propagate_nan_scale(s);
  }
  // The same after a softmax that has converted them one by one.
  template <class Scores>
  CUTE_DEVICE void to_float_again(Scores& s) {
    if constexpr (kIntegers) to_float_bits_by_adding(s), propagate_nan_scale(s);
  }

 private:
  static constexpr bool kIntegers = is_same_v<typename Shapes::Types::Score, int32_t>;

  // Int8 K has no NaN. Where its tile has one, k_scale is NaN: all of S becomes NaN, so that a mask
  // can still hide it.
  template <class Scores>
  CUTE_DEVICE void propagate_nan_scale(Scores& s) {
    if (!isnan(k_scale)) return;
    k_scale = 1.f;
    CUTE_UNROLL
    for (int n = 0; n < size(s); ++n) s(n) = __float_as_int(NAN);
  }

  // Numbers of `from` (heads, tokens) times a factor; 0 past the end of the tile.
  static CUTE_DEVICE void load(ForwardParams<Shapes> const& p, WorkItem const& work, int row,
                               float const* from, float factor, float (&to)[2]) {
    float const* const at = from + work.head * p.args.q.tokens + work.tile.row0 + row;
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      to[r] = row + 8 * r < work.tile.rows ? __ldg(at + 8 * r) * factor : 0.f;
    }
  }
};

}  // namespace ringfa3
