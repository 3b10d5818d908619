// The plan arithmetic of csrc/plan, compiled by a plain C++ compiler for test_device_plan.py.
#include <cstdint>
#include <cstdlib>
#include <type_traits>

#include "plan/row_blocks.h"
#include "plan/spans.h"
#include "plan/work_queue.h"

using namespace ringfa3;

namespace {

// Calls `f` with the size as a constant; the sizes are those of `strategies.tiles`.
template <class F>
auto with_size(int size, F const& f) {
  switch (size) {
    case 4:
      return f(std::integral_constant<int, 4>{});
    case 8:
      return f(std::integral_constant<int, 8>{});
    case 12:
      return f(std::integral_constant<int, 12>{});
    case 16:
      return f(std::integral_constant<int, 16>{});
  }
  std::abort();
}

}  // namespace

extern "C" {

// (span, block, blocks left) of the row blocks of a work unit; returns how many there are. Ends
// with the tile's last span, which the kernel does not know.
int row_blocks(int m, WorkUnit const* unit, Span const* spans, int num_spans, int32_t* out) {
  int count = 0;
  with_size(m, [&](auto size) {
    for (RowBlockIterator<size()> at(*unit); at.left > 0; at.next_span()) {
      if (at.index == unit->first_span + num_spans) return;
      for (at.begin_span(*unit, spans[at.index]); at.in_span(); at.next()) {
        out[3 * count] = at.index, out[3 * count + 1] = at.block, out[3 * count + 2] = at.left;
        ++count;
      }
    }
  });
  return count;
}

// The row blocks that a unit's tile visits in spans [first_span, first_span + num_spans).
int visited_blocks(int m, WorkUnit const* unit, Span const* spans, int num_spans) {
  return with_size(m, [&](auto size) {
    int count = 0;
    for (int i = unit->first_span; i < unit->first_span + num_spans; ++i) {
      Range const range = row_block_range<size()>(*unit, spans[i]);
      count += range.end - range.begin;
    }
    return count;
  });
}

int dq_order(int m, int n, Span const* spans, int32_t const* earlier, int span, int token,
             int key_row) {
  return with_size(m, [&](auto rows) {
    return with_size(n, [&](auto keys) {
      return dq_order<rows(), keys()>(spans, earlier, span, token, key_row);
    });
  });
}

// (span, first column, end, low, high, unmasked, own rows) of the blocks of a forward tile, as
// `apply_mask` and the consumer see them; returns how many there are.
int key_blocks(int n, int on_grid, Tile const* tile, Span const* spans, int32_t* out) {
  WorkItem work{};
  work.tile = *tile;
  for (int i = 0; i < min(tile->num_spans, kDecodedSpans); ++i) {
    work.spans[i] = SpanColumns(*tile, spans[tile->first_span + i]);
  }
  auto list = [&](auto block) {
    int count = 0, unmasked = 0;
    while (block.next()) {
      SpanColumns const c = block.columns();
      if (unmasked == 0) unmasked = block.unmasked_blocks();
      int32_t const row[] = {tile->first_span + block.index,
                             block.start,
                             block.end,
                             c.low,
                             c.high,
                             unmasked > 0,
                             block.valid_rows()};
      for (int32_t x : row) *out++ = x;
      unmasked = max(0, unmasked - 1);
      ++count;
      block.complete();
    }
    return count;
  };
  return with_size(n, [&](auto size) {
    return on_grid ? list(BlockIterator<size(), true>(work, spans))
                   : list(BlockIterator<size()>(work, spans));
  });
}

// (record, head) of work items 0, 1, ...
void work_order(int records, int heads, int head_section, int32_t* out) {
  for (int w = 0; w < records * heads; ++w) {
    WorkIndex const index = decode_work(w, records, heads, head_section);
    out[2 * w] = index.record, out[2 * w + 1] = index.head;
  }
}
}
