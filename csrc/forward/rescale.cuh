// The slow path of a consumer: rows whose P is out of range, or near it. `Consumer` is a
// `ForwardConsumer`.
//
// E4M3 P is out of range more often than P in 16 bits, so its rows are rescaled one by one: row 0
// or row 1 of every lane costs half of a warp's elements.
#pragma once

#include "forward/softmax.cuh"
#include "hopper/wgmma.cuh"

namespace ringfa3 {

using namespace cute;

// A lane's sum of P up to this is finite.
constexpr float kLargestPeak = 0x1p96f;

// Takes a new shift for row R of each lane, from S, and computes its P again.
template <int R, class Consumer>
CUTE_DEVICE void rescale_row(Consumer& c, typename Consumer::Needs const& needs) {
  auto const s = c.scores();
  float const by = of_row(c.scale(), R);
  float const decay =
      c.softmax.template rescale_row<R>(s, needs.out_of_range[R], needs.first_block[R], by);
  float sum[2] = {};
  CUTE_UNROLL
  for (int n = 2 * R; n < Consumer::kSize; n += 4) {
    CUTE_UNROLL
    for (int e = 0; e < 2; ++e) {
      c.prob(n + e) = exp2f(fmaf(s(n + e), by, -c.softmax.shift[R]));
      sum[e] += c.prob(n + e);
    }
  }
  row_to_operand<typename Consumer::ElementPV, R>(c.prob, c.fP);
  c.softmax.total[R] = c.softmax.total[R] * decay + (sum[0] + sum[1]);
  c.template scale_o<R>(decay);
}

// Adds the sums of row R, unless a lane of the warp rescales it.
template <int R, class Consumer>
CUTE_DEVICE void add_or_rescale_row(Consumer& c, typename Consumer::Needs const& needs,
                                    float const (&sum)[2]) {
  float& total = c.softmax.total[R];
  if (!__any_sync(0xffffffff, needs.out_of_range[R])) {
    total += sum[0] + sum[1];
    return;
  }
  if constexpr (Consumer::kPolicy.keeps_p) {
    float const peak = quad_max(c.softmax.template row_max<R>(c.prob));
    if (__all_sync(0xffffffff, peak < kLargestPeak && !needs.first_block[R])) {
      float const decay = c.softmax.template lower_row<R>(peak, needs.out_of_range[R]);
      total = (total + (sum[0] + sum[1])) * decay;
      scale_row<R>(c.prob, decay);
      row_to_operand<typename Consumer::ElementPV, R>(c.prob, c.fP);
      c.template scale_o<R>(decay);
      return;
    }
  }
  rescale_row<R>(c, needs);
}

// Computes P of the rows that are `out_of_range` again.
template <class Consumer>
CUTE_DEVICE void rescale_rows(Consumer& c, typename Consumer::Needs const& needs) {
  if constexpr (Consumer::kRescalesRows) {
    rescale_row<0>(c, needs);
    rescale_row<1>(c, needs);
  } else {
    c.softmax.rescale(c.scores(), c.prob, needs, c.o_scale, c.scale());
    to_operand<typename Consumer::ElementPV>(c.prob, c.fP);
    if (!c.o_empty) scale_rows(c.o, c.o_scale);
  }
}

// Rescales rows whose P is out of range, raises the shift of those whose P nears it.
template <class Consumer>
CUTE_DEVICE void rescale_slow_path(Consumer& c, float const (&sum)[2][2]) {
  auto const needs = c.softmax.template accumulate_slow_path<Consumer::kPolicy.sums_rounded>(sum);
  if constexpr (Consumer::kRescalesRows) {
    if (needs.rescales)
      add_or_rescale_row<0>(c, needs, sum[0]), add_or_rescale_row<1>(c, needs, sum[1]);
  } else {
    if (needs.rescales) rescale_rows(c, needs);
    if (needs.raises) {
      c.softmax.raise(needs.raise, c.o_scale);
      scale_operand<typename Consumer::ElementPV>(c.fP, c.o_scale);
      if (!c.o_empty) scale_rows(c.o, c.o_scale);
    }
  }
}

}  // namespace ringfa3
