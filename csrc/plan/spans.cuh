// What a CTA works on: a tile for one head, what it visits, and the blocks in their order.
#pragma once

#include <cute/tensor.hpp>

#include "params.h"
#include "hopper/pipeline.cuh"

namespace ringfa3 {

using namespace cute;

constexpr int kVisits = 8;

// What a tile visits of one span: columns [begin, end), of which its row r sees
// [low + r, high + r]. key_row is the span's first key, keys how many it has, arrival the number of
// the word that they wait for, or 0.
struct Visit {
  int32_t begin, end, low, high, key_row, keys, arrival;
  Visit() = default;
  CUTE_DEVICE Visit(Tile const& tile, Span const& s) {
    int const i = tile.row0 - s.q0;
    low = i + s.lo, high = i + s.hi, key_row = s.k0, keys = s.k1 - s.k0;
    arrival = s.arrival;
    begin = max(0, low);
    end = min(keys, tile.rows + high);
  }
};

// A tile for one query head. Heads run in sections whose K/V share the L2 cache; inside a section
// all heads of a tile come side by side, tiles in the order of the plan.
struct Work {
  int32_t head;  // -1: no more
  int32_t kv_head;
  bool called_off;  // keys of this tile will not arrive
  Tile tile;
  Visit visits[kVisits];  // of the first spans; a tile with more reads the rest from the plan
};

// The blocks of a tile, one flat sequence over its spans, each span from its last column down.
// The lowest block of a span starts at its first column and hides what the one above has covered,
// so no block reads beyond a span that has at least N keys.
template <int N>
struct BlockIterator {
  Work const* work;
  Span const* spans;       // of the plan
  int index = -1;          // of the visit
  int end = 0, begin = 0;  // its columns not yet done
  int open = 0, shut = 0;  // columns [open, shut) are seen by every row
  int keys = 0;            // of the span
  int start = 0;           // first column of this block

  CUTE_DEVICE BlockIterator(Work const& work, Span const* spans) : work(&work), spans(spans) {}
  // Goes to the first block of another tile.
  CUTE_DEVICE void begin_work(Work const& other) {
    work = &other, index = -1, begin = end = 0;
    next();
  }
  CUTE_DEVICE Visit visit() const {
    return index < kVisits ? work->visits[index]
                           : Visit(work->tile, spans[work->tile.first_span + index]);
  }
  CUTE_DEVICE bool next() {
    while (end <= begin) {
      if (++index >= work->tile.num_spans) return false;
      Visit const v = visit();
      begin = v.begin, end = v.end;
      open = v.low + work->tile.rows - 1, shut = v.high + 1, keys = v.keys;
    }
    start = max(end - N, 0);
    return true;
  }
  CUTE_DEVICE bool masked() const { return start < open || start + N > min(end, shut); }
  // How many blocks from this one on need no mask.
  CUTE_DEVICE int plain() const { return masked() ? 0 : (start - max(open, 0)) / N + 1; }
  // Goes to the next of them.
  CUTE_DEVICE void follow() { end = start, start -= N; }
  // Rows of this block's K and V that belong to the span; those behind are its neighbour's.
  CUTE_DEVICE int owned() const { return min(N, keys - start); }
  // Whether at most `blocks` more follow, this one included.
  CUTE_DEVICE bool nearly_done(int blocks) const {
    return index + 1 >= work->tile.num_spans && end - begin <= blocks * N;
  }
  // Columns from `start` on are done.
  CUTE_DEVICE void done() { end = start; }
};

}  // namespace ringfa3
