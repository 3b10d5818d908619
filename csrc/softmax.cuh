// Online softmax in registers: masks, P = exp2(S - shift), sums.
#pragma once

#include <cute/tensor.hpp>

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

// Sets S to -inf where the thread's rows `row` and `row + 8` of the tile must not see.
template <int N, class Scores>
CUTE_DEVICE void hide(Scores& s, BlockIterator<N> const& block, int row, int lane) {
  constexpr int kSize = decltype(size(s))::value;
  Visit const v = block.visit();
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) {
    int const offset = block.start + 2 * (lane % 4);
    int const first = v.low + row + 8 * r - offset;
    int const last = min(block.end - 1, v.high + row + 8 * r) - offset;
    CUTE_UNROLL
    for (int n = 0; n < kSize; n += 4) {
      CUTE_UNROLL
      for (int c = 0; c < 2; ++c) {
        int const column = 2 * n + c;  // 8 * (n / 4) + c
        if (column < first || column > last) s(n + 2 * r + c) = -INFINITY;
      }
    }
  }
}

}  // namespace ringfa3
