// Shapes, layouts and shared memory of a forward kernel, and its parameters.
//
// Letters in shapes: M rows of a tile, N keys of a block, D head dim, S stages.
#pragma once

#include <cute/tensor.hpp>
#include <cutlass/arch/barrier.h>
#include <cutlass/cutlass.h>
#include <cutlass/numeric_types.h>

#include "forward/policy.h"
#include "hopper/tma.cuh"
#include "hopper/warp.cuh"
#include "plan/spans.h"
#include "plan/work_queue.h"

namespace ringfa3 {

using namespace cute;

template <class Element_, int HeadDim_, int TileN_, int Consumers_>
struct ForwardShapes {
  using Element = Element_;
  static constexpr int D = HeadDim_;
  static constexpr int N = TileN_;
  static constexpr int Consumers = Consumers_;  // warpgroups, of 64 rows each
  static constexpr int M = 64 * Consumers;
  static constexpr ForwardPolicy kPolicy = kForwardPolicy<D>;
  static constexpr int Stages = kPolicy.stages;
  static constexpr int QStages = kPolicy.q_stages;

  // The ablation changes these three.
  static constexpr bool Overlap = true;   // S(j+1) is issued before P(j) V
  static constexpr bool PingPong = true;  // warpgroups issue their products in turns
  static constexpr int Producers = 1;     // warpgroups that load

  static constexpr int Threads = kWarpgroup * (Consumers + Producers);
  static constexpr RegisterSplit kRegisters = register_split(Consumers);

  // One warpgroup's products: S (64, N) = Q (64, D) K^T, O (64, D) += P (64, N) V.
  using MmaS = decltype(make_tiled_mma(
      GMMA::ss_op_selector<Element, Element, float, Shape<_64, Int<N>, Int<D>>, GMMA::Major::K,
                           GMMA::Major::K>()));
  using MmaO = decltype(make_tiled_mma(
      GMMA::rs_op_selector<Element, Element, float, Shape<_64, Int<D>, Int<N>>, GMMA::Major::K,
                           GMMA::Major::MN>()));

  using AtomK = GMMA::Layout_K_SW128_Atom<Element>;
  using AtomMN = GMMA::Layout_MN_SW128_Atom<Element>;
  using SmemQ = decltype(tile_to_shape(AtomK{}, Shape<Int<M>, Int<D>, Int<QStages>>{}));
  using SmemK = decltype(tile_to_shape(AtomK{}, Shape<Int<N>, Int<D>, Int<Stages>>{}));
  // V transposed, (D, N, S): the head dim is contiguous, as the B operand of P V needs it.
  using SmemV =
      decltype(tile_to_shape(AtomMN{}, Shape<Int<D>, Int<N>, Int<Stages>>{}, Step<_2, _1, _3>{}));

  struct SharedStorage {
    alignas(1024) Element q[cosize_v<SmemQ>];
    alignas(1024) Element k[cosize_v<SmemK>];
    alignas(1024) Element v[cosize_v<SmemV>];
    alignas(1024) Element o[kPolicy.boxed_o ? M * D : 1];  // a box of (16, D) for each warp
    alignas(16) cutlass::arch::ClusterTransactionBarrier q_full[QStages];
    alignas(16) cutlass::arch::ClusterTransactionBarrier k_full[Stages], v_full[Stages];
    alignas(16) cutlass::arch::ClusterBarrier q_empty[QStages], k_empty[Stages], v_empty[Stages];
    alignas(16) cutlass::arch::ClusterBarrier work_full[kWorkDepth], work_empty[kWorkDepth];
    alignas(16) cutlass::arch::ClusterBarrier work_wanted;  // the loader asks for the next item
    WorkItem work[kWorkDepth];
  };
};

template <class Shapes>
struct ForwardParams {
  CUtensorMap q, k, v, out;
  ForwardArgs args;
  int32_t heads;
  int32_t group;     // query heads of a KV head
  int32_t num_work;  // work items: tiles x heads
  float scale_log2;  // of scores, to log2 units
};

}  // namespace ringfa3
