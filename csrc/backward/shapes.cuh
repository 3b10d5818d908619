// Shapes, layouts and shared memory of a backward kernel, and its parameters.
//
// Letters in shapes: M rows of a block of queries, N keys of a CTA, D head dim of Q and K, DV head
// dim of V and O, S stages.
#pragma once

#include <cute/tensor.hpp>
#include <cutlass/arch/barrier.h>
#include <cutlass/cutlass.h>
#include <cutlass/numeric_types.h>

#include "backward/policy.h"
#include "hopper/tma.cuh"
#include "hopper/warp.cuh"
#include "plan/work_queue.h"

namespace ringfa3 {

using namespace cute;

// A work item of the backward: a work unit for one KV head.
struct KeyWorkItem {
  int32_t kv_head;  // -1: no more work
  WorkUnit unit;
};

// A block of query rows that a work unit visits, for one query head.
struct RowBlock {
  int32_t head;       // -1: no more blocks
  int32_t token;      // its first row
  int32_t tile_row;   // the tile's first key
  int32_t key_row;    // the CTA's first key
  int32_t low, high;  // rows [n + low, n + high] of the block attend to key n of the CTA
  int32_t rows;       // of the block that belong to the span
  int32_t keys;       // of the CTA
  int32_t target;     // the block's number in LSE, D and dQ
  int32_t span;       // its number in the plan
  int32_t dq_order;   // key tiles that add to its dQ earlier; with dq_semaphore
  int32_t flags;      // BlockFlags
};

// With clipped spans: rows [first_row, end_row) of the block and keys [first_key, end_key) of the
// CTA belong to the span, and `rows` end with the segment.
struct ClippedRowBlock : RowBlock {
  int32_t first_row, end_row, first_key, end_key;
};

// kMasked: the mask hides some pairs of the block. kTailRows: its last rows are the next segment's.
// kFirstBlock, kLastBlock: of the work unit.
enum BlockFlags : int32_t { kMasked = 1, kTailRows = 2, kFirstBlock = 4, kLastBlock = 8 };
constexpr int kBlockFlagBits = 4;

// Shared memory of a CTA of a pair, in addition to the rest.
template <class Element, int DsSize, int KeysSize, int DsStages>
struct PairStorage {
  alignas(1024) Element peer_ds[DsSize];
  alignas(1024) Element peer_k[KeysSize];  // this CTA's half of the columns of the peer's K
  int32_t sent_work;                       // a work item, from the first CTA to the second
  alignas(16) cutlass::arch::ClusterTransactionBarrier peer_ds_full[DsStages], sent_full;
  alignas(16) cutlass::arch::ClusterBarrier ds_stored[DsStages], sent_empty;
  // With dq_semaphore: the warpgroups may add a block's dQ; they have added it.
  alignas(16) cutlass::arch::ClusterBarrier dq_granted, dq_added;
};

struct NoStorage {};

// Shared memory of a CTA without a peer, with dequantised operands, in addition to the rest: of
// each consumer warpgroup the A operand of the product that adds LSE to S.
template <class Element, int Size, int Consumers>
struct FactorStorage {
  alignas(1024) Element factor[Consumers][Size];
};

// The factor that divides the K of a work unit; it is 1 unless operands are dequantised. Scores
// times `scale_log2`, the softmax scale over the factor, are in log2 units. `log2_inverse` in the
// exponent divides P, and so dS, by the factor: dQ = dS K needs no division of its own. dV and dK
// are multiplied at the end of a work unit. All lanes hold the same values.
struct KeyFactor {
  float factor, scale_log2, log2_inverse;
};

// `Dequantised_`: the operands are those of an 8-bit forward. K holds 8-bit numbers times a power
// of two; the column after its last holds the factor of the tile, a bfloat16 number, which divides
// products with K. P is at most 1: scores here have more bits than those that the forward has
// summed, so LSE may lie below a score.
// `Clips_`: the plan's spans are clipped, and dQ has no order of additions.
template <class Element_, int HeadDim_, int TileM_, int TileN_, bool Dequantised_ = false,
          bool Clips_ = false, int VDim_ = HeadDim_>
struct BackwardShapes {
  using Element = Element_;
  static constexpr bool Dequantised = Dequantised_;
  static constexpr bool Clips = Clips_;
  using Block = conditional_t<Clips, ClippedRowBlock, RowBlock>;
  static constexpr int D = HeadDim_;
  static constexpr int DV = VDim_;
  static_assert(DV == D || !Dequantised);
  static constexpr int M = TileM_;
  static constexpr BackwardPolicy kPolicy = kBackwardPolicy<D>;
  static constexpr int Ctas = kPolicy.role_split ? 2 : 1;  // of a cluster, which shares a key tile
  static constexpr int TileN = TileN_;                     // keys of a tile
  static constexpr int N = TileN / Ctas;
  static_assert(kPolicy.role_split == (N == 64));
  static constexpr int Consumers = 2;  // warpgroups
  static constexpr int Threads = kWarpgroup * (Consumers + 1);
  static constexpr int QStages = kPolicy.q_stages;
  static constexpr int DoutStages = kPolicy.dout_stages;
  static constexpr int DsStages = kPolicy.ds_stages;
  static constexpr int kDeltaStages = kPolicy.role_split ? QStages : DoutStages;
  static constexpr int BlockDepth = 4;  // decoded blocks, until they are done
  // dQ is added to global memory in tiles of (64, kDqColumns) floats, in the order in which a
  // warpgroup's accumulators hold them: (groups of 8 columns, 128 threads, 4).
  static constexpr int kDqColumns = kPolicy.role_split ? D / 4 : 64;
  static constexpr int kDqTile = 64 * kDqColumns;
  static constexpr int DqTiles = M * D / kDqTile;                   // of a block
  static constexpr int DqTilesEach = DqTiles / (Consumers * Ctas);  // of a warpgroup, side by side

