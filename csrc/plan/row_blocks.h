// Backward: the blocks of M rows that a key tile visits, and the order in which tiles add to dQ.
//
// ringfa3/planning computes the same: `work_split.visited_blocks`, `Tiling.visiting_key_tiles`,
// `Tiling.dq_order`. tests/planning/test_device_plan.py compares them.
#pragma once

#include "params.h"
#include "plan/portable.h"

namespace ringfa3 {

// Aligned as one 8-byte value, like int2.
struct alignas(8) Range {
  int begin, end;
};

// The blocks of M rows of a span that a key tile visits.
template <int M>
RINGFA3_DEVICE Range row_block_range(WorkUnit const& unit, Span const& s) {
  int const j = unit.row0 - s.k0;
  int const begin = max(0, j - s.hi), end = min(s.q1 - s.q0, j + unit.rows - s.lo);
  return begin < end ? Range{begin / M, (end + M - 1) / M} : Range{0, 0};
}

// The same of a clipped span: block 0 has the span's first row, and begins where a block of padded
// rows does. The span may be volatile, for a thread with few registers.
template <int M>
RINGFA3_DEVICE Range row_block_range(WorkUnit const& unit, ClippedSpan const volatile& s) {
  int const j = unit.row0 - s.k0, before = s.padded_q0 % M;
  int const begin = max(0, max(j, 0) - s.hi);
  int const end = min(s.q1 - s.q0, min(j + unit.rows, s.k1 - s.k0) - s.lo);
  return begin < end ? Range{(before + begin) / M, (before + end + M - 1) / M} : Range{0, 0};
}

// Row block `number` of a clipped span, for the keys [key_row, key_row + keys) that `block` has.
// Sets its first row `token`; `rows` up to the end of the segment; `low`, `high`; and the rows
// [first_row, end_row) and keys [first_key, end_key) of the block that are the span's. Returns
// whether some pairs of a whole block are hidden.
template <int M, int N, class Block>
RINGFA3_DEVICE bool decode_clipped_block(ClippedSpan const volatile& s, int number, Block& block) {
  int const i = number * M - s.padded_q0 % M, j = block.key_row - s.k0;  // first row, first key
  block.token = s.q0 + i;
  block.rows = min(M, s.q_end - block.token);
  block.low = j - s.hi - i, block.high = j - s.lo - i;
  block.first_row = max(0, -i), block.end_row = min(M, s.q1 - block.token);
  block.first_key = max(0, -j), block.end_key = min(block.keys, s.k1 - block.key_row);
  return block.first_row > 0 || block.end_row < M || block.first_key > 0 || block.end_key < N ||
         N - 1 + block.low > 0 || block.high < M - 1;
}

// The tiles of N keys of a span that visit its `block`-th block of M rows.
template <int M, int N>
RINGFA3_DEVICE Range key_tile_range(Span const& s, int block) {
  int const begin = max(0, block * M + s.lo);
  int const end = min(s.k1 - s.k0, min(block * M + M, s.q1 - s.q0) + s.hi);
  return begin < end ? Range{begin / N, (end + N - 1) / N} : Range{0, 0};
}

// How many key tiles add to a dQ block before another one: tiles are fetched in descending order of
// their keys. The block begins with row `token` of span `index`, the tile with key `key_row`.
// `earlier` is that of `BackwardArgs`.
template <int M, int N>
RINGFA3_DEVICE int dq_order(Span const* spans, int32_t const* earlier, int32_t const& index,
                            int32_t const& token, int32_t const& key_row) {
  Span const& span = spans[index];
  int const block = (token - span.q0) / M;
  int order = key_tile_range<M, N>(span, block).end - 1 - (key_row - span.k0) / N;
  for (int other = earlier[index]; other >= 0; other = earlier[other]) {
    Range const tiles = key_tile_range<M, N>(spans[other], block);
    order += tiles.end - tiles.begin;
  }
  return order;
}

// The row blocks of a work unit, for one head: block `block` of span `index`, while `left` > 0.
// `unit.blocks` ends the iteration, so it must not exceed what the unit's spans hold.
//
//   for (RowBlockIterator<M> at(unit); at.left > 0; at.next_span()) {
//     for (at.begin_span(unit, spans[at.index]); at.in_span(); at.next()) ...
//   }
template <int M>
struct RowBlockIterator {
  int skip, left;  // blocks to skip, and to visit
  int index;
  int block, end;  // of the span

  RINGFA3_DEVICE explicit RowBlockIterator(WorkUnit const& unit)
      : skip(unit.skip), left(unit.blocks), index(unit.first_span) {}
  template <class AnySpan>
  RINGFA3_DEVICE void begin_span(WorkUnit const& unit, AnySpan const& span) {
    Range const range = row_block_range<M>(unit, span);
    block = range.begin + skip, end = range.end;
    skip = max(0, block - end);
  }
  RINGFA3_DEVICE bool in_span() const { return block < end && left > 0; }
  RINGFA3_DEVICE void next() { ++block, --left; }
  RINGFA3_DEVICE void next_span() { ++index; }
};

}  // namespace ringfa3
