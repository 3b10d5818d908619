// Code of both consumers: P, dS, masks, and the loop over work items.
//
// Letters in shapes: M rows of a block of queries, N keys of a tile, D head dim.
#pragma once

#include "backward/dq_tiles.cuh"
#include "backward/epilogue.cuh"
#include "backward/rotate.cuh"
#include "backward/shapes.cuh"
#include "hopper/cluster.cuh"
#include "hopper/column_mask.cuh"
#include "hopper/pipeline.cuh"
#include "hopper/wgmma.cuh"

namespace ringfa3 {

using namespace cute;

// B operands in shared memory, all of Q, dO or their transposes: (M, D, S) or (D, M, S).
template <class Mma, class Layout, class Element>
CUTE_DEVICE auto row_operand(Element* rows, int thread) {
  return Mma{}.get_slice(thread).partition_fragment_B(make_tensor(make_smem_ptr(rows), Layout{}));
}

// A operand of dQ: 64 rows of dS, (64, N, S).
template <class Shapes>
CUTE_DEVICE auto ds_operand(typename Shapes::Element* ds, int part, int thread) {
  Tensor x = make_tensor(make_smem_ptr(ds), typename Shapes::SmemDs{});  // (M, N, S)
  return typename Shapes::MmaQ{}.get_slice(thread).partition_fragment_A(
      local_tile(x, Shape<_64, Int<Shapes::N>>{}, make_coord(part, _0{}, _)));
}

// B operand of dQ: its tile's columns of K, transposed, (kDqColumns, N).
template <class Shapes, class Layout = typename Shapes::SmemKt>
CUTE_DEVICE auto key_columns_operand(typename Shapes::Element* keys, int part, int thread) {
  Tensor x = make_tensor(make_smem_ptr(keys), Layout{});  // (D, N)
  return typename Shapes::MmaQ{}.get_slice(thread).partition_fragment_B(
      local_tile(x, Shape<Int<Shapes::kDqColumns>, Int<Shapes::N>>{}, make_coord(part, _0{})));
}

// B operand of a product with ones: LSE or D of the stages, (M, 16, S).
template <class Shapes, int Stages>
CUTE_DEVICE auto statistic_operand(SplitStatistic (&rows)[Stages][Shapes::M], int thread) {
  auto* const at = reinterpret_cast<bfloat16_t*>(&rows[0][0]);
  return typename Shapes::MmaStatistic{}.get_slice(thread).partition_fragment_B(
      make_tensor(make_smem_ptr(at), typename Shapes::template SmemStatistic<Stages>{}));
}

// A operand of a product with ones, (64, 16): three columns of ones, then zeros. Each use makes it
// anew, in registers that are free there.
struct Ones {
  Tensor<ArrayEngine<bfloat16_t, 8>, Layout<Shape<Shape<_2, _2, _2>, _1, _1>>> words;
  CUTE_DEVICE explicit Ones(int lane) {
    int const pair = lane % 4;  // of the thread: columns 2 pair, 2 pair + 1, and 8 columns later
    uint32_t first = pair == 0 ? 0x3f803f80u : pair == 1 ? 0x3f80u : 0u, second = 0;
    asm volatile("" : "+r"(first), "+r"(second));  // not kept between two products
    auto* const to = reinterpret_cast<uint32_t*>(raw_pointer_cast(words.data()));
    to[0] = to[1] = first, to[2] = to[3] = second;
  }
};

// A thread's accumulator (64 keys, M rows): element 4j + 2r + c is of key `key` + 8r of the tile
// and row 8j + 2 (lane % 4) + c of the block.

// LSE or D of the rows that a thread holds, two for each j.
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

// Reads the factor of a work item's keys, which follows the last column of dequantised K.
template <class Shapes>
CUTE_DEVICE KeyFactor read_key_factor(BackwardArgs const& a, KeyWorkItem const& work) {
  auto const* const row = static_cast<typename Shapes::Element const*>(a.k.data) +
                          work.unit.row0 * a.k.token_stride + work.kv_head * a.k.head_stride;
  auto const factor = static_cast<float>(row[Shapes::D]);
  auto const uniform = [](float x) { return __shfl_sync(0xffffffff, x, 0); };
  return {uniform(factor), uniform(a.softmax_scale * kLog2e / factor), uniform(-log2f(factor))};
}

// exp2(x) over the factor of the keys. Before the division it is at most 1 if operands are
// dequantised. NaN stays.
template <class Shapes>
CUTE_DEVICE float probability(float x, KeyFactor const& keys) {
  if constexpr (Shapes::Dequantised) {
    x += keys.log2_inverse;
    asm("min.ftz.NaN.f32 %0, %1, %2;" : "=f"(x) : "f"(x), "f"(keys.log2_inverse));
  }
  return exp2f(x);
}

// S^T becomes P^T = exp2(scale * S^T - LSE) over the factor of the keys.
template <class Shapes, int M, class Scores>
CUTE_DEVICE void compute_p(Scores& s, RowValues<M> const& lse, KeyFactor const& keys) {
  CUTE_UNROLL
  for (int j = 0; j < M / 8; ++j) {
    float2 const at = lse.at[j];
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      float& x = s(4 * j + 2 * r);
      float& y = s(4 * j + 2 * r + 1);
      x = probability<Shapes>(x * keys.scale_log2 - at.x, keys);
      y = probability<Shapes>(y * keys.scale_log2 - at.y, keys);
    }
  }
}

