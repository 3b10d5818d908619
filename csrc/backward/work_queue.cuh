// The backward's work queue: one thread fetches work items and decodes their row blocks.
#pragma once

#include "backward/shapes.cuh"
#include "hopper/cluster.cuh"
#include "hopper/pipeline.cuh"
#include "plan/row_blocks.h"

namespace ringfa3 {

using namespace cute;

// One thread: the number of the CTA's `count`-th work item. The first CTA of a pair takes it from
// the counter and sends it to the second.
template <class Shapes>
CUTE_DEVICE int fetch_item(int32_t* counter, typename Shapes::SharedStorage& smem, uint32_t count) {
  if constexpr (Shapes::Ctas == 1) {
    return atomicAdd(counter, 1);
  } else {
    PipelineState<1> const stage{count};
    if (block_rank_in_cluster() == 0) {
      int const number = atomicAdd(counter, 1);
      smem.sent_empty.wait(stage.phase() ^ 1);
      send_word(1, &smem.sent_work, number, smem.sent_full);
      return number;
    }
    smem.sent_full.arrive_and_expect_tx(sizeof smem.sent_work);
    smem.sent_full.wait(stage.phase());
    int const number = *static_cast<int32_t volatile*>(&smem.sent_work);
    smem.sent_empty.arrive(0u);
    return number;
  }
}

// One thread: span number `index`. It reads a clipped span again and again, from shared memory.
template <class Shapes>
CUTE_DEVICE auto const& read_span(BackwardArgs const& a, typename Shapes::SharedStorage& smem,
                                  int index) {
  if constexpr (Shapes::Clips) {
    smem.span = static_cast<ClippedSpan const*>(a.spans)[index];
    return const_cast<ClippedSpan const volatile&>(smem.span);
  } else {
    return a.spans[index];
  }
}

// One thread: fetches work items from the counter and decodes them block by block. It fetches the
// next item while the last blocks of this one are loaded. The first item comes from the counter,
// too: so a CTA that finds no room on the GPU holds no item whose dQ others wait for. The thread
// has few registers: it reads values again instead of holding them.
template <class Shapes>
CUTE_DEVICE void fetch_row_blocks(BackwardParams const& p, typename Shapes::SharedStorage& smem) {
  constexpr int M = Shapes::M, N = Shapes::N;
  BackwardArgs const& a = p.args;
  PipelineState<kWorkDepth> work_stage;
  PipelineState<Shapes::BlockDepth> stage;
  smem.next_work = fetch_item<Shapes>(a.counter, smem, 0);
  for (; smem.next_work < p.num_work; work_stage.advance()) {
    smem.work_empty[work_stage.index()].wait(work_stage.phase() ^ 1);
    KeyWorkItem& work = smem.work[work_stage.index()];
    auto const [number, kv_head] =
        decode_work(smem.next_work, a.num_work_units, p.kv_heads, a.head_section);
    work.unit = a.work_units[number];
    work.kv_head = kv_head;
    smem.work_full[work_stage.index()].arrive();
    WorkUnit const& unit = work.unit;
    for (smem.head = 0; smem.head < unit.num_heads; ++smem.head) {
      for (RowBlockIterator<M> at(unit); at.left > 0; at.next_span()) {
        auto const& span = read_span<Shapes>(a, smem, at.index);
        for (at.begin_span(unit, span); at.in_span(); at.next()) {
          bool const last_head = smem.head + 1 == unit.num_heads;
          if (last_head && at.left == min(kBlocksAhead, unit.blocks)) {
            smem.next_work = fetch_item<Shapes>(a.counter, smem, work_stage.count + 1);
          }
          smem.block_done[stage.index()].wait(stage.phase() ^ 1);
          auto& block = smem.blocks[stage.index()];
          int flags = smem.head == 0 && at.left == unit.blocks ? kFirstBlock : 0;
          if (last_head && at.left == 1) flags |= kLastBlock;
          block.tile_row = block.key_row = unit.row0, block.keys = unit.rows;
          if constexpr (Shapes::Ctas > 1) {
            block.key_row += block_rank_in_cluster() * N;
            block.keys = min(max(unit.row0 + unit.rows - block.key_row, 0), N);
          }
          if constexpr (Shapes::Clips) {
            if (decode_clipped_block<M, N>(span, at.block, block)) flags |= kMasked;
            if (block.rows < M) flags |= kTailRows;
          } else {
            block.token = span.q0 + at.block * M;
            block.rows = min(M, span.q1 - block.token);
            block.low = block.key_row - span.k0 - span.hi - at.block * M;
            block.high = block.low + span.hi - span.lo;
            if (block.rows < M) flags |= kMasked | kTailRows;
            if (block.keys < N || N - 1 + block.low > 0 || block.high < M - 1) flags |= kMasked;
          }
          block.flags = flags;
          block.head = work.kv_head * p.group + unit.first_head + smem.head;
          block.target =
              block.head * static_cast<int>(a.padded.num_blocks) + span.padded_q0 / M + at.block;
          block.span = at.index;
          if (!Shapes::Clips && Shapes::Ctas == 1 && a.dq_semaphore) {  // a pair has `order_dq`
            block.dq_order = dq_order<M, Shapes::TileN>(a.spans, a.earlier, block.span, block.token,
                                                        block.tile_row);
          }
          smem.block_ready[stage.index()].arrive();
          stage.advance();
        }
      }
    }
  }
  smem.work_empty[work_stage.index()].wait(work_stage.phase() ^ 1);
  smem.work[work_stage.index()].kv_head = -1;
  smem.work_full[work_stage.index()].arrive();
  smem.block_done[stage.index()].wait(stage.phase() ^ 1);
  smem.blocks[stage.index()].head = -1;
  smem.block_ready[stage.index()].arrive();
}

}  // namespace ringfa3
