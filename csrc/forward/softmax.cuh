// Online softmax in registers (Algorithm 1 of the paper).
#pragma once

#include <cute/tensor.hpp>

#include "hopper/warp.cuh"

namespace ringfa3 {

using namespace cute;

// The sum and the maximum over a quad of lanes, which holds two rows of an accumulator.
CUTE_DEVICE float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffff, x, 1);
  return x + __shfl_xor_sync(0xffffffff, x, 2);
}
CUTE_DEVICE float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffff, x, 2));
}

// For each dtype of P: bounds of a lane's sum of P over a block, and distances of a new shift, in
// log2 units, below the number that it comes from. The distances are whole numbers, so P of a key
// that dominates its row is a power of two.
template <class Element>
struct SumRange {  // bfloat16, with the exponents of float32
  // A row's first block may leave the shift at -kBelowZero if its largest sum lies in
  // [kLeast, kFirst].
  static constexpr float kLeast = 0x1p-6f, kFirst = 0x1p16f;
  // A sum above kRaise raises the shift. A sum above kLargest makes the block compute P again.
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
  // The largest value is 448: no element of a sum up to 432 is rounded above it. The slow path
  // raises the shift of this block, never of later ones alone.
  static constexpr float kRaise = 432.f, kLargest = 432.f;
  // A lane's elements of a block, at most 32 of up to 2^3, fit 432.
  static constexpr int kBelowZero = 0, kBelowMaximum = 3, kBelowEarlier = 0;
};

// The factor from scores to log2 units: one number, or one for each of a thread's rows.
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

// The state of the two rows of S that a thread shares with the other lanes of its quad.
//
// P = exp2(scale * S - shift). The shift is a reference exponent, not always the row's maximum.
// Invariant: `total` and O refer to the shift, so LSE = ln2 * (shift + log2(total over the quad)).
//
// A block's P uses the shift that the row already has. Each lane's sum of P decides what follows:
//
//   sum <= kRaise     `accumulate` adds it: the fast path.
//   sum <= kLargest   The sum is added. Then `raise` adds the exponent of the row's largest sum,
//                     less kBelowMaximum, to the shift, and multiplies P, O and the total by the
//                     corresponding power of two.
//   larger, or NaN    `rescale` takes the row's maximum, less kBelowMaximum, as the shift and
//                     computes P again. With kUseRowMax every block does so.
//
// A row's first block takes its maximum as the shift, or with `FromZero` leaves the shift at
// kStart if its largest sum lies in [kLeast, kFirst]. E4M3 P has no middle case, since kRaise
// equals kLargest, and adds a NaN to the total. So few blocks compute a maximum, and in the fast
// path none waits for one between S and P.
template <class Element>
struct OnlineSoftmax {
  using Range = SumRange<Element>;
  static constexpr uint32_t kNew = 1, kUseRowMax = 4;
  static constexpr float kStart = 0.f - Range::kBelowZero;  // the shift before a row's first block
  float shift[2] = {kStart, kStart};                        // log2 units
  float total[2] = {0.f, 0.f};    // this lane's part of the sum of P, over all hops; 0 before it
  float rounded[2] = {0.f, 0.f};  // the same of P as the product with V reads it
  // kNew << r: no score of row r has come. kUseRowMax: every block takes its maximum as the shift.
  uint32_t state;

  CUTE_DEVICE explicit OnlineSoftmax(bool use_row_max = false)
      : state(3 * kNew | (use_row_max ? kUseRowMax : 0)) {}

  CUTE_DEVICE bool use_row_max() const { return state & kUseRowMax; }

  // Warp-wide: no score of any row has come.
  CUTE_DEVICE bool begins() const { return __all_sync(0xffffffff, (state & 3 * kNew) == 3 * kNew); }

  // Continues rows of earlier hops. Their normalised O gets the weight 2^kBelowEarlier: `resume`
  // multiplies it.
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

  // Steps that a block needs beyond `accumulate`, for each of the lane's rows.
  struct Needs {
    bool out_of_range[2];   // `rescale`
    bool first_block[2];    // no score of the row has come: its shift does not count
    float raise[2];         // of the shift, log2 units; whole numbers
    bool rescales, raises;  // in any lane of the warp: `out_of_range`, `raise`
  };

