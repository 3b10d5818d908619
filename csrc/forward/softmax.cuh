// Online softmax in registers: masks, P = exp2(S - shift), sums.
#pragma once

#include <cute/tensor.hpp>

#include "hopper/column_mask.cuh"
#include "plan/spans.cuh"

namespace ringfa3 {

using namespace cute;

// Online softmax of the two rows of S that a thread shares with its quad of lanes.
//
// P = exp2(scale * S - shift). The shift need not be the maximum: P comes first, and only where a
// thread's sum of it in a block exceeds kMost is the maximum looked for and the shift raised to it,
// the total and O shrunk, and P computed again. So few blocks pay for a maximum, and none in their
// way from S to P. No P exceeds kMost, within bf16 and fp16.
struct RowState {
  static constexpr float kMost = 256.f;
  static constexpr float kMostAhead = 40.f;  // log2 units, see `resume`
  float shift[2] = {-INFINITY, -INFINITY};   // log2 units; -inf before the first score
  float total[2] = {0.f, 0.f};  // this lane's part of the sum of P, of earlier hops too

  // P of elements [Begin, End) of the thread's fragment, index 4 * j + 2 * r + c for row r; adds it
  // to the sums. inf or NaN in a row without a shift.
  template <int Begin, int End, class Scores>
  CUTE_DEVICE void exponentiate(Scores const& s, Scores& p, float (&sum)[2][2],
                                float scale_log2) const {
    CUTE_UNROLL
    for (int n = Begin; n < End; ++n) {
      p(n) = exp2f(fmaf(s(n), scale_log2, -shift[n / 2 % 2]));
      sum[n / 2 % 2][n % 2] += p(n);
    }
  }

  // Adds a block's sums to the total, or returns false: lanes of the warp have rows, `over`, to be
  // raised.
  CUTE_DEVICE bool take(float const (&sum)[2][2], bool (&over)[2]) {
    float const whole[2] = {sum[0][0] + sum[0][1], sum[1][0] + sum[1][1]};
    over[0] = !(whole[0] <= kMost), over[1] = !(whole[1] <= kMost);  // so is NaN
    if (__any_sync(0xffffffff, over[0] || over[1])) return false;
    total[0] += whole[0], total[1] += whole[1];
    return true;
  }

  // Raises the shift of a row to the maximum of its lanes whose sum of a block exceeds kMost, and
  // takes in P. O is to shrink by `decay`. A row that no lane raises keeps its bits, whatever its
  // neighbours in the warp do.
  template <class Scores>
  CUTE_DEVICE void raise(Scores const& s, Scores& p, bool const (&over)[2], float (&decay)[2],
                         float scale_log2) {
    constexpr int kSize = decltype(size(s))::value;
    float highest[2];
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      float peak[2] = {s(2 * r), s(2 * r + 1)};
      CUTE_UNROLL
      for (int n = 4 + 2 * r; n < kSize; n += 4) {
        peak[0] = fmaxf(peak[0], s(n)), peak[1] = fmaxf(peak[1], s(n + 1));
      }
      float high = shift[r];
      if (over[r]) high = fmaxf(high, fmaxf(peak[0], peak[1]) * scale_log2);
      high = fmaxf(high, __shfl_xor_sync(0xffffffff, high, 1));
      highest[r] = fmaxf(high, __shfl_xor_sync(0xffffffff, high, 2));
      decay[r] = shift[r] == -INFINITY ? 0.f : exp2f(shift[r] - highest[r]);
      shift[r] = highest[r] == -INFINITY ? 0.f : highest[r];  // P is 0 where nothing is seen yet
    }
    float sum[2][2] = {};
    exponentiate<0, kSize>(s, p, sum, scale_log2);
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      shift[r] = highest[r];
      total[r] = total[r] * decay[r] + (sum[r][0] + sum[r][1]);
    }
  }

  // After the first block: takes in rows of earlier hops, of which O is to begin with theirs, times
  // `weight`. So O and LSE are not needed before there is P. Where their LSE is more than
  // kMostAhead ahead of the shift, it takes the shift along. The first block's P, at most 1, was
  // for a lower one: against 2^kMostAhead it is not seen in float32 while V is below 2^9 times O,
  // nor in bf16 while it is below 2^24 times O.
  CUTE_DEVICE void resume(float const (&lse)[2], float (&weight)[2], int lane) {
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      float const before = lse[r] * kLog2e;
      float ahead = before - shift[r];  // inf in a row that has seen nothing of this block
      if (ahead > kMostAhead) ahead = kMostAhead, shift[r] = before - kMostAhead;
      weight[r] = lse[r] == -INFINITY ? 0.f : exp2f(ahead);  // NaN stays NaN
      if (lane % 4 == 0) total[r] += weight[r];
    }
  }
};

// Sets S to -inf where the thread's rows `row` and `row + 8` of the tile must not see.
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

}  // namespace ringfa3
