// Sums of P V that have left the accumulator of e4m3 products, in float32.
#pragma once

#include "forward/softmax.cuh"

namespace ringfa3 {

using namespace cute;

// Of a tile, promoted behind every `Interval` blocks. With 0 it is empty.
template <class FragmentO, int Interval>
struct PromotedSums {
  FragmentO sums;
  int blocks = 0;  // whose P V the accumulator holds

  CUTE_DEVICE PromotedSums() { clear(sums); }
  // Behind a P V. `o_empty`: the next one overwrites O.
  CUTE_DEVICE void promote(FragmentO const& o, bool& o_empty) {
    if (++blocks < Interval) return;
    add(o, sums);
    blocks = 0, o_empty = true;
  }
  // Behind the last P V of a tile.
  CUTE_DEVICE void finish(FragmentO& o) {
    add(sums, o);
    clear(sums);
    blocks = 0;
  }
  template <int R>
  CUTE_DEVICE void scale_row(float by) {
    ringfa3::scale_row<R>(sums, by);
  }

 private:
  static CUTE_DEVICE void add(FragmentO const& from, FragmentO& to) {
    CUTE_UNROLL
    for (int n = 0; n < size(to); ++n) to(n) += from(n);
  }
};

template <class FragmentO>
struct PromotedSums<FragmentO, 0> {
  CUTE_DEVICE void promote(FragmentO const&, bool&) {}
  CUTE_DEVICE void finish(FragmentO&) {}
  template <int R>
  CUTE_DEVICE void scale_row(float) {}
};

}  // namespace ringfa3