// dP^T becomes dS^T = P^T (dP^T - D).
template <int M, class Scores, class Gradient>
CUTE_DEVICE void compute_ds(Scores const& p, Gradient& dp, RowValues<M> const& delta) {
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

// A thread's mask of an accumulator: a word per key, `key` and `key + 8`, with a bit per row.
struct BlockMask {
  uint32_t words[2];
  BlockMask() = default;
  CUTE_DEVICE BlockMask(ClippedRowBlock const& block, int key, int lane) {
    int const offset = 2 * (lane % 4);
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      int const k = key + 8 * r, begin = max(block.first_row, k + block.low);
      bool const clipped = k < block.first_key || k >= block.end_key;
      int const end = clipped ? 0 : min(block.end_row, k + block.high + 1);
      words[r] = low_bits(columns_before(end - offset)) & ~low_bits(columns_before(begin - offset));
    }
  }
  CUTE_DEVICE BlockMask(RowBlock const& block, int key, int lane) {
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

// Sets pairs outside the mask to 0.
template <int M, class Accumulator>
CUTE_DEVICE void apply_mask(Accumulator& x, BlockMask const& mask) {
  static_assert(M / 4 <= 32);
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) {
    CUTE_UNROLL
    for (int i = 0; i < M / 4; ++i) {
      if (!(mask.words[r] & 1u << i)) x(i / 2 * 4 + 2 * r + i % 2) = 0.f;
    }
  }
}

// `Threads` threads in a row, of which this is number `thread`: zeroes rows [valid_rows, Rows) of a
// box with D columns in shared memory, in slabs of `Slab` columns. These rows belong to the next
// segment. Their factors are 0, and 0 * inf would be NaN.
template <int Rows, int D, int Threads, int Slab = kSlab, class Element>
CUTE_DEVICE void zero_tail_rows(Element* box, int valid_rows, int thread, int barrier) {
  constexpr int kEights = Slab / 8;  // of a row of a slab, 16 bytes each
  CUTE_UNROLL
  for (int slab = 0; slab < D / Slab; ++slab) {
    auto* const to = reinterpret_cast<uint4*>(box + slab * Rows * Slab);
    CUTE_NO_UNROLL
    for (int i = valid_rows * kEights + thread; i < Rows * kEights; i += Threads) {
      to[i] = make_uint4(0, 0, 0, 0);
    }
  }
  cutlass::arch::fence_view_async_shared();
  cutlass::arch::NamedBarrier::sync(Threads, barrier);
}

// The same, by all consumers.
template <class Shapes, int Rows, int D = Shapes::D, int Slab = kSlab>
CUTE_DEVICE void zero_tail_rows(typename Shapes::Element* box, int valid_rows) {
  zero_tail_rows<Rows, D, Shapes::Consumers * kWarpgroup, Slab>(box, valid_rows,
                                                                threadIdx.x - kWarpgroup, kZeroed);
}

// All consumers: zeroes keys of K that belong to the next segment, in a tile with fewer than TileN.
template <class Shapes>
CUTE_DEVICE void zero_tail_keys(typename Shapes::SharedStorage& smem, WorkUnit const& unit) {
  constexpr int N = Shapes::N, D = Shapes::D, kSlabOfK = Shapes::kSlabOfK;
  if constexpr (Shapes::Ctas == 1) {
    zero_tail_rows<Shapes, N>(smem.k, unit.rows);
  } else {
    int const first = min(unit.rows, N), second = unit.rows - first;  // keys of each CTA
    bool const is_first = block_rank_in_cluster() == 0;
    zero_tail_rows<Shapes, N, D, kSlabOfK>(smem.k, is_first ? first : second);
    zero_tail_rows<Shapes, N, D / 2, kSlabOfK>(smem.peer_k, is_first ? second : first);
  }
}

// The shared-memory address at which a lane stores its part of dS^T: transposed (8, 8) matrices of
// rows 8j, 8j + 8 and keys `key`, `key` + 8 of dS (M, N).
template <class Shapes>
CUTE_DEVICE auto ds_address(typename Shapes::SharedStorage& smem, int key, int lane) {
  Tensor sDS = make_tensor(make_smem_ptr(smem.ds), typename Shapes::SmemDs{});  // (M, N, S)
  return raw_pointer_cast(&sDS(lane / 16 * 8 + lane % 8, key + lane / 8 % 2 * 8, _0{}));
}

// Stores dS^T of a warp's 16 keys, which has the layout of an A operand, to a stage of dS. The
// swizzle repeats every eight rows. The proxy fence is left to the caller, before it signals the
// stage, or to the reader, after its wait.
template <int M, class Operand, class Element>
CUTE_DEVICE void store_ds(Operand const& ds, Element* to) {
  auto const* words = reinterpret_cast<uint32_t const*>(raw_pointer_cast(ds.data()));
  CUTE_UNROLL
  for (int j = 0; j < M / 8; j += 2) {
    SM90_U16x8_STSM_T::copy(words[2 * j], words[2 * j + 1], words[2 * j + 2], words[2 * j + 3],
                            reinterpret_cast<uint128_t&>(to[j * 8 * kSlab]));
  }
}

// One consumer warpgroup: runs the work items of the CTA. `consumer` has three methods:
//
//   clear_sums()               zeroes its sums, dK or dV or both
//   run_unit(unit, block)      runs work unit number `unit`, whose first block is number `block` of
//                              all; waits for V, releases K and V, leaves no product in flight, and
//                              returns the number of the block after its last
//   store_sums(unit, kv_head)  stores them
template <class Shapes, class Consumer>
CUTE_DEVICE void run_work_items(BackwardArgs const& a, typename Shapes::SharedStorage& smem,
                                Consumer& consumer) {
  int const lane = threadIdx.x % kWarp;
  uint32_t units = 0, blocks = 0;
  while (true) {
    PipelineState<kWorkDepth> const work_stage{units};
    smem.work_full[work_stage.index()].wait(work_stage.phase());
    KeyWorkItem const& work = smem.work[work_stage.index()];
    if (work.kv_head < 0) return;
    consumer.clear_sums();
    if constexpr (Shapes::Dequantised) consumer.key_factor = read_key_factor<Shapes>(a, work);
    smem.k_full.wait(PipelineState<1>{units}.phase());
    if (work.unit.rows < Shapes::TileN) zero_tail_keys<Shapes>(smem, work.unit);
    blocks = consumer.run_unit(units++, blocks);
    consumer.store_sums(work.unit, work.kv_head);
    __syncwarp();
    if (lane == 0) smem.work_empty[work_stage.index()].arrive();
  }
}

}  // namespace ringfa3