  // One warpgroup's products: S^T (64, M) = K (64, D) Q^T and dP^T (64, M) = V (64, DV) dO^T;
  // dV (64, DV) += P^T (64, M) dO and dK (64, D) += dS^T (64, M) Q, with A in registers; a dQ tile
  // (64, kDqColumns) = dS (64, N) K.
  using MmaS = decltype(make_tiled_mma(
      GMMA::ss_op_selector<Element, Element, float, Shape<_64, Int<M>, Int<D>>, GMMA::Major::K,
                           GMMA::Major::K>()));
  template <int Columns>
  using MmaGradient = decltype(make_tiled_mma(
      GMMA::rs_op_selector<Element, Element, float, Shape<_64, Int<Columns>, Int<M>>,
                           GMMA::Major::K, GMMA::Major::MN>()));
  using MmaK = MmaGradient<D>;
  using MmaV = MmaGradient<DV>;
  using MmaQ = decltype(make_tiled_mma(
      GMMA::ss_op_selector<Element, Element, float, Shape<_64, Int<kDqColumns>, Int<N>>,
                           GMMA::Major::K, GMMA::Major::MN>()));

  // With tiles of 128 keys LSE and D enter S^T and dP^T (64, M) by a product with ones, (64, 16)
  // (16, M), of which three columns count: no thread reads them from shared memory. The ones are
  // in registers. With dequantised operands the ones of LSE are the factor of the keys, in shared
  // memory: a factor in registers would leave too few for the accumulators.
  using Statistic = conditional_t<kPolicy.role_split, float, SplitStatistic>;
  using MmaStatistic = decltype(make_tiled_mma(
      GMMA::rs_op_selector<bfloat16_t, bfloat16_t, float, Shape<_64, Int<M>, _16>, GMMA::Major::K,
                           GMMA::Major::K>()));
  // (M, 16, S): columns 8 to 15 are columns 0 to 7 again, and meet zeros.
  template <int Stages>
  using SmemStatistic = Layout<Shape<Shape<_8, Int<M / 8>>, Shape<_8, _2>, Int<Stages>>,
                               Stride<Stride<_8, _64>, Stride<_1, _0>, Int<8 * M>>>;
  using SmemFactor =
      decltype(tile_to_shape(GMMA::Layout_K_INTER_Atom<Element>{}, Shape<_64, _16>{}));

