// The forward's work queue: a scheduler warp fetches work items from a counter and decodes them.
#pragma once

#include "forward/shapes.cuh"
#include "hopper/pipeline.cuh"

namespace ringfa3 {

using namespace cute;

// Warp-wide: stores O = 0 and the LSE, the sink or -inf, for the rows of a fully masked tile.
template <class Shapes>
CUTE_DEVICE void store_empty_tile(ForwardArgs const& a, Tile const& tile, int head, int lane) {
  constexpr int kEights = Shapes::DV / 8;  // of a row of DV columns, 16 bytes each
  auto* const out = static_cast<typename Shapes::Element*>(a.out.data) + head * a.out.head_stride;
#pragma unroll 1  // few registers
  for (int i = lane; i < tile.rows * kEights; i += kWarp) {
    int const column = i % kEights * 8;
    if (column >= a.out.head_dim) continue;
    int64_t const token = tile.row0 + i / kEights;
    auto* const eight = out + token * a.out.token_stride + column;
    *reinterpret_cast<uint4*>(eight) = make_uint4(0, 0, 0, 0);
  }
  float const sink = sink_of<Shapes>(a, tile, head);
#pragma unroll 1
  for (int i = lane; i < tile.rows; i += kWarp) {
    a.lse[head * a.lse_head_stride + tile.row0 + i] = sink;
  }
}

// Warp-wide: whether rows of an item that its consumers have released must be computed again: a
// product with P > 1 overflowed.
template <int Warps>
CUTE_DEVICE bool must_repeat(WorkItem const& work, int lane) {
  bool const overflow = lane < 2 * Warps && work.overflow[lane / 2][lane % 2] != 0;
  return __any_sync(0xffffffff, work.head >= 0 && !work.use_row_max && overflow);
}

// Warp-wide: copies the first visits of an item whose tile lane 0 has stored. The warp has few
// registers: it copies word by word, and reads the tile again.
CUTE_DEVICE void copy_visits(ForwardArgs const& a, ClippedWorkItem& work, int lane) {
  constexpr int kWords = sizeof(SpanVisit) / 4, kOfColumns = sizeof(SpanColumns) / 4;
  auto const* const from =
      reinterpret_cast<int32_t const*>(a.spans) + int64_t{kWords} * work.tile.first_span;
  auto* const columns = reinterpret_cast<int32_t*>(work.spans);
  int const rows = reinterpret_cast<int32_t*>(work.span_rows) - columns;
#pragma unroll 1
  for (int i = lane; i < kWords * min(work.tile.num_spans, kDecodedSpans); i += kWarp) {
    int const visit = i / kWords, word = i % kWords;
    columns[word < kOfColumns ? i - 2 * visit : rows + 2 * visit + word - kOfColumns] = from[i];
  }
}

// Warp-wide: counts the blocks and the whole spans of an item, whose tile and decoded spans are
// stored. The warp has few registers: the counts are in shared memory.
template <class Shapes>
CUTE_DEVICE void count_blocks(ForwardArgs const& a, typename Shapes::Work& work, int lane) {
  using Blocks = typename Shapes::Blocks;
  auto const* const spans =
      reinterpret_cast<typename Blocks::PlanSpan const*>(a.spans) + work.tile.first_span;
  if (!Shapes::Clips && work.tile.num_spans == 1) {  // the latency counts in short sequences
    SpanColumns const c = work.spans[0];
    int const blocks = Blocks::blocks(c);
    bool const whole = Blocks::whole(c, spans[0], work.tile.rows);
    if (lane == 0) {
      work.blocks = blocks, work.whole_spans = whole, work.whole_blocks = whole ? blocks : 0;
    }
    return;
  }
  if (lane == 0) work.blocks = work.whole_spans = work.whole_blocks = 0;
  bool whole = true;  // all spans so far
#pragma unroll 1
  for (int first = 0; first < work.tile.num_spans; first += kWarp) {
    int own = 0;  // blocks of this lane's span
    bool own_whole = false;
    if (first + lane < work.tile.num_spans) {
      auto const& span = spans[first + lane];
      SpanColumns const c(work.tile, span);
      own = Blocks::blocks(c), own_whole = Blocks::whole(c, span, work.tile.rows);
      if (Shapes::kNarrows && work.tile.num_spans > 1 && first + lane == 0 &&
          c.narrow(Shapes::kPolicy.narrow_keys)) {
        work.narrow = 1, own = 0, own_whole = true;
      }
    }
    int const blocks = __reduce_add_sync(0xffffffff, own);
    if (lane == 0) work.blocks += blocks;
    if (!whole) continue;
    int const run = __clz(__brev(__ballot_sync(0xffffffff, !own_whole)));  // whole from lane 0 on
    whole = run == kWarp;
    if (lane >= run) own = 0;
    own = __reduce_add_sync(0xffffffff, own);
    if (lane == 0) work.whole_spans += run, work.whole_blocks += own;
  }
  if (Shapes::kNarrows && lane == 0 && work.blocks == 0) {  // other spans are empty: a block of N
    work.blocks = 1, work.narrow = work.whole_spans = 0;
  }
}

// The scheduler warp. It claims the next item when the loader asks: at most kBlocksAhead blocks of
// this one are then left to load. So the CTA that is free first gets the item.
// Each item of a launch causes one increment of the counter, so the last one wraps it to 0 for the
// next launch.
//
// If consumers report an overflow of P V, the item is issued again in its stage, with use_row_max.
// At the end of the queue the warp issues kNoWork, until consumers have released all items without
// an overflow; then kEndOfWork.
template <class Shapes>
CUTE_DEVICE void fetch_work(ForwardParams<Shapes> const& p, typename Shapes::SharedStorage& smem) {
  constexpr int kWarps = 4 * Shapes::Consumers;
  int const lane = threadIdx.x % kWarp;
  ForwardArgs const& a = p.args;
  PipelineState<kWorkDepth> stage;
  uint32_t wanted_phase = 0;
  int w = blockIdx.x;
  bool fetched = false, idle = false;  // the last item came from the counter; was kNoWork
  while (true) {
    smem.work_empty[stage.index()].wait(stage.phase() ^ 1);
    auto& work = smem.work[stage.index()];
    bool const repeats = Shapes::MayOverflow && must_repeat<kWarps>(work, lane);
    __syncwarp();  // every lane has read `work`
    if (!repeats && lane < 2 * kWarps) work.overflow[lane / 2][lane % 2] = 0;
    if (stage.count > 0 && !idle) {  // the loader wants the next item
      smem.work_wanted.wait(wanted_phase);
      wanted_phase ^= 1;
    }
    if (fetched) {
      if (lane == 0) w = gridDim.x + atomicInc(a.counter, p.num_work - 1);
      w = __shfl_sync(0xffffffff, w, 0);
    }
    // A fully masked tile is done here.
    Tile tile;
    int head = 0;
    fetched = false;
    while (!repeats && w < p.num_work) {
      auto const index = decode_work(w, a.num_tiles, p.heads, a.head_section);
      tile = a.tiles[index.record], head = index.head;
      if (fetched = tile.num_spans > 0; fetched) break;
      store_empty_tile<Shapes>(a, tile, head, lane);
      if (lane == 0) w = gridDim.x + atomicInc(a.counter, p.num_work - 1);
      w = __shfl_sync(0xffffffff, w, 0);
    }
    bool ends = false;
    if (fetched) {
      if (!Shapes::Clips && lane < min(tile.num_spans, kDecodedSpans)) {
        work.spans[lane] = SpanColumns(tile, a.spans[tile.first_span + lane]);
      }
      if (lane == 0) {
        work.tile = tile;
        work.head = head;
        work.kv_head = head / p.group;
        work.use_row_max = false;
        work.narrow = 0;
      }
      __syncwarp();
      if constexpr (Shapes::Clips) copy_visits(a, work, lane);
      count_blocks<Shapes>(a, work, lane);
    } else if (repeats) {
      if (lane == 0) work.use_row_max = true;
    } else {
      ends = idle;
      for (uint32_t ago = 1; Shapes::MayOverflow && idle && ago < kWorkDepth && ago <= stage.count;
           ++ago) {
        PipelineState<kWorkDepth> const other{stage.count - ago};
        smem.work_empty[other.index()].wait(other.phase());
        if (must_repeat<kWarps>(smem.work[other.index()], lane)) ends = false;
      }
      if (lane == 0) work.head = ends ? kEndOfWork : kNoWork;
    }
    idle = !fetched && !repeats;
    __syncwarp();
    if (lane == 0) smem.work_full[stage.index()].arrive();
    if (ends) return;
    stage.advance();
  }
}

}  // namespace ringfa3
