// The plan arithmetic of csrc/plan, compiled by a plain C++ compiler for test_device_plan.py.
#include <cstdint>
#include <cstdlib>
#include <type_traits>

#include "plan/row_blocks.h"
#include "plan/spans.h"
#include "plan/work_queue.h"

using namespace ringfa3;

namespace {

constexpr int kNarrow = 4;  // keys of a narrow span at most

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

// Calls `f` with the spans in their own type.
template <class F>
auto with_spans(int clips, void const* spans, F const& f) {
  return clips ? f(static_cast<ClippedSpan const*>(spans)) : f(static_cast<Span const*>(spans));
}

}  // namespace

extern "C" {

// (span, block, blocks left) of the row blocks of a work unit; returns how many there are. Ends
// with the tile's last span, which the kernel does not know.
int row_blocks(int clips, int m, WorkUnit const* unit, void const* table, int num_spans,
               int32_t* out) {
  int count = 0;
  with_spans(clips, table, [&](auto spans) {
    with_size(m, [&](auto size) {
      for (RowBlockIterator<size()> at(*unit); at.left > 0; at.next_span()) {
        if (at.index == unit->first_span + num_spans) return;
        for (at.begin_span(*unit, spans[at.index]); at.in_span(); at.next()) {
          out[3 * count] = at.index, out[3 * count + 1] = at.block, out[3 * count + 2] = at.left;
          ++count;
        }
      }
    });
  });
  return count;
}

// The row blocks that a unit's tile visits in spans [first_span, first_span + num_spans).
int visited_blocks(int clips, int m, WorkUnit const* unit, void const* table, int num_spans) {
  return with_spans(clips, table, [&](auto spans) {
    return with_size(m, [&](auto size) {
      int count = 0;
      for (int i = unit->first_span; i < unit->first_span + num_spans; ++i) {
        Range const range = row_block_range<size()>(*unit, spans[i]);
        count += range.end - range.begin;
      }
      return count;
    });
  });
}

// (token, rows, low, high, first row, end row, first key, end key, masked) of a row block of a
// clipped span, for keys [key_row, key_row + keys).
void clipped_block(int m, int n, ClippedSpan const* span, int number, int key_row, int keys,
                   int32_t* out) {
  struct {
    int32_t token, rows, low, high, first_row, end_row, first_key, end_key;
    int32_t key_row, keys;
  } b{};
  b.key_row = key_row, b.keys = keys;
  bool const masked = with_size(m, [&](auto rows) {
    return with_size(
        n, [&](auto columns) { return decode_clipped_block<rows(), columns()>(*span, number, b); });
  });
  int32_t const row[] = {b.token,   b.rows,      b.low,     b.high, b.first_row,
                         b.end_row, b.first_key, b.end_key, masked};
  for (int32_t x : row) *out++ = x;
}

int dq_order(int m, int n, Span const* spans, int32_t const* earlier, int span, int token,
             int key_row) {
  return with_size(m, [&](auto rows) {
    return with_size(n, [&](auto keys) {
      return dq_order<rows(), keys()>(spans, earlier, span, token, key_row);
    });
  });
}

// (span, first column, end, low, high, unmasked, own rows, first row, end row) of the blocks of a
// forward tile, as `apply_mask` and the consumer see them; returns how many there are. form: 1 on
// the grid, 2 clipped spans, with a table of visits. joins: whole spans are one run, of span -1,
// and a narrow span, off the grid, comes first; the first record is (blocks, whole spans, their
// blocks, narrow) then.
int key_blocks(int n, int form, bool joins, Tile const* tile, void const* table, int32_t* out) {
  bool const clips = form == 2;
  ClippedWorkItem work{};
  work.tile = *tile;
  for (int i = 0; i < min(tile->num_spans, kDecodedSpans); ++i) {
    int const at = tile->first_span + i;
    if (clips) {
      auto const& visit = static_cast<SpanVisit const*>(table)[at];
      work.spans[i] = SpanColumns(*tile, visit), work.span_rows[i] = SpanRows(visit);
    } else {
      work.spans[i] = SpanColumns(*tile, static_cast<Span const*>(table)[at]);
    }
  }
  auto const* const spans = static_cast<Span const*>(table);
  auto put = [&](auto const& block, bool in_run, bool unmasked) {
    SpanColumns const c = in_run ? SpanColumns{} : block.columns();
    int32_t first_row = 0, end_row = SpanRows::kEveryRow;
    if constexpr (std::remove_cvref_t<decltype(block)>::kClips) {
      if (!in_run) first_row = block.rows().begin, end_row = block.rows().end;
    }
    int32_t const row[] = {in_run ? -1 : tile->first_span + block.index,
                           block.start,
                           block.end,
                           c.low,
                           c.high,
                           unmasked,
                           block.valid_rows(),
                           first_row,
                           end_row};
    for (int32_t x : row) *out++ = x;
  };
  auto list = [&](auto block) {
    int count = 0, unmasked = 0;
    bool more, whole = true;
    if (joins) {
      for (block.index = 0; block.index < tile->num_spans; ++block.index) {
        SpanColumns const c = block.columns();
        bool const narrow =
            form != 1 && block.index == 0 && tile->num_spans > 1 && c.narrow(kNarrow);
        int const n = narrow ? 0 : block.blocks(c);
        auto const& span = block.plan_spans[tile->first_span + block.index];
        whole = whole && (narrow || block.whole(c, span, tile->rows));
        work.narrow |= narrow;
        work.blocks += n;
        if (whole) work.whole_spans += 1, work.whole_blocks += n;
      }
      int32_t const counts[9] = {work.blocks, work.whole_spans, work.whole_blocks, work.narrow};
      for (int32_t x : counts) *out++ = x;
      count = 1;
      if (work.narrow) {
        BlockIterator<kNarrow, false, decltype(block)::kClips> first(work, spans);
        first.begin_first_span();
        put(first, false, false);
        ++count;
      }
      more = block.begin_whole_spans(work);
    } else {
      more = block.next();
    }
    for (; more; more = block.next()) {
      if (unmasked == 0) unmasked = block.unmasked_blocks();
      put(block, block.index < work.whole_spans, unmasked > 0);
      unmasked = max(0, unmasked - 1);
      ++count;
      block.complete();
    }
    return count;
  };
  return with_size(n, [&](auto size) {
    return clips       ? list(BlockIterator<size(), false, true>(work, spans))
           : form == 1 ? list(BlockIterator<size(), true>(work, spans))
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
