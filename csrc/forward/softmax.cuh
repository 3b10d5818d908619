// Online softmax in registers (Algorithm 1 of the paper).
#pragma once

#include <cute/tensor.hpp>

#include "hopper/warp.cuh"

namespace ringfa3 {

using namespace cute;

// Of a quad of lanes, which holds two rows of an accumulator: the sum and the maximum over its
// lanes.
CUTE_DEVICE float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffff, x, 1);
  return x + __shfl_xor_sync(0xffffffff, x, 2);
}
CUTE_DEVICE float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffff, x, 2));
}

// Bounds of a lane's sum of P over a block, and how far a new shift lies below what it comes from,
// in log2 units, in a dtype of P. These distances are whole numbers, so that P of a key that
// dominates its row is a power of two.
template <class Element>
struct SumRange {  // bfloat16, with the exponents of float32
  // The shift of a row that begins may stay -kBelowZero if its largest sum lies in
  // [kLeast, kFirst].
  static constexpr float kLeast = 0x1p-6f, kFirst = 0x1p16f;
  // A larger sum than kRaise raises the shift; P of a larger one than kLargest is computed again.
  static constexpr float kRaise = 0x1p88f, kLargest = 0x1p104f;
  // Below 0; below the row's maximum, or the exponent of its largest sum; below the LSE of earlier
  // hops.
  static constexpr int kBelowZero = 0, kBelowMaximum = 0, kBelowEarlier = 0;
};
// Float16 P below 2^-14 has an error of up to 2^-25. Divided by the row's total, that is an error
// of the key's weight. Invariant: a shift is at most the LSE of the keys seen so far, less
// kBelowMaximum. LSE never falls, so the total is at least 2 from the row's first key on, and the
// error of a weight is at most 2^-26. Weights rounded to float16 are off by up to 2^-25. Each way
// to a shift holds the invariant:
//   -kBelowZero  the largest sum is at least kLeast, and so is the total;
//   `rescale`    LSE is at least the maximum;
//   `raise`      LSE is at least that of the largest sum, which then lies in [2, 4);
//   `resume`     kBelowEarlier is larger: P of near-equal keys has all bits up to 2^24 of them.
// A lower shift leaves P of later keys less room: from the maximum to kLargest 2^15. With less of
// it more blocks compute P again, which costs time: see docs/dev/kernel-experiments.md.
template <>
struct SumRange<cutlass::half_t> {
  static constexpr float kLeast = 0x1p1f, kFirst = 0x1p10f;
  static constexpr float kRaise = 0x1p9f, kLargest = 65504.f;  // the largest float16
  static constexpr int kBelowZero = 2, kBelowMaximum = 1, kBelowEarlier = 10;
};
template <>
struct SumRange<cutlass::float_e4m3_t> {
  // The largest value is 448: no element of a sum up to 432 is rounded above it. `settle` raises
  // the shift of this block, never of later ones alone.
  static constexpr float kRaise = 432.f, kLargest = 432.f;
  // A lane's elements of a block, at most 32 of up to 2^3, fit 432.
  static constexpr int kBelowZero = 0, kBelowMaximum = 3, kBelowEarlier = 0;
};

// What scores are multiplied by, to log2 units: one number, or one for each of a thread's rows.
struct RowScale {
  float by[2];
};
CUTE_DEVICE float of_row(float scale, int) { return scale; }
CUTE_DEVICE float of_row(RowScale const& scale, int r) { return scale.by[r]; }

// Multiplies the two rows of an accumulator.
template <class Output>
CUTE_DEVICE void scale_rows(Output& o, float const (&by)[2]) {
  CUTE_UNROLL
  for (int n = 0; n < size(o); n += 4) {
    o(n) *= by[0], o(n + 1) *= by[0], o(n + 2) *= by[1], o(n + 3) *= by[1];
  }
}

template <int R, class Output>
CUTE_DEVICE void scale_row(Output& o, float by) {
  CUTE_UNROLL
  for (int n = 2 * R; n < size(o); n += 4) o(n) *= by, o(n + 1) *= by;
}

// The state of the two rows of S that a thread shares with the quad of lanes that holds them.
//
// P = exp2(scale * S - shift). The shift need not be the row's maximum: a block's P is computed
// with the shift that the row already has. Where the sum of P exceeds kRaise, the shift rises, and
// P, O and the total are scaled by a power of two. Only where P is out of range, `rescale` looks
// for the maximum, takes it as the shift and computes P again. So few blocks compute a maximum, and
// no block waits for one between S and P.
template <class Element>
struct OnlineSoftmax {
  using Range = SumRange<Element>;
  static constexpr uint32_t kNew = 1, kStrict = 4;
  static constexpr float kStart = 0.f - Range::kBelowZero;  // the shift of a row that begins
  float shift[2] = {kStart, kStart};                        // log2 units
  float total[2] = {0.f, 0.f};    // this lane's part of the sum of P, over all hops; 0 before it
  float rounded[2] = {0.f, 0.f};  // the same of P as the product with V reads it
  // kNew << r: row r has seen no score. kStrict: every block takes its maximum as the shift.
  uint32_t state;

