// What the consumers of both kinds do with a block: P, dS, masks, and dQ on its way out.
//
// Letters in shapes: M rows of a block of queries, N keys of a tile, D head dim.
#pragma once

#include "backward/epilogue.cuh"
#include "hopper/column_mask.cuh"
#include "hopper/wgmma.cuh"

namespace ringfa3 {

using namespace cute;

// Named barriers of the consumers: kTurn is the first warpgroup's, the next one the second's.
constexpr int kCleared = 1, kTurn = 2;

// An accumulator (64 keys, M rows) of a thread: element 4j + 2r + c is of key `key` + 8r of the
// tile and row 8j + 2 (lane % 4) + c of the block.

// LSE or D of the rows that a thread has of an accumulator, two for each j.
template <int M>
struct RowValues {
  float2 at[M / 8];
  RowValues() = default;
  CUTE_DEVICE RowValues(float const* values, int lane) {
    CUTE_UNROLL
    for (int j = 0; j < M / 8; ++j) {
      at[j] = *reinterpret_cast<float2 const*>(values + 8 * j + 2 * (lane % 4));
    }
  }
};

// S^T to P^T = exp2(scale * S^T - LSE).
template <int M, class Scores>
CUTE_DEVICE void exponentiate(Scores& s, RowValues<M> const& lse, float scale_log2) {
  CUTE_UNROLL
  for (int j = 0; j < M / 8; ++j) {
    float2 const at = lse.at[j];
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      float& x = s(4 * j + 2 * r);
      float& y = s(4 * j + 2 * r + 1);
      x = exp2f(x * scale_log2 - at.x), y = exp2f(y * scale_log2 - at.y);
    }
  }
}

// dP^T to dS^T = P^T (dP^T - D).
template <int M, class Scores, class Gradient>
CUTE_DEVICE void differentiate(Scores const& p, Gradient& dp, RowValues<M> const& delta) {
  CUTE_UNROLL
  for (int j = 0; j < M / 8; ++j) {
    float2 const at = delta.at[j];
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      int const n = 4 * j + 2 * r;
      dp(n) = p(n) * (dp(n) - at.x), dp(n + 1) = p(n + 1) * (dp(n + 1) - at.y);
    }
  }
}

// What of an accumulator a thread may see: a word for each of its keys, `key` and `key + 8`.
struct Seen {
  uint32_t words[2];
  Seen() = default;
  CUTE_DEVICE Seen(RowBlock const& block, int key, int lane) {
    int const offset = 2 * (lane % 4), rows = block.rows, keys = block.keys;
    int const low = block.low, high = block.high;
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      int const k = key + 8 * r;
      int const end = k < keys ? min(rows, k + high + 1) : 0;
      words[r] =
          low_bits(columns_before(end - offset)) & ~low_bits(columns_before(k + low - offset));
    }
  }
};

// Sets the rest to 0.
template <int M, class Accumulator>
CUTE_DEVICE void hide(Accumulator& x, Seen const& seen) {
  static_assert(M / 4 <= 32);
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) {
    CUTE_UNROLL
    for (int i = 0; i < M / 4; ++i) {
      if (!(seen.words[r] & 1u << i)) x(i / 2 * 4 + 2 * r + i % 2) = 0.f;
    }
  }
}

// All consumers: rows [owned, Rows) of a box in shared memory, as `load_box` leaves it, become 0.
// They are a neighbour's; they meet factors that are 0, and 0 x inf would be NaN.
template <class Traits, int Rows>
CUTE_DEVICE void clear_foreign(typename Traits::Element* box, int owned) {
  constexpr int kThreads = Traits::Consumers * kWarpgroup;
  constexpr int kEights = kSlab / 8;  // of a row of a slab, 16 bytes each
  CUTE_UNROLL
  for (int slab = 0; slab < Traits::D / kSlab; ++slab) {
    auto* const to = reinterpret_cast<uint4*>(box + slab * Rows * kSlab);
    CUTE_NO_UNROLL
    for (int i = owned * kEights + threadIdx.x - kWarpgroup; i < Rows * kEights; i += kThreads) {
      to[i] = make_uint4(0, 0, 0, 0);
    }
  }
  cutlass::arch::fence_view_async_shared();
  cutlass::arch::NamedBarrier::sync(kThreads, kCleared);
}

// Where a lane stores its part of dS^T: (8, 8) matrices, transposed, of rows 8j, 8j + 8 and keys
// `key`, `key` + 8 of dS (M, N), in shared memory.
template <class Shared>
CUTE_DEVICE auto ds_place(Shared const& sDS, int key, int lane) {
  return raw_pointer_cast(&sDS(lane / 16 * 8 + lane % 8, key + lane / 8 % 2 * 8, _0{}));
}

