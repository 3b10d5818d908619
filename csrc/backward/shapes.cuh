// Shapes, layouts and shared memory of a backward kernel, and its parameters.
//
// Letters in shapes: M rows of a block of queries, N keys of a tile, D head dim, S stages.
#pragma once

#include <cute/tensor.hpp>
#include <cutlass/arch/barrier.h>
#include <cutlass/cutlass.h>
#include <cutlass/numeric_types.h>

#include "hopper/pipeline.cuh"
#include "hopper/tma.cuh"

namespace ringfa3 {

using namespace cute;

// dQ leaves in pieces of (64, 64) floats, in the order in which a warpgroup's accumulators hold
// them: (8 groups of columns, 128 threads, 4).
constexpr int kDqTile = 64 * 64;

// A work unit for one KV head.
struct KeyWork {
  int32_t kv_head;  // -1: no more
  WorkUnit unit;
};

// A block of rows to load and to work on.
struct RowBlock {
  int32_t head;       // -1: no more
  int32_t token;      // its first row
  int32_t key_row;    // the tile's first key
  int32_t low, high;  // key n of the tile is seen by rows [n + low, n + high] of the block,
  int32_t rows;       // of which these belong to the span, and
  int32_t keys;       // so many keys to the tile
  int32_t target;     // number of the block in LSE, D and dQ
  int32_t span;       // its number in the plan
  int32_t turn;       // how many tiles add to its dQ before this one, where turns are kept
  int32_t flags;      // BlockFlags
};

// masked: some of its pairs must not be seen. foreign: its last rows are a neighbour's. first,
// last: of the work unit.
enum BlockFlags : int32_t { kMasked = 1, kForeign = 2, kFirstBlock = 4, kLastBlock = 8 };
constexpr int kBlockFlagBits = 4;

// A piece of dQ on its way out: its number, -1 for no more, and its turn.
struct DqTile {
  int32_t number, turn;
};

template <class Element_, int HeadDim_, int TileM_, int TileN_>
struct BackwardTraits {
  using Element = Element_;
  static constexpr int D = HeadDim_;
  static constexpr int M = TileM_;
  static constexpr int N = TileN_;
  static constexpr int Consumers = 2;
  static constexpr int Threads = kWarpgroup * (Consumers + 1);
  static constexpr int ConsumerRegisters = 240;
  static constexpr int ProducerRegisters = 24;
  // Either each warpgroup has 64 keys, or, where a tile has no more, one has dV and one has dK.
  static constexpr bool Roles = N == 64;
  static constexpr int QStages = D == 128 ? 3 : 2;
  static constexpr int DoutStages = D < 256 ? 2 : 1;
  static constexpr int DsStages = Roles ? 2 : 3;
  static constexpr int BlockDepth = 4;  // blocks that are decoded, or not yet done with
  // LSE and D are read while the products that they are for still run: registers are left for that.
  static constexpr bool ReadsAhead = M == 64;
  // A block's flags are looked up while the one before it is weighed, where a register is left.
  static constexpr bool LooksAhead = D == 64;
  static constexpr int DqTiles = M * D / kDqTile;          // of a block of dQ
  static constexpr int DqTilesEach = DqTiles / Consumers;  // of a warpgroup, side by side

  // One warpgroup's products: S^T (64, M) = K (64, D) Q^T, dP^T = V dO^T alike,
  // dV (64, D) += P^T (64, M) dO, dK += dS^T Q alike, both of registers, and a piece of dQ (64, 64)
  // = dS (64, N) K.
  using MmaS = decltype(make_tiled_mma(
      GMMA::ss_op_selector<Element, Element, float, Shape<_64, Int<M>, Int<D>>, GMMA::Major::K,
                           GMMA::Major::K>()));
  using MmaKV = decltype(make_tiled_mma(
      GMMA::rs_op_selector<Element, Element, float, Shape<_64, Int<D>, Int<M>>, GMMA::Major::K,
                           GMMA::Major::MN>()));
  using MmaQ =
      decltype(make_tiled_mma(GMMA::ss_op_selector<Element, Element, float, Shape<_64, _64, Int<N>>,
                                                   GMMA::Major::K, GMMA::Major::MN>()));

  using AtomK = GMMA::Layout_K_SW128_Atom<Element>;
  using AtomMN = GMMA::Layout_MN_SW128_Atom<Element>;
  using SmemQ = decltype(tile_to_shape(AtomK{}, Shape<Int<M>, Int<D>, Int<QStages>>{}));
  using SmemDout = decltype(tile_to_shape(AtomK{}, Shape<Int<M>, Int<D>, Int<DoutStages>>{}));
  using SmemK = decltype(tile_to_shape(AtomK{}, Shape<Int<N>, Int<D>>{}));  // and V
  // The same bytes transposed, (D, M, S) and (D, N), as the other products' B want them.
  using SmemQt =
      decltype(tile_to_shape(AtomMN{}, Shape<Int<D>, Int<M>, Int<QStages>>{}, Step<_2, _1, _3>{}));
  using SmemDoutT = decltype(tile_to_shape(AtomMN{}, Shape<Int<D>, Int<M>, Int<DoutStages>>{},
                                           Step<_2, _1, _3>{}));
  using SmemKt = decltype(tile_to_shape(AtomMN{}, Shape<Int<D>, Int<N>>{}, Step<_2, _1>{}));
  using SmemDs = decltype(tile_to_shape(AtomK{}, Shape<Int<M>, Int<N>, Int<DsStages>>{}));

  struct SharedStorage {
    alignas(1024) Element k[cosize_v<SmemK>];
    alignas(1024) Element v[cosize_v<SmemK>];
    alignas(1024) Element q[cosize_v<SmemQ>];
    alignas(1024) Element dout[cosize_v<SmemDout>];
    alignas(1024) Element ds[cosize_v<SmemDs>];
    alignas(128) float dq[Consumers][kDqTile];
    alignas(128) float p[Roles ? 64 * M : 1];  // P^T on its way from one warpgroup to the other
    alignas(128) float lse[QStages][M];
    alignas(128) float delta[DoutStages][M];
    RowBlock blocks[BlockDepth];
    DqTile dq_tiles[Consumers];
    KeyWork work[kWorkDepth];
    int32_t next_work;  // of the thread that plans
    alignas(16) cutlass::arch::ClusterTransactionBarrier k_full, v_full;
    alignas(16) cutlass::arch::ClusterTransactionBarrier q_full[QStages], dout_full[DoutStages];
    alignas(16) cutlass::arch::ClusterBarrier block_ready[BlockDepth], block_done[BlockDepth];
    alignas(16) cutlass::arch::ClusterBarrier q_empty[QStages], dout_empty[DoutStages];
    alignas(16) cutlass::arch::ClusterBarrier ds_full[DsStages], p_full;
    alignas(16) cutlass::arch::ClusterBarrier k_empty, v_empty;
    alignas(16) cutlass::arch::ClusterBarrier dq_full[Consumers], dq_empty[Consumers];
    alignas(16) cutlass::arch::ClusterBarrier work_full[kWorkDepth], work_empty[kWorkDepth];
  };
};

struct BackwardParams {
  CUtensorMap q, dout, k, v;
  BackwardArgs args;
  int32_t group, kv_heads, num_work;
};

}  // namespace ringfa3
