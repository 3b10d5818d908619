// Forward: the columns that a tile needs of each span, as one flat sequence of blocks of N keys.
#pragma once

#include <type_traits>

#include "params.h"
#include "plan/portable.h"

namespace ringfa3 {

constexpr int kDecodedSpans = 8;    // of a tile, in shared memory
constexpr int kConsumerWarps = 12;  // at most

// The columns [begin, end) of one span that a tile needs; row r of the tile attends to
// [low + r, high + r] of them.
struct SpanColumns {
  int32_t begin, end, low, high;
  int32_t key_row;  // the span's first key
  int32_t keys;     // of the span; of a clipped one, up to the end of the segment
  int32_t arrival;  // the number of their arrival flag, or 0
  SpanColumns() = default;
  RINGFA3_DEVICE SpanColumns(Tile const& tile, Span const& s) {
    int const i = tile.row0 - s.q0;
    low = i + s.lo, high = i + s.hi, key_row = s.k0, keys = s.k1 - s.k0;
    arrival = s.arrival;
    begin = max(0, low);
    end = min(keys, tile.rows + high);
  }
  RINGFA3_DEVICE SpanColumns(Tile const&, SpanVisit const& v)
      : begin(v.begin),
        end(v.end),
        low(v.low),
        high(v.high),
        key_row(v.key_row),
        keys(v.keys),
        arrival(v.arrival) {}
  // Whether the tile needs at least one and at most `width` columns.
  RINGFA3_DEVICE bool narrow(int width) const { return begin < end && end - begin <= width; }
};

// The rows [begin, end) of a tile that belong to a clipped span. If the tile's last row does, `end`
// is kEveryRow: nobody reads the rows after it, and rows without a score take the slow path.
struct SpanRows {
  int32_t begin, end;
  static constexpr int kEveryRow = 1 << 30;  // ringfa3/planning/tile_schedule.py has it, too
  SpanRows() = default;
  RINGFA3_DEVICE explicit SpanRows(SpanVisit const& v) : begin(v.first_row), end(v.end_row) {}
  RINGFA3_DEVICE bool all() const { return begin == 0 && end == kEveryRow; }
};

constexpr int kNoWork = -1;  // instead of a head: no item for now
constexpr int kEndOfWork = -2;

// A work item of the forward: a tile for one query head.
struct WorkItem {
  int32_t head;  // or kNoWork, kEndOfWork
  int32_t kv_head;
  // 1: the first span is narrow, and has no block of N keys; see forward/narrow_span.cuh. 0: it is
  // not. It also puts the tile at byte 12: at byte 8 ptxas spills 8 bytes more at d128 and d256.
  int32_t narrow;
  Tile tile;
  SpanColumns spans[kDecodedSpans];  // the first ones; the rest are decoded from the plan
  // Every block takes its maximum as the shift: P is at most 1, or 2 in float16. Only rows of
  // `overflow` are stored.
  int32_t use_row_max;
  // Bit `lane` of [warp][r]: the lane has an element of its row r that is not finite.
  uint32_t overflow[kConsumerWarps][2];
  int32_t blocks;  // of the tile
  // The first spans of the tile in which no block needs a mask, and the blocks that they have. A
  // narrow span counts as one of no block.
  int32_t whole_spans, whole_blocks;
};

// With clipped spans: the rows of the spans, as well.
struct ClippedWorkItem : WorkItem {
  SpanRows span_rows[kDecodedSpans];
};
template <bool Clips>
using WorkItemOf = std::conditional_t<Clips, ClippedWorkItem, WorkItem>;

// The blocks of a tile, span by span, each span from its last column down. The lowest block of a
// span starts at the span's first column and masks the columns that the block above has covered, so
// no block reads past a span that has at least N keys. `OnGrid`: every block starts at a multiple
// of N columns instead. `Clips`: spans are clipped.
template <int N, bool OnGrid = false, bool Clips = false>
struct BlockIterator {
  static constexpr bool kClips = Clips;
  using Work = WorkItemOf<Clips>;
  Work const* work;
  using PlanSpan = std::conditional_t<Clips, SpanVisit, Span>;
  PlanSpan const* plan_spans;
  int index = -1;          // of the span in the tile
  int end = 0, begin = 0;  // its columns that remain
  int keys = 0;            // of the span
  int start = 0;           // the block's first column

