// Shapes, layouts and shared memory of a forward kernel, and its parameters.
//
// Letters in shapes: M rows of a tile, N keys of a block, D head dim, S stages.
#pragma once

#include <cute/tensor.hpp>
#include <cutlass/arch/barrier.h>
#include <cutlass/cutlass.h>
#include <cutlass/numeric_types.h>

#include "hopper/pipeline.cuh"
#include "hopper/tma.cuh"
#include "plan/spans.cuh"

namespace ringfa3 {

using namespace cute;

template <class Element_, int HeadDim_, int TileN_, int Consumers_>
struct ForwardTraits {
  using Element = Element_;
  static constexpr int D = HeadDim_;
  static constexpr int N = TileN_;
  static constexpr int Consumers = Consumers_;
  static constexpr bool Overlap = true;   // S(j+1) is issued before P(j) V
  static constexpr bool PingPong = true;  // warpgroups issue their products in turns
  static constexpr int Producers = 1;     // warpgroups that load
  static constexpr int M = 64 * Consumers;
  static constexpr int Stages = 2;
  static constexpr int QStages = D < 256 ? 2 : 1;  // two where they fit: the next tile's Q is there
  static constexpr bool kBoxedO = D < 256;  // where there is room for O, whole boxes are stored
  // Elements of a thread's S that become P while P V of the last block may still run.
  static constexpr int kEarly = D == 128 ? 32 : 16;
  // Before the softmax of a tile's last block is done: whether Q is given back, and whether what
  // comes next is looked up. Measured: it pays where tiles are short, or wait for Q.
  static constexpr bool kFreesQAhead = D != 128;
  static constexpr bool kLooksAhead = D == 64;
  static constexpr int Threads = kWarpgroup * (Consumers + Producers);
  static constexpr int ConsumerRegisters = Consumers == 2 ? 240 : 160;
  static constexpr int ProducerRegisters = Consumers == 2 ? 24 : 32;

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
  // V transposed, (D, N, S): the head dim is contiguous, as the second product's B wants it.
  using SmemV =
      decltype(tile_to_shape(AtomMN{}, Shape<Int<D>, Int<N>, Int<Stages>>{}, Step<_2, _1, _3>{}));

  struct SharedStorage {
    alignas(1024) Element q[cosize_v<SmemQ>];
    alignas(1024) Element k[cosize_v<SmemK>];
    alignas(1024) Element v[cosize_v<SmemV>];
    alignas(1024) Element o[kBoxedO ? M * D : 1];  // a box of (16, D) for each warp
    alignas(16) cutlass::arch::ClusterTransactionBarrier q_full[QStages];
    alignas(16) cutlass::arch::ClusterTransactionBarrier k_full[Stages], v_full[Stages];
    alignas(16) cutlass::arch::ClusterBarrier q_empty[QStages], k_empty[Stages], v_empty[Stages];
    alignas(16) cutlass::arch::ClusterBarrier work_full[kWorkDepth], work_empty[kWorkDepth];
    alignas(16) cutlass::arch::ClusterBarrier work_wanted;
    Work work[kWorkDepth];
  };
};

template <class Traits>
struct ForwardParams {
  CUtensorMap q, k, v, out;
  ForwardArgs args;
  int32_t heads, group, num_work;
};

}  // namespace ringfa3
