// Shapes, layouts and shared memory of a forward kernel, and its parameters.
//
// Letters in shapes: M rows of a tile, N keys of a block, D head dim of Q and K, DV head dim of V
// and O, S stages.
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

// The dtypes of a forward whose O has the dtype `Element`.
template <class Element, Precision>
struct OperandTypes {
  using QK = Element;
  using PV = Element;
  using Score = float;  // of the accumulators of Q K^T
};
template <class Element>
struct OperandTypes<Element, Precision::Fp8> {
  using QK = cutlass::float_e4m3_t;
  using PV = cutlass::float_e4m3_t;
  using Score = float;
};
template <class Element>
struct OperandTypes<Element, Precision::Int8> {
  using QK = int8_t;
  using PV = Element;
  using Score = int32_t;
};

// The layout atom of `Columns` contiguous columns in shared memory; see csrc/hopper/tma.cuh.
template <class Element, int Columns>
using AtomOfColumns =
    std::conditional_t<Columns * sizeof(Element) == 64, GMMA::Layout_K_SW64_Atom<Element>,
                       GMMA::Layout_K_SW128_Atom<Element>>;

// V as the B operand of P V, (DV, N, S). The head dim is contiguous, or the keys are, which the
// quantisation has transposed.
template <class Element, int DV, int N, int Stages, bool KeysContiguous>
constexpr auto smem_layout_v() {
  Shape<Int<DV>, Int<N>, Int<Stages>> const shape;
  if constexpr (KeysContiguous) {
    return tile_to_shape(AtomOfColumns<Element, N>{}, shape);
  } else {
    return tile_to_shape(GMMA::Layout_MN_SW128_Atom<Element>{}, shape, Step<_2, _1, _3>{});
  }
}

// `Clips_`: the plan's spans are clipped. Other kernels have no code for it.
template <class Element_, int HeadDim_, int TileN_, int Consumers_,
          Precision Precision_ = Precision::Native, bool Clips_ = false, int VDim_ = HeadDim_>
struct ForwardShapes {
  using Element = Element_;  // of O
  using Types = OperandTypes<Element, Precision_>;
  using ElementQK = typename Types::QK;
  using ElementPV = typename Types::PV;
  static constexpr bool Quantised = Precision_ != Precision::Native;
  static constexpr bool QuantisedV = Precision_ == Precision::Fp8;
  static constexpr bool Clips = Clips_;
  static_assert(!Clips || !Quantised);
  static constexpr bool VByTile = QuantisedV;  // V is (tiles x KV heads, D, kKeyTile), transposed
  static constexpr bool MayOverflow = !QuantisedV;  // P V; e4m3 P is at most 448
  using Args = std::conditional_t<Quantised, QuantisedForwardArgs, ForwardArgs>;
  static constexpr int D = HeadDim_;
  static constexpr int DV = VDim_;
  static_assert(DV == D || !Quantised);
  static constexpr int N = TileN_;
  static constexpr int Consumers = Consumers_;  // warpgroups, of 64 rows each
  static constexpr int M = 64 * Consumers;
  static constexpr ForwardPolicy kPolicy = kForwardPolicy<D, Consumers, Precision_>;
  static constexpr bool kNarrows = kPolicy.narrow_keys > 0;
  static constexpr int Stages = kPolicy.stages;
  static constexpr int QStages = kPolicy.q_stages;
  static constexpr int QParts = kPolicy.splits_q ? Consumers : 1;

  static constexpr int Producers = 1;  // warpgroups that load
  static constexpr int Threads = kWarpgroup * (Consumers + Producers);
  static constexpr RegisterSplit kRegisters = register_split(Consumers);

  // One warpgroup's products: S (64, N) = Q (64, D) K^T, O (64, DV) += P (64, N) V.
  using MmaS = decltype(make_tiled_mma(
      GMMA::ss_op_selector<ElementQK, ElementQK, typename Types::Score, Shape<_64, Int<N>, Int<D>>,
                           GMMA::Major::K, GMMA::Major::K>()));
  using MmaO = decltype(make_tiled_mma(
      GMMA::rs_op_selector<ElementPV, ElementPV, float, Shape<_64, Int<DV>, Int<N>>, GMMA::Major::K,
                           QuantisedV ? GMMA::Major::K : GMMA::Major::MN>()));

  using AtomK = AtomOfColumns<ElementQK, D>;
  using SmemQ =
      decltype(tile_to_shape(AtomK{}, Shape<Int<M / QParts>, Int<D>, Int<QParts>, Int<QStages>>{}));
  using SmemK = decltype(tile_to_shape(AtomK{}, Shape<Int<N>, Int<D>, Int<Stages>>{}));
  using SmemV = decltype(smem_layout_v<ElementPV, DV, N, Stages, QuantisedV>());
  using Blocks = BlockIterator<N, Quantised, Clips>;
  using Work = typename Blocks::Work;
  static_assert(!Quantised || kKeyTile % N == 0);  // a block has one scale of K

  struct SharedStorage {
    alignas(1024) ElementQK q[cosize_v<SmemQ>];
    alignas(1024) ElementQK k[cosize_v<SmemK>];
    alignas(1024) ElementPV v[cosize_v<SmemV>];
    alignas(1024) Element o[kPolicy.boxed_o ? M * DV : 1];  // a box of (16, DV) for each warp
    alignas(16) cutlass::arch::ClusterTransactionBarrier q_full[QStages][QParts];
    alignas(16) cutlass::arch::ClusterTransactionBarrier k_full[Stages], v_full[Stages];
    alignas(16) cutlass::arch::ClusterBarrier q_empty[QStages][QParts];
    alignas(16) cutlass::arch::ClusterBarrier k_empty[Stages], v_empty[Stages];
    alignas(16) cutlass::arch::ClusterBarrier work_full[kWorkDepth], work_empty[kWorkDepth];
    alignas(16) cutlass::arch::ClusterBarrier work_wanted;  // the loader asks for the next item
    Work work[kWorkDepth];
    float k_scale[Quantised ? Stages : 1];
  };
};

struct NoScales {};  // of operands in 16 bits

// The boxes of a narrow span, `kPolicy.narrow_keys` rows of K and of V.
struct NarrowMaps {
  CUtensorMap k, v;
};
struct NoNarrowMaps {};

template <class Shapes>
struct ForwardParams {
  CUtensorMap q, k, v, out;
  ForwardArgs args;
  int32_t heads;
  int32_t group;     // query heads of a KV head
  int32_t num_work;  // work items: tiles x heads
  float scale_log2;  // of scores, to log2 units
  std::conditional_t<Shapes::Quantised, OperandScales, NoScales> scales;
  std::conditional_t<Shapes::kNarrows, NarrowMaps, NoNarrowMaps> narrow;
};

// The sink of a head in the rows of a tile; -inf: none. With 8 bits another pass counts it.
template <class Shapes>
CUTE_DEVICE float sink_of(ForwardArgs const& a, Tile const& tile, int head) {
  if (Shapes::Quantised || a.sink == nullptr || !(tile.flags & kLast)) return -INFINITY;
  return __ldg(a.sink + head);
}

}  // namespace ringfa3
