// The backward's work queue: one thread fetches work items and decodes their row blocks.
#pragma once

#include "backward/shapes.cuh"
#include "hopper/pipeline.cuh"
#include "plan/row_blocks.h"

namespace ringfa3 {

using namespace cute;

// One thread: fetches work items from the counter and decodes them block by block. It fetches the
// next item while the last blocks of this one are loaded. The first one comes from the counter,
// too: a CTA that finds no room on the GPU then holds no item whose turn others wait for. The
// thread has few registers, so it reads values again rather than keep them.
template <class Shapes>
CUTE_DEVICE void fetch_row_blocks(BackwardParams const& p, typename Shapes::SharedStorage& smem) {
  constexpr int M = Shapes::M, N = Shapes::N;
  BackwardArgs const& a = p.args;
  Pipeline<kWorkDepth> work_stage;
  Pipeline<Shapes::BlockDepth> stage;
  smem.next_work = atomicAdd(a.counter, 1);
  for (; smem.next_work < p.num_work; work_stage.advance()) {
    smem.work_empty[work_stage.index()].wait(work_stage.phase() ^ 1);
    KeyWorkItem& work = smem.work[work_stage.index()];
    auto const [number, kv_head] =
        decode_work(smem.next_work, a.num_work_units, p.kv_heads, a.head_section);
    work.unit = a.work_units[number];
    work.kv_head = kv_head;
    smem.work_full[work_stage.index()].arrive();
    WorkUnit const& unit = work.unit;
    for (int h = 0; h < unit.num_heads; ++h) {
      for (RowBlockIterator<M> at(unit); at.left > 0; at.next_span()) {
        Span const& span = a.spans[at.index];
        for (at.begin_span(unit, span); at.in_span(); at.next()) {
          bool const last_head = h + 1 == unit.num_heads;
          if (last_head && at.left == min(kBlocksAhead, unit.blocks)) {
            smem.next_work = atomicAdd(a.counter, 1);
          }
          smem.block_done[stage.index()].wait(stage.phase() ^ 1);
          RowBlock& block = smem.blocks[stage.index()];
          int flags = h == 0 && at.left == unit.blocks ? kFirstBlock : 0;
          if (last_head && at.left == 1) flags |= kLastBlock;
          block.key_row = unit.row0, block.keys = unit.rows;
          block.token = span.q0 + at.block * M;
          block.rows = min(M, span.q1 - block.token);
          block.low = unit.row0 - span.k0 - span.hi - at.block * M;
          block.high = block.low + span.hi - span.lo;
          if (block.rows < M) flags |= kMasked | kForeign;
          if (block.keys < N || N - 1 + block.low > 0 || block.high < M - 1) flags |= kMasked;
          block.flags = flags;
          block.head = work.kv_head * p.group + unit.first_head + h;
          block.target =
              block.head * static_cast<int>(a.grid.num_blocks) + span.grid_q0 / M + at.block;
          block.span = at.index;
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
