// Online softmax in registers (Algorithm 1 of the paper).
#pragma once

#include <cute/tensor.hpp>

#include "hopper/warp.cuh"

namespace ringfa3 {

using namespace cute;

// The state of the two rows of S that a thread shares with the quad of lanes that holds them.
//
// P = exp2(scale * S - shift). The shift need not be the row's maximum. P is computed with the
// current shift first; only if a thread's sum of P over a block exceeds kMostSum, `rescale` looks
// for the maximum, raises the shift to it, shrinks the total and O, and computes P again. So few
// blocks compute a maximum, and no block waits for one between S and P. No P exceeds kMostSum,
// which bf16 and fp16 hold.
struct OnlineSoftmax {
  static constexpr float kMostSum = 256.f;
  static constexpr float kMostAhead = 40.f;  // log2 units, see `merge_partial`
  float shift[2] = {-INFINITY, -INFINITY};   // log2 units; -inf until a score is seen
  float total[2] = {0.f, 0.f};               // this lane's part of the sum of P, over all hops

  // Computes P of elements [Begin, End) of the thread's fragment and adds it to `sum[row][column
  // parity]`. Element 4j + 2r + c is of row r. In a row whose shift is -inf, P is inf or NaN.
  template <int Begin, int End, class Scores>
  CUTE_DEVICE void exponentiate(Scores const& s, Scores& p, float (&sum)[2][2],
                                float scale_log2) const {
    CUTE_UNROLL
    for (int n = Begin; n < End; ++n) {
      p(n) = exp2f(fmaf(s(n), scale_log2, -shift[n / 2 % 2]));
      sum[n / 2 % 2][n % 2] += p(n);
    }
  }

  // Adds a block's sums to the total. Returns false, and adds nothing, if a lane of the warp has a
  // row that must be rescaled; `over` are this lane's rows.
  CUTE_DEVICE bool accumulate(float const (&sum)[2][2], bool (&over)[2]) {
    float const whole[2] = {sum[0][0] + sum[0][1], sum[1][0] + sum[1][1]};
    over[0] = !(whole[0] <= kMostSum), over[1] = !(whole[1] <= kMostSum);  // true for NaN
    if (__any_sync(0xffffffff, over[0] || over[1])) return false;
    total[0] += whole[0], total[1] += whole[1];
    return true;
  }

  // Raises the shift of a row to the maximum over those of its lanes that are `over`, recomputes P
  // and adds it to the total. The caller multiplies O by `decay`. A row without such a lane keeps
  // its bits, whatever other rows of the warp do.
  template <class Scores>
  CUTE_DEVICE void rescale(Scores const& s, Scores& p, bool const (&over)[2], float (&decay)[2],
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
      shift[r] = highest[r] == -INFINITY ? 0.f : highest[r];  // P = 0 while nothing is seen
    }
    float sum[2][2] = {};
    exponentiate<0, kSize>(s, p, sum, scale_log2);
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      shift[r] = highest[r];
      total[r] = total[r] * decay[r] + (sum[r][0] + sum[r][1]);
    }
  }

  // Merges the LSE of earlier hops after the tile's first block; the caller multiplies their O by
  // `weight`. So O and LSE need not have arrived before the first P. If their LSE exceeds the shift
  // by more than kMostAhead, the shift follows it. P of the first block, at most 1, keeps the lower
  // shift: next to 2^kMostAhead it does not show in float32 while V is below 2^9 times O, nor in
  // bf16 while V is below 2^24 times O.
  CUTE_DEVICE void merge_partial(float const (&lse)[2], float (&weight)[2], int lane) {
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      float const before = lse[r] * kLog2e;
      float ahead = before - shift[r];  // inf in a row that sees nothing of this block
      if (ahead > kMostAhead) ahead = kMostAhead, shift[r] = before - kMostAhead;
      weight[r] = lse[r] == -INFINITY ? 0.f : exp2f(ahead);  // NaN stays NaN
      if (lane % 4 == 0) total[r] += weight[r];
    }
  }
};

}  // namespace ringfa3
