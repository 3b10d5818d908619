// dQ tiles: added in float32 to global memory, by writer warps or, in a pair of CTAs, by consumers.
#pragma once

#include "backward/shapes.cuh"
#include "hopper/pipeline.cuh"
#include "hopper/sync.cuh"

namespace ringfa3 {

using namespace cute;

// Named barriers of the consumers: kTurn + w is the turn of warpgroup w.
constexpr int kCleared = 1, kTurn = 2;

// One warpgroup: hands a dQ tile of its `count`-th block to the writer warp, which issues the proxy
// fence.
template <class Shapes, class Accumulator>
CUTE_DEVICE void send_dq(typename Shapes::SharedStorage& smem, Accumulator const& dq,
                         uint32_t count, int warpgroup) {
  int const thread = threadIdx.x % kWarpgroup;
  Pipeline<1> const stage{count};
  smem.dq_empty[warpgroup].wait(stage.phase() ^ 1);
  auto* const to = reinterpret_cast<float4*>(smem.dq[warpgroup]) + thread;
  CUTE_UNROLL
  for (int i = 0; i < 8; ++i) {
    to[i * kWarpgroup] = make_float4(dq(4 * i), dq(4 * i + 1), dq(4 * i + 2), dq(4 * i + 3));
  }
  __syncwarp();
  if (thread % kWarp == 0) smem.dq_full[warpgroup].arrive();
}

// One warpgroup that adds its dQ tiles itself: ends the turn at its tile before, if there was one,
// and waits for the turn `next`, if its number is not -1.
template <class Shapes>
CUTE_DEVICE void change_turn(typename Shapes::SharedStorage& smem, int32_t* turns, DqTile next,
                             int warpgroup) {
  cutlass::arch::NamedBarrier::sync(kWarpgroup, kTurn + warpgroup);
  if (threadIdx.x % kWarpgroup == 0) {
    DqTile const tile = smem.dq_turns[warpgroup];
    if (tile.number >= 0) signal_turn(turns + tile.number, tile.turn + 1);
    if (next.number >= 0) wait_for_turn(turns + next.number, next.turn);
    smem.dq_turns[warpgroup] = next;
  }
  __syncwarp();
  cutlass::arch::NamedBarrier::sync(kWarpgroup, kTurn + warpgroup);
}

// One warpgroup: adds a dQ tile itself, from registers. Where a CTA has 64 keys, dQ would be most
// of the shared-memory traffic.
template <class Accumulator>
CUTE_DEVICE void add_dq(float* grid_dq, Accumulator const& dq, int number) {
  float* const to = grid_dq + static_cast<int64_t>(number) * kDqTile + threadIdx.x % kWarpgroup * 4;
  CUTE_UNROLL
  for (int i = 0; i < 8; ++i) {
    asm volatile(
        "red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to + i * kWarpgroup * 4),
        "f"(dq(4 * i)), "f"(dq(4 * i + 1)), "f"(dq(4 * i + 2)), "f"(dq(4 * i + 3))
        : "memory");
  }
}

// One thread, the writer of a warpgroup's dQ tiles: adds them to global memory, in turns if these
// are kept.
template <class Shapes>
CUTE_DEVICE void write_dq(BackwardArgs const& a, typename Shapes::SharedStorage& smem,
                          int warpgroup) {
  float const* const from = smem.dq[warpgroup];
  for (Pipeline<1> stage;; stage.advance()) {
    static_assert(Shapes::DqTilesEach == 1);
    Pipeline<Shapes::BlockDepth> const at{stage.count};
    smem.block_ready[at.index()].wait(at.phase());
    RowBlock const& block = smem.blocks[at.index()];
    if (block.head < 0) return;
    smem.dq_full[warpgroup].wait(stage.phase());
    DqTile const tile{block.target * Shapes::DqTiles + warpgroup, block.turn};
    smem.block_done[at.index()].arrive();
    cutlass::arch::fence_view_async_shared();  // after the consumers' stores
    if (a.turns) {
      wait_for_turn(a.turns + tile.number, tile.turn);
      asm volatile("fence.proxy.async.global;" ::: "memory");
    }
    float* const to = a.grid.dq + static_cast<int64_t>(tile.number) * kDqTile;
    asm volatile(
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
        "r"(cast_smem_ptr_to_uint(from)), "n"(kDqTile * sizeof(float))
        : "memory");
    tma_store_arrive();
    tma_store_wait<0>();  // the copy has read shared memory
    smem.dq_empty[warpgroup].arrive();
    if (a.turns) {
      asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");  // the copy has written
      asm volatile("fence.proxy.async.global;" ::: "memory");
      signal_turn(a.turns + tile.number, tile.turn + 1);
    }
  }
}

}  // namespace ringfa3
