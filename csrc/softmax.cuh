// Online softmax in registers: masks, P = exp2(S - shift), sums.
#pragma once

#include <cute/tensor.hpp>
#include <cutlass/numeric_conversion.h>

#include "work.cuh"

namespace ringfa3 {

using namespace cute;

// Online softmax of the two rows of S that a thread shares with its quad of lanes.
//
// P = exp2(scale * S - shift). The shift need not be the maximum: it is raised only when a score
// exceeds it by kSlack powers of two, so that O and the sum are rarely rescaled and the lanes of a
// row need not agree on a maximum in between. P stays below 2^kSlack, within bf16 and fp16.
struct RowState {
  static constexpr float kSlack = 8.f;
  float shift[2] = {-INFINITY, -INFINITY};  // log2 units; -inf before the first score
  float total[2] = {0.f, 0.f};              // this lane's part of the running sum of P
  float decay[2];                           // by which O shrinks, where `raise` returns true

  // Takes a block's scores in; whether the warp's rows have been raised.
  template <class Scores>
  CUTE_DEVICE bool raise(Scores const& s, float scale_log2) {
    constexpr int kSize = decltype(size(s))::value;  // pairs: index = 4 * j + 2 * r + c
    float peak[2][2] = {{s(0), s(1)}, {s(2), s(3)}};
    CUTE_UNROLL
    for (int n = 4; n < kSize; n += 4) {
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) {
        CUTE_UNROLL
        for (int c = 0; c < 2; ++c) peak[r][c] = fmaxf(peak[r][c], s(n + 2 * r + c));
      }
    }
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) peak[r][0] = fmaxf(peak[r][0], peak[r][1]) * scale_log2;
    bool const over = peak[0][0] > shift[0] + kSlack || peak[1][0] > shift[1] + kSlack;
    if (!__any_sync(0xffffffff, over)) return false;
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      float high = fmaxf(shift[r], peak[r][0]);
      high = fmaxf(high, __shfl_xor_sync(0xffffffff, high, 1));
      high = fmaxf(high, __shfl_xor_sync(0xffffffff, high, 2));
      decay[r] = shift[r] == -INFINITY ? 0.f : exp2f(shift[r] - high);
      total[r] *= decay[r];
      shift[r] = high;
    }
    return true;
  }

  // S to P for elements [Begin, End) of the thread's fragment.
  template <int Begin, int End, class Scores>
  CUTE_DEVICE void exponentiate(Scores& s, float scale_log2) {
    float sum[2][2] = {};
    float const from[2] = {shift[0] == -INFINITY ? 0.f : shift[0],
                           shift[1] == -INFINITY ? 0.f : shift[1]};
    CUTE_UNROLL
    for (int n = Begin; n < End; n += 4) {
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) {
        CUTE_UNROLL
        for (int c = 0; c < 2; ++c) {
          float& x = s(n + 2 * r + c);
          x = exp2f(x * scale_log2 - from[r]);
          sum[r][c] += x;
        }
      }
    }
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) total[r] += sum[r][0] + sum[r][1];
  }
};

// How many of the columns that a thread has of a row, 0, 1, 8, 9, 16, 17 ..., lie before x.
CUTE_DEVICE int columns_before(int x) {
  x = max(x, 0);
  return x / 8 * 2 + min(x % 8, 2);
}

// The lowest n bits; none for n < 0, all from 32 on.
CUTE_DEVICE uint32_t low_bits(int n) { return __funnelshift_lc(0u, 1u, max(n, 0)) - 1; }

// Sets S to -inf where the thread's rows `row` and `row + 8` of the tile must not see. A word has a
// bit for each of 32 columns, constant bits of which move to predicates at once (R2P).
template <int N, class Scores>
CUTE_DEVICE void hide(Scores& s, BlockIterator<N> const& block, int row, int lane) {
  constexpr int kColumns = decltype(size(s))::value / 2;
  Visit const v = block.visit();
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) {
    int const offset = block.start + 2 * (lane % 4);
    int const first = columns_before(v.low + row + 8 * r - offset);
    int const end = columns_before(min(block.end, v.high + row + 8 * r + 1) - offset);
    CUTE_UNROLL
    for (int base = 0; base < kColumns; base += 32) {
      uint32_t const seen = low_bits(end - base) & ~low_bits(first - base);
      CUTE_UNROLL
      for (int i = base; i < min(kColumns, base + 32); ++i) {
        if (!(seen & 1u << (i - base))) s(i / 2 * 4 + 2 * r + i % 2) = -INFINITY;
      }
    }
  }
}

// P in the registers of the second product's A operand: pairs in the order that S has them.
template <class Element, class Scores, class Operand>
CUTE_DEVICE void to_operand(Scores const& s, Operand& p) {
  constexpr int kSize = decltype(size(s))::value;
  cutlass::NumericArrayConverter<Element, float, 2> convert;
  auto* out = reinterpret_cast<cutlass::Array<Element, 2>*>(raw_pointer_cast(p.data()));
  CUTE_UNROLL
  for (int n = 0; n < kSize; n += 2) {
    cutlass::Array<float, 2> pair;
    pair[0] = s(n), pair[1] = s(n + 1);
    out[n / 2] = convert(pair);
  }
}

}  // namespace ringfa3
