// A tile's narrow span: its first one, if the tile needs at most `kPolicy.narrow_keys` columns of
// it, and columns of other spans. A window with visible first keys has one in every tile.
//
// As a block of N keys it would cost as much as one whose keys are all visible. So it has products
// of its own, and one softmax with the tile's first block, whose S is in registers by then:
//
//   wgmma       | S (64, n)           |                | P (64, n) V |
//   registers   | mask of the block   | maxima, P of n | P of the block
//
// The products run outside of `WarpgroupOrder`: they take less than a tenth of a block's. No
// product is in flight where this code begins or ends: ptxas would serialise all.
//
// Letters in shapes: n keys of a narrow span, D head dim of Q and K, DV head dim of V and O.
#pragma once

#include "forward/mask.cuh"
#include "forward/operands.cuh"
#include "forward/shapes.cuh"
#include "hopper/wgmma.cuh"

namespace ringfa3 {

using namespace cute;

// S (64, n) = Q (64, D) K^T, and K and V as `load_narrow_span` puts them: where a stage begins.
template <class Shapes>
struct NarrowShapes {
  static constexpr int N = Shapes::kPolicy.narrow_keys;
  using MmaS = decltype(make_tiled_mma(
      GMMA::ss_op_selector<typename Shapes::ElementQK, typename Shapes::ElementQK, float,
                           Shape<_64, Int<N>, Int<Shapes::D>>, GMMA::Major::K, GMMA::Major::K>()));
  using SmemK = decltype(tile_to_shape(typename Shapes::AtomK{}, Shape<Int<N>, Int<Shapes::D>>{}));
  using SmemV = decltype(tile_to_shape(GMMA::Layout_MN_SW128_Atom<typename Shapes::ElementPV>{},
                                       Shape<Int<Shapes::DV>, Int<N>>{}, Step<_2, _1>{}));
};

// The softmax of a tile's first block, as `ForwardConsumer::first_softmax`, and of its narrow span,
// whose P V it adds to O.
template <class Consumer>
CUTE_DEVICE void join_narrow_span(Consumer& c) {
  using Shapes = typename Consumer::Shapes;
  using Element = typename Consumer::ElementPV;
  using Narrow = NarrowShapes<Shapes>;
  constexpr int N = Narrow::N;
  static_assert(!Consumer::kPolicy.sums_rounded);
  BlockIterator<N, false, Shapes::Clips> block(c.smem.work[c.work_stage.index()], c.p.args.spans);
  block.begin_first_span();

  typename Narrow::MmaS mma_s;
  auto s = partition_fragment_C(mma_s, Shape<_64, Int<N>>{});  // S (64, n)
  auto prob = make_tensor<float>(shape(s));
  auto p = make_tensor<Element>(Shape<Shape<_2, _2, _2>, _1, Int<N / 16>>{});
  auto* const k = c.smem.k + c.k_stage.index() * Shapes::N * Shapes::D;
  auto* const v = c.smem.v + c.v_stage.index() * Shapes::N * Shapes::DV;
  Tensor sK = make_tensor(make_smem_ptr(k), typename Narrow::SmemK{});
  Tensor sV = make_tensor(make_smem_ptr(v), typename Narrow::SmemV{});
  c.wait_for_k();
  auto const fK = mma_s.get_slice(c.thread).partition_fragment_B(sK);
  issue(mma_s, c.fQ(_, _, _, c.q_stage.index()), fK, s, false);
  if (c.unmasked == 0) apply_mask(c.s, c.block, c.row, c.lane);
  c.smem.v_full[c.v_stage.index()].wait(c.v_stage.phase());
  if (block.valid_rows() < N) {
    zero_tail_rows_of_v(sV, block.valid_rows(), c.thread);
    c.order().sync();
  }
  warpgroup_wait<0>();
  warpgroup_fence_operand(s);
  c.self().finish_qk();

  apply_mask(s, block, c.row, c.lane);
  float sum[2][2] = {};
  c.softmax.take_maximum(c.softmax.begin(), c.o_scale, c.scale(), c.s, s);
  c.softmax.template exponentiate<0, decltype(size(s))::value>(s, prob, sum, c.scale());
  to_operand<Element>(prob, p);
  if (!c.o_empty) scale_rows(c.o, c.o_scale);
  auto const fV = c.mma_o.get_slice(c.thread).partition_fragment_B(sV);
  issue(c.mma_o, p, fV, c.o, !c.o_empty);
  c.o_empty = false;
  c.softmax.template exponentiate<0, Consumer::kSize>(c.s, c.prob, sum, c.scale());
  to_operand<Element>(c.prob, c.fP);
  c.softmax.add_rescaled(sum, c.o_scale);
  warpgroup_wait<0>();
  c.self().finish_pv();
}

}  // namespace ringfa3