// dS^T of a warp's 16 keys, as an A operand has it, to a stage of dS. Eight rows further on the
// swizzle is the same. The caller fences before it says that they are there, or the reader after it
// has waited.
template <int M, class Operand, class Element>
CUTE_DEVICE void store_ds(Operand const& ds, Element* to) {
  auto const* words = reinterpret_cast<uint32_t const*>(raw_pointer_cast(ds.data()));
  CUTE_UNROLL
  for (int j = 0; j < M / 8; j += 2) {
    SM90_U16x8_STSM_T::copy(words[2 * j], words[2 * j + 1], words[2 * j + 2], words[2 * j + 3],
                            reinterpret_cast<uint128_t&>(to[j * 8 * kSlab]));
  }
}

// One warpgroup: hands one of its pieces of the dQ of its `count`-th block to the warp that adds
// it, and that fences it.
template <class Traits, class Accumulator>
CUTE_DEVICE void send_dq(typename Traits::SharedStorage& smem, Accumulator const& dq,
                         RowBlock const& block, uint32_t count, int piece, int warpgroup) {
  int const thread = threadIdx.x % kWarpgroup;
  StageState<1> const state{count * Traits::DqTilesEach + piece};
  smem.dq_empty[warpgroup].wait(state.phase() ^ 1);
  auto* const to = reinterpret_cast<float4*>(smem.dq[warpgroup]) + thread;
  CUTE_UNROLL
  for (int i = 0; i < 8; ++i) {
    to[i * kWarpgroup] = make_float4(dq(4 * i), dq(4 * i + 1), dq(4 * i + 2), dq(4 * i + 3));
  }
  if (thread == 0) {
    int const first = block.target * Traits::DqTiles + warpgroup * Traits::DqTilesEach;
    smem.dq_tiles[warpgroup] = DqTile{first + piece, block.turn};
  }
  __syncwarp();
  if (thread % kWarp == 0) smem.dq_full[warpgroup].arrive();
}

// One warpgroup: the same without the warp, where no turns are kept. With 64 keys to a tile, where
// dQ is most of what shared memory moves, it is the faster way.
template <class Traits, class Accumulator>
CUTE_DEVICE void add_dq(float* grid_dq, Accumulator const& dq, RowBlock const& block, int piece,
                        int warpgroup) {
  int const number = block.target * Traits::DqTiles + warpgroup * Traits::DqTilesEach + piece;
  float* const to = grid_dq + static_cast<int64_t>(number) * kDqTile + threadIdx.x % kWarpgroup * 4;
  CUTE_UNROLL
  for (int i = 0; i < 8; ++i) {
    asm volatile(
        "red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to + i * kWarpgroup * 4),
        "f"(dq(4 * i)), "f"(dq(4 * i + 1)), "f"(dq(4 * i + 2)), "f"(dq(4 * i + 3))
        : "memory");
  }
}

// One warpgroup: no piece comes after those of `blocks` blocks.
template <class Traits>
CUTE_DEVICE void end_dq(typename Traits::SharedStorage& smem, int warpgroup, uint32_t blocks) {
  StageState<1> const state{blocks * Traits::DqTilesEach};
  smem.dq_empty[warpgroup].wait(state.phase() ^ 1);
  if (threadIdx.x % kWarpgroup == 0) smem.dq_tiles[warpgroup].number = -1;
  __syncwarp();
  if (threadIdx.x % kWarp == 0) smem.dq_full[warpgroup].arrive();
}

// One consumer warpgroup: walks the work units of the CTA. `clear` empties the accumulators, `walk`
// works on the `work units`-th work unit, whose first block is the `blocks`-th of all, waits for V
// and gives K and V back, and returns the number of the block after it, with no product left in
// flight, and `finish` stores what has come together.
template <class Traits, class Clear, class Walk, class Finish>
CUTE_DEVICE uint32_t each_work_unit(typename Traits::SharedStorage& smem, Clear const& clear,
                                    Walk const& walk, Finish const& finish) {
  int const lane = threadIdx.x % kWarp;
  uint32_t units = 0, blocks = 0;
  while (true) {
    StageState<kWorkDepth> const work_state{units};
    smem.work_full[work_state.index()].wait(work_state.phase());
    KeyWork const& work = smem.work[work_state.index()];
    if (work.kv_head < 0) return blocks;
    clear();
    smem.k_full.wait(StageState<1>{units}.phase());
    if (work.unit.rows < Traits::N) clear_foreign<Traits, Traits::N>(smem.k, work.unit.rows);
    blocks = walk(units++, blocks);
    finish(work.unit, work.kv_head);
    __syncwarp();
    if (lane == 0) smem.work_empty[work_state.index()].arrive();
  }
}

}  // namespace ringfa3