  BlockIterator() = default;
  RINGFA3_DEVICE BlockIterator(Work const& work, Span const* plan_spans)
      : work(&work), plan_spans(reinterpret_cast<PlanSpan const*>(plan_spans)) {}

  // Starts at the first block of another tile.
  RINGFA3_DEVICE void begin_tile(Work const& other) {
    work = &other, index = -1, begin = end = 0;
    next();
  }

  // The same for those who do not load: all blocks of the tile's first whole spans are one run, at
  // columns of no span. A mask of blocks then costs as little as a span with as many keys.
  RINGFA3_DEVICE bool begin_whole_spans(Work const& other) {
    work = &other, index = other.whole_spans - 1, begin = 0;
    end = keys = N * other.whole_blocks;
    return next();
  }

  // At the last columns of the tile's first span, which has some.
  RINGFA3_DEVICE void begin_first_span() {
    SpanColumns const& c = work->spans[0];
    index = 0, begin = c.begin, end = c.end, keys = c.keys;
    start = max(end - N, 0);
  }

  // Blocks of a span.
  RINGFA3_DEVICE static int blocks(SpanColumns const& c) {
    if (c.end <= c.begin) return 0;
    return OnGrid ? (c.end - 1) / N - c.begin / N + 1 : (c.end - c.begin - 1) / N + 1;
  }

  // Whether no block of a span needs a mask, for all rows of a tile.
  RINGFA3_DEVICE static bool whole(SpanColumns const& c, PlanSpan const& span, int rows) {
    if constexpr (Clips) {
      if (!SpanRows(span).all()) return false;
    }
    return c.low + rows <= 1 && c.end <= c.high + 1 && c.end % N == 0;
  }

  RINGFA3_DEVICE SpanColumns columns() const {
    return index < kDecodedSpans
               ? work->spans[index]
               : SpanColumns(work->tile, plan_spans[work->tile.first_span + index]);
  }

  // The rows of the tile that are the span's; only with `Clips`.
  RINGFA3_DEVICE SpanRows rows() const {
    return index < kDecodedSpans ? work->span_rows[index]
                                 : SpanRows(plan_spans[work->tile.first_span + index]);
  }

  // Steps to the next block; false after the last one. The caller has called `complete`.
  RINGFA3_DEVICE bool next() {
    while (end <= begin) {
      if (++index >= work->tile.num_spans) return false;
      SpanColumns const c = columns();
      begin = c.begin, end = c.end, keys = c.keys;
    }
    start = OnGrid ? (end - 1) / N * N : max(end - N, 0);
    return true;
  }

  // The columns from `start` on are done.
  RINGFA3_DEVICE void complete() { end = start; }

  // Blocks from this one on that need no mask.
  RINGFA3_DEVICE int unmasked_blocks() const {
    if (index < work->whole_spans) return end / N;
    if constexpr (Clips) {
      if (!rows().all()) return 0;
    }
    SpanColumns const c = columns();  // every row attends to columns [seen_from, c.high]
    int const seen_from = c.low + work->tile.rows - 1;
    bool const masked = start < seen_from || start + N > min(end, c.high + 1);
    return masked ? 0 : (start - max(seen_from, 0)) / N + 1;
  }

  // `complete` and `next` within a run of unmasked blocks.
  RINGFA3_DEVICE void next_unmasked_block() { skip_unmasked_blocks(1); }

  // The same `blocks` > 0 times.
  RINGFA3_DEVICE void skip_unmasked_blocks(int blocks) { start -= blocks * N, end = start + N; }

  // Rows of the block's K and V that belong to the segment; the rows after them are the next
  // one's.
  RINGFA3_DEVICE int valid_rows() const { return min(N, keys - start); }
};

}  // namespace ringfa3
