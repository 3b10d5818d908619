// dQ tiles: added in float32 to global memory, by the consumers or by a warp that keeps turns.
#pragma once

#include "backward/shapes.cuh"
#include "hopper/pipeline.cuh"
#include "hopper/sync.cuh"

namespace ringfa3 {

using namespace cute;

// One warpgroup: hands a dQ tile of its `count`-th block to the writer warp, which issues the proxy
// fence. `tile` is 0 or 1 of the warpgroup's tiles of the block.
template <class Shapes, class Accumulator>
CUTE_DEVICE void send_dq(typename Shapes::SharedStorage& smem, Accumulator const& dq,
                         RowBlock const& block, uint32_t count, int tile, int warpgroup) {
  int const thread = threadIdx.x % kWarpgroup;
  Pipeline<1> const stage{count * Shapes::DqTilesEach + tile};
  smem.dq_empty[warpgroup].wait(stage.phase() ^ 1);
  auto* const to = reinterpret_cast<float4*>(smem.dq[warpgroup]) + thread;
  CUTE_UNROLL
  for (int i = 0; i < 8; ++i) {
    to[i * kWarpgroup] = make_float4(dq(4 * i), dq(4 * i + 1), dq(4 * i + 2), dq(4 * i + 3));
  }
  if (Shapes::kPolicy.role_split && thread == 0) {
    int const first = block.target * Shapes::DqTiles + warpgroup * Shapes::DqTilesEach;
    smem.dq_tiles[warpgroup] = DqTile{first + tile, block.turn};
  }
  __syncwarp();
  if (thread % kWarp == 0) smem.dq_full[warpgroup].arrive();
}

// One warpgroup: adds a dQ tile itself, where no turns are kept. Faster with 64 keys to a tile,
// where dQ is most of the shared-memory traffic.
template <class Shapes, class Accumulator>
CUTE_DEVICE void add_dq(float* grid_dq, Accumulator const& dq, RowBlock const& block, int tile,
                        int warpgroup) {
  int const number = block.target * Shapes::DqTiles + warpgroup * Shapes::DqTilesEach + tile;
  float* const to = grid_dq + static_cast<int64_t>(number) * kDqTile + threadIdx.x % kWarpgroup * 4;
  CUTE_UNROLL
  for (int i = 0; i < 8; ++i) {
    asm volatile(
        "red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to + i * kWarpgroup * 4),
        "f"(dq(4 * i)), "f"(dq(4 * i + 1)), "f"(dq(4 * i + 2)), "f"(dq(4 * i + 3))
        : "memory");
  }
}

// One warpgroup: ends its writer warp after the tiles of `blocks` blocks.
template <class Shapes>
CUTE_DEVICE void end_dq(typename Shapes::SharedStorage& smem, int warpgroup, uint32_t blocks) {
  Pipeline<1> const stage{blocks * Shapes::DqTilesEach};
  smem.dq_empty[warpgroup].wait(stage.phase() ^ 1);
  if (threadIdx.x % kWarpgroup == 0) smem.dq_tiles[warpgroup].number = -1;
  __syncwarp();
  if (threadIdx.x % kWarp == 0) smem.dq_full[warpgroup].arrive();
}

// One thread, the writer of a warpgroup's dQ tiles: adds them to global memory, in turns if these
// are kept.
template <class Shapes>
CUTE_DEVICE void write_dq(BackwardArgs const& a, typename Shapes::SharedStorage& smem,
                          int warpgroup) {
  float const* const from = smem.dq[warpgroup];
  for (Pipeline<1> stage;; stage.advance()) {
    DqTile tile;
    if constexpr (Shapes::kPolicy.role_split) {
      smem.dq_full[warpgroup].wait(stage.phase());
      tile = smem.dq_tiles[warpgroup];
      if (tile.number < 0) return;
    } else {
      static_assert(Shapes::DqTilesEach == 1);
      Pipeline<Shapes::BlockDepth> const at{stage.count};
      smem.block_ready[at.index()].wait(at.phase());
      RowBlock const& block = smem.blocks[at.index()];
      if (block.head < 0) return;
      smem.dq_full[warpgroup].wait(stage.phase());
      tile = {block.target * Shapes::DqTiles + warpgroup, block.turn};
      smem.block_done[at.index()].arrive();
    }
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