  CUTE_DEVICE explicit OnlineSoftmax(bool strict = false)
      : state(3 * kNew | (strict ? kStrict : 0)) {}

  CUTE_DEVICE bool strict() const { return state & kStrict; }

  // Warp-wide: no row has seen a score.
  CUTE_DEVICE bool begins() const { return __all_sync(0xffffffff, (state & 3 * kNew) == 3 * kNew); }

  // Continues rows of earlier hops: their normalised O, which it multiplies, has the weight
  // 2^kBelowEarlier.
  template <class Output>
  CUTE_DEVICE void resume(float const (&lse)[2], int lane, Output& o) {
    constexpr float kWeight = 1 << Range::kBelowEarlier;
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      bool const seen = lse[r] != -INFINITY;  // true for NaN
      shift[r] = seen ? lse[r] * kLog2e - Range::kBelowEarlier : kStart;
      total[r] = rounded[r] = seen && lane % 4 == 0 ? kWeight : 0.f;
      if (seen) state &= ~(kNew << r);
    }
    if constexpr (kWeight != 1.f) scale_rows(o, {kWeight, kWeight});
  }

  // Computes P of elements [Begin, End) of the thread's fragment and adds it to `sum[row][column
  // parity]`. Element 4j + 2r + c is of row r.
  template <int Begin, int End, class Scores, class P, class Scale>
  CUTE_DEVICE void exponentiate(Scores const& s, P& p, float (&sum)[2][2],
                                Scale const& scale_log2) const {
    CUTE_UNROLL
    for (int n = Begin; n < End; ++n) {
      float const x = static_cast<float>(s(n));
      p(n) = exp2f(fmaf(x, of_row(scale_log2, n / 2 % 2), -shift[n / 2 % 2]));
      sum[n / 2 % 2][n % 2] += p(n);
    }
  }

  // Adds a block's P, as the product with V reads it.
  template <class Operand>
  CUTE_DEVICE void add_rounded(Operand const& operand) {
    constexpr int kPairs = decltype(size(operand))::value / 2;  // pair 2j + r is of row r
    auto const* pairs = reinterpret_cast<uint32_t const*>(raw_pointer_cast(operand.data()));
    float sum[2][2] = {};
    CUTE_UNROLL
    for (int i = 0; i < kPairs; ++i) {
      float low, high;
      if constexpr (cute::is_same_v<Element, cutlass::half_t>) {
        float2 const both = __half22float2(reinterpret_cast<__half2 const&>(pairs[i]));
        low = both.x, high = both.y;
      } else {
        low = __uint_as_float(pairs[i] << 16), high = __uint_as_float(pairs[i] & 0xffff0000);
      }
      sum[i % 2][0] += low, sum[i % 2][1] += high;
    }
    rounded[0] += sum[0][0] + sum[0][1], rounded[1] += sum[1][0] + sum[1][1];
  }

  // What a block needs beyond `accumulate`, for each of the lane's rows.
  struct Needs {
    bool over[2];           // `rescale`
    bool fresh[2];          // the row has seen no score: its shift does not count
    float raise[2];         // of the shift, log2 units; whole numbers
    bool rescales, raises;  // in any lane of the warp: `over`, `raise`
  };

  // In a tile's first block: every row takes its maximum as the shift.
  CUTE_DEVICE Needs begin() const {
    return {.over = {true, true},
            .fresh = {bool(state & kNew), bool(state & kNew << 1)},
            .raise = {},
            .rescales = true,
            .raises = false};
  }

  // Adds a block's sums to the total, and returns true, if no row of the warp needs more.
  CUTE_DEVICE bool accumulate(float const (&sum)[2][2]) {
    float const whole[2] = {sum[0][0] + sum[0][1], sum[1][0] + sum[1][1]};
    bool const fits = whole[0] <= Range::kRaise && whole[1] <= Range::kRaise;  // false for NaN
    if (!__all_sync(0xffffffff, fits && state == 0)) return false;
    total[0] += whole[0], total[1] += whole[1];
    return true;
  }

  // After `accumulate` has added nothing: adds the sums, unless a row `rescales`. `from_zero`: a
  // row that begins may keep 0 as its shift.
  template <bool FromZero>
  CUTE_DEVICE Needs settle(float const (&sum)[2][2]) {
    Needs needs;
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      float const whole = sum[r][0] + sum[r][1], most = quad_max(whole);
      bool const begun = !(state & (kNew << r));
      needs.raise[r] = 0.f;
      if constexpr (sizeof(Element) == 1) {  // a row's maximum, in whichever of its lanes
        needs.over[r] = !begun || most > Range::kLargest;
        needs.fresh[r] = !begun;
      } else {
        bool const fits = begun ? whole <= Range::kLargest
                                : FromZero && Range::kLeast <= most && most <= Range::kFirst;
        needs.over[r] = strict() || !fits;
        needs.fresh[r] = needs.over[r] && !begun;
        bool const raised = begun && !strict() && Range::kRaise < most && most <= Range::kLargest;
        if (raised) {
          needs.raise[r] = int(__float_as_uint(most) >> 23) - 127 - Range::kBelowMaximum;
        }
      }
    }
    needs.rescales = __any_sync(0xffffffff, needs.over[0] || needs.over[1]);
    needs.raises = __any_sync(0xffffffff, needs.raise[0] + needs.raise[1] > 0.f);
    if (!needs.rescales) {
      total[0] += sum[0][0] + sum[0][1], total[1] += sum[1][0] + sum[1][1];
      state &= ~(3 * kNew);
    }
    return needs;
  }

  // Raises the shift. The caller multiplies P and O by `decay`.
  CUTE_DEVICE void raise(float const (&by)[2], float (&decay)[2]) {
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      shift[r] += by[r];
      decay[r] = exp2f(-by[r]);  // exact
      total[r] *= decay[r], rounded[r] *= decay[r];
    }
  }

  // Rescales the rows that are `over`: takes the maximum over their lanes that are `over`, less
  // kBelowMaximum, and the shift unless it is `fresh`, as the shift; recomputes P and adds it to
  // the total. The caller multiplies O by `decay`. Other rows keep their bits.
  template <class Scores, class P, class Scale>
  CUTE_DEVICE void rescale(Scores const& s, P& p, Needs const& needs, float (&decay)[2],
                           Scale const& scale_log2) {
    constexpr int kSize = decltype(size(s))::value;
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      float peak[2] = {s(2 * r), s(2 * r + 1)};
      CUTE_UNROLL
      for (int n = 4 + 2 * r; n < kSize; n += 4) {
        peak[0] = fmaxf(peak[0], s(n)), peak[1] = fmaxf(peak[1], s(n + 1));
      }
      float high = needs.fresh[r] ? -INFINITY : shift[r];
      if (needs.over[r]) {
        float const most = fmaxf(peak[0], peak[1]) * of_row(scale_log2, r);
        high = fmaxf(high, most - Range::kBelowMaximum);
      }
      high = quad_max(high);
      decay[r] = needs.fresh[r] ? 0.f : exp2f(shift[r] - high);
      state = high == -INFINITY ? state | (kNew << r) : state & ~(kNew << r);
      shift[r] = high == -INFINITY ? kStart : high;
    }
    float sum[2][2] = {};
    exponentiate<0, kSize>(s, p, sum, scale_log2);
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      total[r] = total[r] * decay[r] + (sum[r][0] + sum[r][1]);
      rounded[r] *= decay[r];
    }
  }

  // With e4m3 P, of row R alone: `over` and `fresh` as in `Needs`, equal in a quad.

  // The row's shift becomes its maximum less kBelowMaximum. Returns by what O is multiplied. The
  // caller computes P again, and adds it behind a multiplication of the total.
  template <int R, class Scores>
  CUTE_DEVICE float rescale_row(Scores const& s, bool over, bool fresh, float scale_log2) {
    float high = fresh ? -INFINITY : shift[R];
    if (over) high = fmaxf(high, fmaf(row_max<R>(s), scale_log2, -Range::kBelowMaximum));
    high = quad_max(high);
    float const decay = fresh ? 0.f : exp2f(shift[R] - high);
    state = high == -INFINITY ? state | (kNew << R) : state & ~(kNew << R);
    shift[R] = high == -INFINITY ? 0.f : high;
    return decay;
  }

  // The same from P, whose maximum over the row is `peak`, finite; the row has begun.
  template <int R>
  CUTE_DEVICE float lower_row(float peak, bool over) {
    float const by = over ? __log2f(peak) - Range::kBelowMaximum : 0.f;
    shift[R] += by;
    return exp2f(-by);
  }

  // The maximum of the lane's elements of a row.
  template <int R, class Fragment>
  static CUTE_DEVICE float row_max(Fragment const& x) {
    constexpr int kSize = decltype(size(x))::value;
    float high[2] = {x(2 * R), x(2 * R + 1)};
    CUTE_UNROLL
    for (int n = 4 + 2 * R; n < kSize; n += 4) {
      high[0] = fmaxf(high[0], x(n)), high[1] = fmaxf(high[1], x(n + 1));
    }
    return fmaxf(high[0], high[1]);
  }
};

}  // namespace ringfa3