  using AtomK = GMMA::Layout_K_SW128_Atom<Element>;
  using AtomMN = GMMA::Layout_MN_SW128_Atom<Element>;
  using SmemQ = decltype(tile_to_shape(AtomK{}, Shape<Int<M>, Int<D>, Int<QStages>>{}));
  using SmemDout = decltype(tile_to_shape(AtomK{}, Shape<Int<M>, Int<DV>, Int<DoutStages>>{}));
  using SmemV = decltype(tile_to_shape(AtomK{}, Shape<Int<N>, Int<DV>>{}));
  // K has slabs of 64 columns, or of 16 where a dQ tile is no multiple of 64 columns.
  static constexpr bool kNarrowSlabs = kDqColumns % kSlab != 0;
  static constexpr int kSlabOfK = kNarrowSlabs ? 16 : kSlab;
  static_assert(kDqColumns % kSlabOfK == 0);
  using AtomOfK = conditional_t<kNarrowSlabs, GMMA::Layout_K_SW32_Atom<Element>, AtomK>;
  using AtomOfKt = conditional_t<kNarrowSlabs, GMMA::Layout_MN_SW32_Atom<Element>, AtomMN>;
  using SmemK = decltype(tile_to_shape(AtomOfK{}, Shape<Int<N>, Int<D>>{}));
  // The same bytes transposed, (D, M, S), (DV, M, S) and (D, N): B operands of dK, dV and dQ.
  using SmemQt =
      decltype(tile_to_shape(AtomMN{}, Shape<Int<D>, Int<M>, Int<QStages>>{}, Step<_2, _1, _3>{}));
  using SmemDoutT = decltype(tile_to_shape(AtomMN{}, Shape<Int<DV>, Int<M>, Int<DoutStages>>{},
                                           Step<_2, _1, _3>{}));
  using SmemKt = decltype(tile_to_shape(AtomOfKt{}, Shape<Int<D>, Int<N>>{}, Step<_2, _1>{}));
  using SmemDs = decltype(tile_to_shape(AtomK{}, Shape<Int<M>, Int<N>, Int<DsStages>>{}));
  // In a pair of CTAs: this CTA's half of the columns of the peer's K, transposed (D / 2, N).
  using SmemPeerKt =
      decltype(tile_to_shape(AtomOfKt{}, Shape<Int<D / Ctas>, Int<N>>{}, Step<_2, _1>{}));

  using Pair = PairStorage<Element, cosize_v<SmemDs>, cosize_v<SmemPeerKt>, DsStages>;
  using Factor = conditional_t<Dequantised, FactorStorage<Element, cosize_v<SmemFactor>, Consumers>,
                               NoStorage>;
  struct SharedStorage : conditional_t<(Ctas > 1), Pair, Factor> {
    alignas(1024) Element k[cosize_v<SmemK>];
    alignas(1024) Element v[cosize_v<SmemV>];
    alignas(1024) Element q[cosize_v<SmemQ>];
    alignas(1024) Element dout[cosize_v<SmemDout>];
    alignas(1024) Element ds[cosize_v<SmemDs>];
    // Products read these with a stride of 0. Sanitizers take it for 16 bytes, so that room must
    // follow.
    alignas(128) Statistic lse[QStages][M];
    alignas(128) Statistic delta[kDeltaStages][M];
    alignas(128) float dq[Consumers][kPolicy.role_split ? 4 : kDqTile];
    alignas(128) float p[kPolicy.role_split ? 64 * M : 1];  // P^T, from one warpgroup to the other
    Block blocks[BlockDepth];
    KeyWorkItem work[kWorkDepth];
    int32_t next_work, head;                            // of the thread that fetches
    conditional_t<Clips, ClippedSpan, NoStorage> span;  // the same
    alignas(16) cutlass::arch::ClusterTransactionBarrier k_full, v_full;
    alignas(16) cutlass::arch::ClusterTransactionBarrier q_full[QStages], dout_full[DoutStages];
    alignas(16) cutlass::arch::ClusterBarrier block_ready[BlockDepth], block_done[BlockDepth];
    alignas(16) cutlass::arch::ClusterBarrier q_empty[QStages], dout_empty[DoutStages];
    alignas(16) cutlass::arch::ClusterBarrier ds_full[DsStages], ds_empty[DsStages], p_full;
    alignas(16) cutlass::arch::ClusterBarrier k_empty, v_empty;
    alignas(16) cutlass::arch::ClusterBarrier dq_full[Consumers], dq_empty[Consumers];
    alignas(16) cutlass::arch::ClusterBarrier work_full[kWorkDepth], work_empty[kWorkDepth];
  };
};

struct BackwardParams {
  CUtensorMap q, dout, k, v;
  BackwardArgs args;
  int32_t group;  // query heads of a KV head
  int32_t kv_heads;
  int32_t num_work;  // work items: work units x KV heads
};

}  // namespace ringfa3
