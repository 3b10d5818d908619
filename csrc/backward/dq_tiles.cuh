// dQ tiles: added in float32 to global memory, by writer warps or, in a pair of CTAs, by consumers.
#pragma once

#include "backward/shapes.cuh"
#include "hopper/cluster.cuh"
#include "hopper/pipeline.cuh"
#include "hopper/sync.cuh"
#include "plan/row_blocks.h"

namespace ringfa3 {

using namespace cute;

// Named barriers of the consumers. At kWarpgroupBarrier + w warpgroup w waits for its order to
// issue products; in a pair of CTAs this barrier belongs to the warpgroup alone.
constexpr int kZeroed = 1, kWarpgroupBarrier = 2;

// In a pair of CTAs: the first warpgroup's dQ tile of a block. The second has the tile after it.
CUTE_DEVICE int first_dq_tile() { return 2 * block_rank_in_cluster(); }

// One warpgroup: hands a dQ tile of its `count`-th block to the writer warp, which issues the proxy
// fence. Accumulators stay as they are: other products are in flight.
template <class Shapes, class Accumulator>
CUTE_DEVICE void send_dq(typename Shapes::SharedStorage& smem, Accumulator const& dq,
                         uint32_t count, int warpgroup) {
  int const thread = threadIdx.x % kWarpgroup;
  PipelineState<1> const stage{count};
  smem.dq_empty[warpgroup].wait(stage.phase() ^ 1);
  auto* const to = reinterpret_cast<float4*>(smem.dq[warpgroup]) + thread;
  CUTE_UNROLL
  for (int i = 0; i < Shapes::kDqColumns / 8; ++i) {
    to[i * kWarpgroup] = make_float4(dq(4 * i), dq(4 * i + 1), dq(4 * i + 2), dq(4 * i + 3));
  }
  __syncwarp();
  if (thread % kWarp == 0) smem.dq_full[warpgroup].arrive();
}

// One warpgroup: adds a dQ tile itself, from registers. Where a CTA has 64 keys, dQ would be most
// of the shared-memory traffic.
template <class Shapes, class Accumulator>
CUTE_DEVICE void add_dq(float* padded_dq, Accumulator const& dq, int number) {
  float* const to =
      padded_dq + static_cast<int64_t>(number) * Shapes::kDqTile + threadIdx.x % kWarpgroup * 4;
  CUTE_UNROLL
  for (int i = 0; i < Shapes::kDqColumns / 8; ++i) {
    asm volatile(
        "red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to + i * kWarpgroup * 4),
        "f"(dq(4 * i)), "f"(dq(4 * i + 1)), "f"(dq(4 * i + 2)), "f"(dq(4 * i + 3))
        : "memory");
  }
}

// Deterministic dQ in a pair of CTAs: one thread orders the additions of the consumers, which add
// their tiles themselves. The CTA's tiles of a row block have one semaphore, that of the first.
// Once it equals the number of key tiles that add earlier, both warpgroups may add; then it becomes
// order + 1.
//
// The thread looks at a semaphore while the consumers add the block before, so they rarely wait for
// memory. It sets that of the block before whatever this one waits for, because this one may
// depend on it, by way of other tiles.
template <class Shapes>
CUTE_DEVICE void order_dq(BackwardArgs const& a, typename Shapes::SharedStorage& smem) {
  int before = -1;  // the semaphore of the block before; -1: it is set
  int next = 0;     // what it becomes
  for (PipelineState<1> stage;; stage.advance()) {
    PipelineState<Shapes::BlockDepth> const at{stage.count};
    smem.block_ready[at.index()].wait(at.phase());
    RowBlock const& block = smem.blocks[at.index()];
    bool const ends = block.head < 0;
    int const semaphore = block.target * Shapes::DqTiles + first_dq_tile();
    int const order = ends ? 0
                           : dq_order<Shapes::M, Shapes::TileN>(a.spans, a.earlier, block.span,
                                                                block.token, block.tile_row);
    bool ready = ends, granted = ends;
    CUTE_NO_UNROLL
    while (!granted || before >= 0) {
      if (!ready) ready = read_semaphore(a.dq_semaphore + semaphore) == order;
      if (before >= 0 && !smem.dq_added.test_wait(stage.phase() ^ 1)) continue;
      if (ready && !granted) smem.dq_granted.arrive(), granted = true;
      if (before >= 0) set_semaphore(a.dq_semaphore + before, next), before = -1;
    }
    if (ends) return;
    before = semaphore, next = order + 1;
    smem.block_done[at.index()].arrive();
  }
}

// One thread, the writer of a warpgroup's dQ tiles: adds them to global memory; with dq_semaphore
// in the order that it holds.
template <class Shapes>
CUTE_DEVICE void write_dq(BackwardArgs const& a, typename Shapes::SharedStorage& smem,
                          int warpgroup) {
  float const* const from = smem.dq[warpgroup];
  for (PipelineState<1> stage;; stage.advance()) {
    static_assert(Shapes::DqTilesEach == 1);
    PipelineState<Shapes::BlockDepth> const at{stage.count};
    smem.block_ready[at.index()].wait(at.phase());
    RowBlock const& block = smem.blocks[at.index()];
    if (block.head < 0) return;
    int32_t const number = block.target * Shapes::DqTiles + warpgroup, order = block.dq_order;
    if (a.dq_semaphore) wait_for_semaphore(a.dq_semaphore + number, order);
    smem.dq_full[warpgroup].wait(stage.phase());
    smem.block_done[at.index()].arrive();
    cutlass::arch::fence_view_async_shared();  // after the consumers' stores
    if (a.dq_semaphore) asm volatile("fence.proxy.async.global;" ::: "memory");
    float* const to = a.padded.dq + static_cast<int64_t>(number) * Shapes::kDqTile;
    asm volatile(
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
        "r"(cast_smem_ptr_to_uint(from)), "n"(Shapes::kDqTile * sizeof(float))
        : "memory");
    tma_store_arrive();
    tma_store_wait<0>();  // the copy has read shared memory
    smem.dq_empty[warpgroup].arrive();
    if (a.dq_semaphore) {
      asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");  // the copy has written
      asm volatile("fence.proxy.async.global;" ::: "memory");
      set_semaphore(a.dq_semaphore + number, order + 1);
    }
  }
}

}  // namespace ringfa3
