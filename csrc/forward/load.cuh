// The producer: streams Q, K and V of a CTA's work items into shared memory.
//
// Letters in shapes: M rows of a tile, N keys of a block, D head dim of Q and K, DV head dim of V
// and O, S stages.
#pragma once

#include "forward/partial_output.cuh"
#include "forward/shapes.cuh"
#include "hopper/pipeline.cuh"
#include "hopper/sync.cuh"

namespace ringfa3 {

using namespace cute;

// Loads the V of a block to a stage. at: kKeyTile * tile + key if `Shapes::VByTile`, else a row.
template <class Shapes>
CUTE_DEVICE void load_values(ForwardParams<Shapes> const& p, typename Shapes::SharedStorage& smem,
                             PipelineState<Shapes::Stages> stage, int at, WorkItem const& work) {
  constexpr int N = Shapes::N, DV = Shapes::DV;
  smem.v_empty[stage.index()].wait(stage.phase() ^ 1);
  auto& full = smem.v_full[stage.index()];
  auto* const to = smem.v + stage.index() * N * DV;
  if constexpr (Shapes::VByTile) {
    int const tile = at / kKeyTile * p.args.k.heads + work.kv_head;
    load_box<DV, N>(p.v, full, to, 0, tile, at % kKeyTile);
  } else {
    load_box<N, DV>(p.v, full, to, at, work.kv_head);
  }
}

// Loads a tile's narrow span: its K after that of the first block, its V before.
template <class Shapes>
CUTE_DEVICE void load_narrow_span(ForwardParams<Shapes> const& p,
                                  typename Shapes::SharedStorage& smem,
                                  PipelineState<Shapes::Stages> stage,
                                  typename Shapes::Work const& work) {
  constexpr int kRows = Shapes::kPolicy.narrow_keys;
  BlockIterator<kRows, false, Shapes::Clips> block(work, p.args.spans);
  block.begin_first_span();
  int const row = work.spans[0].key_row + block.start;
  int const k = stage.index(), v = stage.previous().index();
  smem.k_empty[k].wait(stage.phase() ^ 1);
  load_box<kRows, Shapes::D>(p.narrow.k, smem.k_full[k], smem.k + k * Shapes::N * Shapes::D, row,
                             work.kv_head);
  smem.v_empty[v].wait(stage.previous().phase() ^ 1);
  load_box<kRows, Shapes::DV>(p.narrow.v, smem.v_full[v], smem.v + v * Shapes::N * Shapes::DV, row,
                              work.kv_head);
}

// One thread. Loads V one block after K, in the order in which consumers read them. Returns the
// stage after the last one.
template <class Shapes>
CUTE_DEVICE PipelineState<Shapes::Stages> load_tiles(ForwardParams<Shapes> const& p,
                                                     typename Shapes::SharedStorage& smem) {
  constexpr int M = Shapes::M, N = Shapes::N, D = Shapes::D;
  PipelineState<Shapes::Stages> k_stage;
  PipelineState<Shapes::QStages> q_stage;
  PipelineState<kWorkDepth> work_stage;
  uint32_t arrived = 1;  // bit n: arrival flag n was set; spans with flag 0 wait for nothing
  while (true) {
    smem.work_full[work_stage.index()].wait(work_stage.phase());
    auto& work = smem.work[work_stage.index()];
    if (work.head == kEndOfWork) return k_stage;
    if (work.head == kNoWork) {
      smem.work_empty[work_stage.index()].arrive();
      work_stage.advance();
      continue;
    }
    auto load_q = [&] {
      constexpr int kRows = M / Shapes::QParts;
      int const stage = q_stage.index();
      CUTE_UNROLL
      for (int part = 0; part < Shapes::QParts; ++part) {
        smem.q_empty[stage][part].wait(q_stage.phase() ^ 1);
        load_box<kRows, D>(p.q, smem.q_full[stage][part], smem.q + (stage * M + kRows * part) * D,
                           work.tile.row0 + kRows * part, work.head);
      }
      q_stage.advance();
    };
    if (!(work.tile.flags & kFirst)) prefetch_partial(p, work);
    if constexpr (Shapes::QStages > 1) load_q();
    auto load_v = [&](int at) { load_values(p, smem, k_stage.previous(), at, work); };
    auto wait_for_keys = [&](int arrival) {
      if (arrived >> arrival & 1) return;
      wait_for_arrival(p.args.arrivals + arrival);
      asm volatile("fence.proxy.async;" ::: "memory");  // before TMA reads these keys
      arrived |= 1u << arrival;
    };
    typename Shapes::Blocks block(work, p.args.spans);
    if constexpr (Shapes::kNarrows) block.index += work.narrow;
    int span = -1, key_row = 0;  // of the block
    int v_at = -1;               // the position of the block before, whose V is loaded next
    block.next();
    for (int left = work.blocks; left > 0; --left) {
      if (left == min(work.blocks, kBlocksAhead)) smem.work_wanted.arrive();  // for the next item
      if (span != block.index) {
        span = block.index;
        SpanColumns const c = block.columns();
        key_row = c.key_row;
        wait_for_keys(c.arrival);
      }
      int const row = key_row + block.start;
      int at = row;                    // where the block's V is
      [[maybe_unused]] int tile;       // of keys
      [[maybe_unused]] float k_scale;  // of the block; volatile accesses stay where they are
      if constexpr (Shapes::Quantised) {
        int const first = __ldg(p.scales.first_tile + work.tile.first_span + block.index);
        tile = first + block.start / kKeyTile;
        if constexpr (Shapes::VByTile) at = tile * kKeyTile + block.start % kKeyTile;
        float const volatile* const from = p.scales.k_scale;
        k_scale = from[work.kv_head * p.scales.key_tiles + tile];
      }
      smem.k_empty[k_stage.index()].wait(k_stage.phase() ^ 1);
      if constexpr (Shapes::Quantised) {
        *static_cast<float volatile*>(&smem.k_scale[k_stage.index()]) = k_scale;
      }
      load_box<N, D>(p.k, smem.k_full[k_stage.index()], smem.k + k_stage.index() * N * D, row,
                     work.kv_head);
      block.complete();
      block.next();  // before the wait for a stage of V: it may read a span of the plan
      if (v_at >= 0) {
        load_v(v_at);
      } else if constexpr (Shapes::QStages == 1) {
        load_q();  // after the first K: a stage of K is free before the last tile releases Q
      }
      k_stage.advance();
      if constexpr (Shapes::kNarrows) {
        if (v_at < 0 && work.narrow) {
          wait_for_keys(work.spans[0].arrival);
          load_narrow_span(p, smem, k_stage, work);
          k_stage.advance();
        }
      }
      v_at = at;
    }
    load_v(v_at);
    smem.work_empty[work_stage.index()].arrive();
    work_stage.advance();
  }
}

}  // namespace ringfa3
