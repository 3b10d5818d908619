// The threads that serve the consumers: one says what comes next, one loads it, the others write
// dQ.
#pragma once

#include "backward/shapes.cuh"
#include "hopper/sync.cuh"

namespace ringfa3 {

using namespace cute;

// The blocks of M rows of a span that a key tile visits: [first, second).
template <int M>
CUTE_DEVICE int2 visited_blocks(WorkUnit const& unit, Span const& s) {
  int const j = unit.row0 - s.k0;
  int const begin = max(0, j - s.hi), end = min(s.q1 - s.q0, j + unit.rows - s.lo);
  return begin < end ? make_int2(begin / M, (end + M - 1) / M) : make_int2(0, 0);
}

// Key tiles of a span that visit its `block`-th block of rows: [first, second).
template <int M, int N>
CUTE_DEVICE int2 visitors(Span const& s, int block) {
  int const begin = max(0, block * M + s.lo);
  int const end = min(s.k1 - s.k0, min(block * M + M, s.q1 - s.q0) + s.hi);
  return begin < end ? make_int2(begin / N, (end + N - 1) / N) : make_int2(0, 0);
}

// How many tiles add to a block of dQ before the one that has it now: `Tiling.turn` of
// ringfa3/plan.py.
template <int M, int N>
CUTE_DEVICE int turn_of(BackwardArgs const& a, RowBlock const& block) {
  Span const& span = a.spans[block.span];
  int const number = (block.token - span.q0) / M;
  int turn = visitors<M, N>(span, number).y - 1 - (block.key_row - span.k0) / N;
  for (int other = a.earlier[block.span]; other >= 0; other = a.earlier[other]) {
    int2 const between = visitors<M, N>(a.spans[other], number);
    turn += between.y - between.x;
  }
  return turn;
}

// Piece of work `w`, decoded. KV heads run in sections whose Q, dO and dQ share the L2 cache;
// inside a section all heads of a work unit come side by side, work units in the order of the plan.
CUTE_DEVICE void decode(BackwardParams const& p, int w, KeyWork& work) {
  BackwardArgs const& a = p.args;
  int const per_section = a.num_work_units * a.head_section;
  int const section = w / per_section;
  int const rest = w - section * per_section;
  int const width = min(a.head_section, p.kv_heads - section * a.head_section);
  work.unit = a.work_units[rest / width];
  work.kv_head = section * a.head_section + rest % width;
}

// One thread: takes work units from the counter and says, block by block, what is to be loaded. The
// next work unit is taken while the last blocks of this one are on their way. The first one comes
// from the counter, too: a CTA that finds no room on the GPU then holds no work unit whose turn
// others wait for. The thread has few registers: what it can read again it does not keep.
template <class Traits>
CUTE_DEVICE void plan_blocks(BackwardParams const& p, typename Traits::SharedStorage& smem) {
  constexpr int M = Traits::M, N = Traits::N;
  BackwardArgs const& a = p.args;
  StageState<kWorkDepth> work_state;
  StageState<Traits::BlockDepth> state;
  smem.next_work = atomicAdd(a.counter, 1);
  for (; smem.next_work < p.num_work; work_state.advance()) {
    smem.work_empty[work_state.index()].wait(work_state.phase() ^ 1);
    KeyWork& work = smem.work[work_state.index()];
    decode(p, smem.next_work, work);
    smem.work_full[work_state.index()].arrive();
    WorkUnit const& unit = work.unit;
    for (int h = 0; h < unit.num_heads; ++h) {
      int skip = unit.skip, left = unit.blocks;
      for (int index = unit.first_span; left > 0; ++index) {
        Span const& span = a.spans[index];
        int2 const visited = visited_blocks<M>(unit, span);
        int number = visited.x + skip;
        skip = max(0, number - visited.y);
        for (; number < visited.y && left > 0; ++number, --left) {
          bool const last_head = h + 1 == unit.num_heads;
          if (last_head && left == min(kBlocksAhead, unit.blocks)) {
            smem.next_work = atomicAdd(a.counter, 1);
          }
          smem.block_done[state.index()].wait(state.phase() ^ 1);
          RowBlock& block = smem.blocks[state.index()];
          int flags = h == 0 && left == unit.blocks ? kFirstBlock : 0;
          if (last_head && left == 1) flags |= kLastBlock;
          block.key_row = unit.row0, block.keys = unit.rows;
          block.token = span.q0 + number * M;
          block.rows = min(M, span.q1 - block.token);
          block.low = unit.row0 - span.k0 - span.hi - number * M;
          block.high = block.low + span.hi - span.lo;
          if (block.rows < M) flags |= kMasked | kForeign;
          if (block.keys < N || N - 1 + block.low > 0 || block.high < M - 1) flags |= kMasked;
          block.flags = flags;
          block.head = work.kv_head * p.group + unit.first_head + h;
          block.target =
              block.head * static_cast<int>(a.grid.num_blocks) + span.grid_q0 / M + number;
          block.span = index;
          smem.block_ready[state.index()].arrive();
          state.advance();
        }
      }
    }
  }
  smem.work_empty[work_state.index()].wait(work_state.phase() ^ 1);
  smem.work[work_state.index()].kv_head = -1;
  smem.work_full[work_state.index()].arrive();
  smem.block_done[state.index()].wait(state.phase() ^ 1);
  smem.blocks[state.index()].head = -1;
  smem.block_ready[state.index()].arrive();
}

// One thread: loads the Q, dO, LSE and D of every block as soon as a stage is free, and with a
// work unit's first K and V, each when the work unit before needs it no longer: V behind its last
// scores, K at its end.
template <class Traits>
CUTE_DEVICE void load_blocks(BackwardParams const& p, typename Traits::SharedStorage& smem) {
  constexpr int M = Traits::M, N = Traits::N, D = Traits::D;
  StageState<1> kv;
  for (uint32_t count = 0;; ++count) {
    StageState<Traits::QStages> const q{count};
    StageState<Traits::DoutStages> const dout{count};
    StageState<Traits::BlockDepth> const place{count};
    smem.block_ready[place.index()].wait(place.phase());
    RowBlock& block = smem.blocks[place.index()];
    if (block.head < 0) return;
    if (p.args.turns) block.turn = turn_of<M, N>(p.args, block);
    bool const first = block.flags & kFirstBlock;
    smem.q_empty[q.index()].wait(q.phase() ^ 1);
    auto& q_full = smem.q_full[q.index()];
    load_box<M, D>(p.q, q_full, smem.q + q.index() * M * D, block.token, block.head);
    q_full.arrive_and_expect_tx(M * sizeof(float));
    SM90_BULK_COPY_G2S::copy(p.args.grid.lse + static_cast<int64_t>(block.target) * M,
                             reinterpret_cast<uint64_t*>(&q_full), smem.lse[q.index()],
                             M * sizeof(float));
    if (first) {
      smem.v_empty.wait(kv.phase() ^ 1);
      load_box<N, D>(p.v, smem.v_full, smem.v, block.key_row, block.head / p.group);
    }
    smem.dout_empty[dout.index()].wait(dout.phase() ^ 1);
    auto& dout_full = smem.dout_full[dout.index()];
    load_box<M, D>(p.dout, dout_full, smem.dout + dout.index() * M * D, block.token, block.head);
    dout_full.arrive_and_expect_tx(M * sizeof(float));
    SM90_BULK_COPY_G2S::copy(p.args.grid.delta + static_cast<int64_t>(block.target) * M,
                             reinterpret_cast<uint64_t*>(&dout_full), smem.delta[dout.index()],
                             M * sizeof(float));
    if (first) {
      smem.k_empty.wait(kv.phase() ^ 1);
      load_box<N, D>(p.k, smem.k_full, smem.k, block.key_row, block.head / p.group);
      kv.advance();
    }
  }
}

// One thread: adds the pieces of dQ that a warpgroup leaves in shared memory to global memory, in
// their turns where these are kept.
template <class Traits>
CUTE_DEVICE void write_dq(BackwardArgs const& a, typename Traits::SharedStorage& smem,
                          int warpgroup) {
  float const* const from = smem.dq[warpgroup];
  for (StageState<1> state;; state.advance()) {
    smem.dq_full[warpgroup].wait(state.phase());
    DqTile const piece = smem.dq_tiles[warpgroup];
    if (piece.number < 0) return;
    cutlass::arch::fence_view_async_shared();  // behind all that the consumers have stored
    if (a.turns) {
      wait_for_turn(a.turns + piece.number, piece.turn);
      asm volatile("fence.proxy.async.global;" ::: "memory");
    }
    float* const to = a.grid.dq + static_cast<int64_t>(piece.number) * kDqTile;
    asm volatile(
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
        "r"(cast_smem_ptr_to_uint(from)), "n"(kDqTile * sizeof(float))
        : "memory");
    tma_store_arrive();
    tma_store_wait<0>();  // has read shared memory
    smem.dq_empty[warpgroup].arrive();
    if (a.turns) {
      asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");  // has written
      asm volatile("fence.proxy.async.global;" ::: "memory");
      signal_turn(a.turns + piece.number, piece.turn + 1);
    }
  }
}

}  // namespace ringfa3
