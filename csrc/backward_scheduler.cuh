// The warps that serve the consumers: one fetches work, one loads, the others write dQ.
#pragma once

#include "backward_traits.cuh"
#include "signals.cuh"

namespace ringfa3 {

using namespace cute;

// Warp-wide: takes and decodes the next portion while the last blocks of this one are on their way.
// KV heads run in sections whose Q, dO and dQ share the L2 cache; inside a section all heads of a
// portion come side by side, portions in the order of the plan.
template <class Traits>
CUTE_DEVICE void fetch_portions(BackwardParams const& p, typename Traits::SharedStorage& smem) {
  constexpr int kWords = sizeof(Portion) / sizeof(int32_t);
  int const lane = threadIdx.x % kWarp;
  BackwardArgs const& a = p.args;
  StageState<kWorkDepth> state;
  int w = blockIdx.x;
  while (true) {
    smem.work_empty[state.index()].wait(state.phase() ^ 1);
    KeyWork& work = smem.work[state.index()];
    int kv_head = -1;
    if (w < p.num_work) {
      int const per_section = a.num_portions * a.head_section;
      int const section = w / per_section;
      int const rest = w - section * per_section;
      int const width = min(a.head_section, p.kv_heads - section * a.head_section);
      kv_head = section * a.head_section + rest % width;
      auto* const from = reinterpret_cast<int32_t const*>(a.portions + rest / width);
      if (lane < kWords) reinterpret_cast<int32_t*>(&work.portion)[lane] = from[lane];
    }
    if (lane == 0) work.kv_head = kv_head;
    __syncwarp();
    if (lane == 0) smem.work_full[state.index()].arrive();
    if (kv_head < 0) return;
    smem.work_wanted.wait(state.count & 1);
    state.advance();
    if (lane == 0) w = gridDim.x + atomicAdd(a.counter, 1);
    w = __shfl_sync(0xffffffff, w, 0);
  }
}

// What a key tile visits of a span: its blocks of M rows [block, end); key n of the tile is seen by
// rows [n + low, n + high] of the span.
template <int M>
struct SpanVisit {
  int32_t block = 0, end = 0, low, high;
  CUTE_DEVICE SpanVisit(Portion const& portion, Span const& s) {
    int const j = portion.row0 - s.k0;
    low = j - s.hi, high = j - s.lo;
    int const first = max(0, low), last = min(s.q1 - s.q0, portion.rows + high);
    if (first < last) block = first / M, end = (last + M - 1) / M;
  }
};

// Key tiles of a span that visit its `block`-th block of rows: [first, second).
template <int M, int N>
CUTE_DEVICE int2 visitors(Span const& s, int block) {
  int const begin = max(0, block * M + s.lo);
  int const end = min(s.k1 - s.k0, min(block * M + M, s.q1 - s.q0) + s.hi);
  return begin < end ? make_int2(begin / N, (end + N - 1) / N) : make_int2(0, 0);
}

// How many tiles add to a block of dQ before this one: `Tiling.turn` of ringfa3/plan.py.
template <int M, int N>
CUTE_DEVICE int turn_of(BackwardArgs const& a, int span, int row0, int block) {
  int turn = visitors<M, N>(a.spans[span], block).y - 1 - (row0 - a.spans[span].k0) / N;
  for (int other = a.earlier[span]; other >= 0; other = a.earlier[other]) {
    int2 const between = visitors<M, N>(a.spans[other], block);
    turn += between.y - between.x;
  }
  return turn;
}

// One thread: streams K and V of every portion, and the Q, dO, LSE and D of its blocks.
template <class Traits>
CUTE_DEVICE void load_portions(BackwardParams const& p, typename Traits::SharedStorage& smem) {
  constexpr int M = Traits::M, N = Traits::N, D = Traits::D;
  BackwardArgs const& a = p.args;
  StageState<kWorkDepth> work_state;
  StageState<1> kv_state;
  StageState<Traits::QStages> q_state;
  StageState<Traits::DoutStages> dout_state;
  while (true) {
    smem.work_full[work_state.index()].wait(work_state.phase());
    int const kv_head = smem.work[work_state.index()].kv_head;
    if (kv_head < 0) return;
    Portion const portion = smem.work[work_state.index()].portion;
    if (portion.blocks > 0) {
      smem.kv_empty.wait(kv_state.phase() ^ 1);
      kv_state.advance();
      load_box<N, D>(p.k, smem.kv_full, smem.k, portion.row0, kv_head);
      load_box<N, D>(p.v, smem.kv_full, smem.v, portion.row0, kv_head);
    } else {
      smem.work_wanted.arrive();
    }
    int const end = (kv_head * p.group + portion.first_head) + portion.num_heads;
    for (int head = end - portion.num_heads; head < end; ++head) {
      int skip = portion.skip, left = portion.blocks;
      for (int index = portion.first_span; left > 0; ++index) {
        Span const span = a.spans[index];
        SpanVisit<M> const visit(portion, span);
        int block = visit.block + skip;
        skip = max(0, block - visit.end);
        for (; block < visit.end && left > 0; ++block, --left) {
          if (head + 1 == end && left == min(kBlocksAhead, portion.blocks)) {
            smem.work_wanted.arrive();
          }
          RowBlock next;
          next.low = visit.low - block * M, next.high = visit.high - block * M;
          next.rows = min(M, span.q1 - span.q0 - block * M), next.keys = portion.rows;
          next.target = head * static_cast<int>(a.grid.num_blocks) + span.grid_q0 / M + block;
          next.turn = a.turns ? turn_of<M, N>(a, index, portion.row0, block) : 0;
          next.masked = next.rows < M || next.keys < N || N - 1 + next.low > 0 || next.high < M - 1;
          next.last = head + 1 == end && left == 1;
          int64_t const row = static_cast<int64_t>(next.target) * M;

          smem.q_empty[q_state.index()].wait(q_state.phase() ^ 1);
          smem.blocks[q_state.index()] = next;
          auto& q_full = smem.q_full[q_state.index()];
          load_box<M, D>(p.q, q_full, smem.q + q_state.index() * M * D, span.q0 + block * M, head);
          q_full.arrive_and_expect_tx(M * sizeof(float));
          SM90_BULK_COPY_G2S::copy(a.grid.lse + row, reinterpret_cast<uint64_t*>(&q_full),
                                   smem.lse[q_state.index()], M * sizeof(float));
          q_state.advance();

          smem.dout_empty[dout_state.index()].wait(dout_state.phase() ^ 1);
          auto& dout_full = smem.dout_full[dout_state.index()];
          load_box<M, D>(p.dout, dout_full, smem.dout + dout_state.index() * M * D,
                         span.q0 + block * M, head);
          dout_full.arrive_and_expect_tx(M * sizeof(float));
          SM90_BULK_COPY_G2S::copy(a.grid.delta + row, reinterpret_cast<uint64_t*>(&dout_full),
                                   smem.delta[dout_state.index()], M * sizeof(float));
          dout_state.advance();
        }
      }
    }
    smem.work_empty[work_state.index()].arrive();
    work_state.advance();
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
    DqPiece const piece = smem.pieces[warpgroup];
    if (piece.number < 0) return;
    if (a.turns) {
      wait_for_turn(a.turns + piece.number, piece.turn);
      asm volatile("fence.proxy.async.global;" ::: "memory");
    }
    float* const to = a.grid.dq + static_cast<int64_t>(piece.number) * kPiece;
    asm volatile(
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
        "r"(cast_smem_ptr_to_uint(from)), "n"(kPiece * sizeof(float))
        : "memory");
    tma_store_arrive();
    tma_store_wait<0>();  // has read shared memory
    smem.dq_empty[warpgroup].arrive();
    if (a.turns) {
      asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");  // has written
      asm volatile("fence.proxy.async.global;" ::: "memory");
      __threadfence();
      signal_turn(a.turns + piece.number, piece.turn + 1);
    }
  }
}

}  // namespace ringfa3