  // In a tile's first block: every row takes its maximum as the shift.
  CUTE_DEVICE Needs begin() const {
    return {.out_of_range = {true, true},
            .first_block = {bool(state & kNew), bool(state & kNew << 1)},
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

  // After `accumulate` has added nothing: adds the sums, unless a row `rescales`. `FromZero`: a
  // row's first block may leave the shift at kStart.
  template <bool FromZero>
  CUTE_DEVICE Needs accumulate_slow_path(float const (&sum)[2][2]) {
    Needs needs;
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      float const whole = sum[r][0] + sum[r][1], most = quad_max(whole);
      bool const begun = !(state & (kNew << r));
      needs.raise[r] = 0.f;
      if constexpr (sizeof(Element) == 1) {  // a row's maximum, in whichever of its lanes
        needs.out_of_range[r] = !begun || most > Range::kLargest;
        needs.first_block[r] = !begun;
      } else {
        bool const fits = begun ? whole <= Range::kLargest
                                : FromZero && Range::kLeast <= most && most <= Range::kFirst;
        needs.out_of_range[r] = use_row_max() || !fits;
        needs.first_block[r] = needs.out_of_range[r] && !begun;
        bool const raised =
            begun && !use_row_max() && Range::kRaise < most && most <= Range::kLargest;
        if (raised) {
          needs.raise[r] = int(__float_as_uint(most) >> 23) - 127 - Range::kBelowMaximum;
        }
      }
    }
    needs.rescales = __any_sync(0xffffffff, needs.out_of_range[0] || needs.out_of_range[1]);
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

  // Rescales the rows that are `out_of_range`, as `take_maximum`. Computes P again and adds it to
  // the total. The caller multiplies O by `decay`.
  template <class Scores, class P, class Scale>
  CUTE_DEVICE void rescale(Scores const& s, P& p, Needs const& needs, float (&decay)[2],
                           Scale const& scale_log2) {
    take_maximum(needs, decay, scale_log2, s);
    float sum[2][2] = {};
    exponentiate<0, decltype(size(s))::value>(s, p, sum, scale_log2);
    add_rescaled(sum, decay);
  }

  // A new shift of the rows that are `out_of_range`: the maximum of S, in one fragment or in
  // several, over their lanes that are `out_of_range`, less kBelowMaximum. But not below the old
  // shift, which does not count in a `first_block`. Other rows keep their bits.
  template <class Scale, class... Scores>
  CUTE_DEVICE void take_maximum(Needs const& needs, float (&decay)[2], Scale const& scale_log2,
                                Scores const&... s) {
    float most[2] = {-INFINITY, -INFINITY};
    ((most[0] = fmaxf(most[0], row_max<0>(s)), most[1] = fmaxf(most[1], row_max<1>(s))), ...);
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      float high = needs.first_block[r] ? -INFINITY : shift[r];
      if (needs.out_of_range[r]) {
        high = fmaxf(high, most[r] * of_row(scale_log2, r) - Range::kBelowMaximum);
      }
      high = quad_max(high);
      decay[r] = needs.first_block[r] ? 0.f : exp2f(shift[r] - high);
      state = high == -INFINITY ? state | (kNew << r) : state & ~(kNew << r);
      shift[r] = high == -INFINITY ? kStart : high;
    }
  }

  // Adds the sums of P to the total, after `take_maximum`.
  CUTE_DEVICE void add_rescaled(float const (&sum)[2][2], float const (&decay)[2]) {
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      total[r] = total[r] * decay[r] + (sum[r][0] + sum[r][1]);
      rounded[r] *= decay[r];
    }
  }

  // E4M3 P, row R alone. `out_of_range` and `first_block` are those of `Needs`, equal in a quad.

  // The row's shift becomes its maximum less kBelowMaximum. Returns the factor of O. The caller
  // computes P again, and adds it after a multiplication of the total.
  template <int R, class Scores>
  CUTE_DEVICE float rescale_row(Scores const& s, bool out_of_range, bool first_block,
                                float scale_log2) {
    float high = first_block ? -INFINITY : shift[R];
    if (out_of_range) high = fmaxf(high, fmaf(row_max<R>(s), scale_log2, -Range::kBelowMaximum));
    high = quad_max(high);
    float const decay = first_block ? 0.f : exp2f(shift[R] - high);
    state = high == -INFINITY ? state | (kNew << R) : state & ~(kNew << R);
    shift[R] = high == -INFINITY ? 0.f : high;
    return decay;
  }

  // The same from P, whose maximum over the row is `peak`, finite; the row has begun.
  template <int R>
  CUTE_DEVICE float lower_row(float peak, bool out_of_range) {
    float const by = out_of_range ? __log2f(peak) - Range::kBelowMaximum : 0.f;
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
