// The forward's mask: scores outside a span's band become -inf.
#pragma once

#include <cute/tensor.hpp>

#include "hopper/column_mask.cuh"
#include "hopper/warp.cuh"
#include "plan/spans.h"

namespace ringfa3 {

using namespace cute;

// Whether the block is masked for all rows [row, row + kWarpRows) of the tile.
template <class Blocks>
CUTE_DEVICE bool hides_block(Blocks const& block, int row) {
  SpanColumns const c = block.columns();
  if constexpr (Blocks::kClips) {
    SpanRows const rows = block.rows();
    if (rows.end <= row || row + kWarpRows <= rows.begin) return true;
  }
  return c.high + row + kWarpRows <= block.start || c.low + row >= block.end;
}

// Sets S to -inf where rows `row` and `row + 8` of the tile, which the thread holds, must not
// attend to the block's columns. Does nothing if all rows of the warp attend to all columns.
template <class Blocks, class Scores>
CUTE_DEVICE void apply_mask(Scores&& s, Blocks const& block, int row, int lane) {
  constexpr int kColumns = decltype(size(s))::value / 2;
  SpanColumns const c = block.columns();
  int const top = row - lane / 4, last = block.start + kColumns * 4 - 1;
  [[maybe_unused]] SpanRows rows;
  bool whole = true;  // all rows of the warp are the span's
  if constexpr (Blocks::kClips) {
    rows = block.rows();
    whole = rows.begin <= top && top + kWarpRows <= rows.end;
  }
  if (c.low + top + kWarpRows - 1 <= block.start && last <= c.high + top && last < block.end &&
      whole)
    return;
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) {
    int const offset = block.start + 2 * (lane % 4);
    int const first = columns_before(c.low + row + 8 * r - offset);
    int end = columns_before(min(block.end, c.high + row + 8 * r + 1) - offset);
    if constexpr (Blocks::kClips) {
      if (row + 8 * r < rows.begin || row + 8 * r >= rows.end) end = 0;
    }
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
