// A consumer warpgroup of the forward: 64 query rows of every tile of its CTA.
//
// S(j) = Q K(j)^T of block j, P(j) = softmax of S(j), O += P(j) V(j). Two warpgroups take turns to
// issue products (ping-pong), so that one computes its softmax under the products of the other:
//
//   warpgroup 0 | issue S(j+1), PV(j) | softmax(j+1)        | issue S(j+2), PV(j+1) | softmax(j+2)
//   warpgroup 1 | softmax(j)          | issue S(j+1), PV(j) | softmax(j+1)          | issue ...
//
// Inside a warpgroup the first part of the softmax overlaps its own PV:
//
//   wgmma       | S(j+1)      | PV(j)                       |
//   registers   |   wait for S| mask, exp2 of a first part  | wait for PV | exp2 of the rest, P
//
// The first S of a tile is issued with the last PV of the tile before, where Q has two stages.
//
// Letters in shapes: M rows of a tile, N keys of a block, D head dim, S stages.
#pragma once

#include "forward/epilogue.cuh"
#include "forward/mask.cuh"
#include "forward/partial_output.cuh"
#include "forward/shapes.cuh"
#include "forward/softmax.cuh"
#include "hopper/pipeline.cuh"
#include "hopper/wgmma.cuh"

namespace ringfa3 {

using namespace cute;

// Called when a consumer has released a stage. The product's `load_tiles` refills stages by itself.
struct NoRefill {
  CUTE_DEVICE void q() const {}
  CUTE_DEVICE void k() const {}
  CUTE_DEVICE void v() const {}
};

// State and operations of one warpgroup, then the loops over tiles and blocks. The operations are
// lambdas and not methods: for a struct that holds the state nvcc emits other code.
template <class Shapes, class Refill = NoRefill>
CUTE_DEVICE void consume_tiles(ForwardParams<Shapes> const& p, typename Shapes::SharedStorage& smem,
                               Refill const& refill = {}) {
  using Element = typename Shapes::Element;
  constexpr int N = Shapes::N, D = Shapes::D, Stages = Shapes::Stages;
  constexpr int Consumers = Shapes::Consumers;
  int const thread = threadIdx.x % kWarpgroup;
  int const warpgroup = cutlass::canonical_warp_group_idx() - Shapes::Producers;  // uniform
  int const lane = thread % kWarp;
  int const warp = cutlass::canonical_warp_idx_sync() - 4 * Shapes::Producers;  // of the consumers
  int const row = kWarpRows * warp + lane / 4;  // of the tile; and row + 8
  float const scale_log2 = p.args.softmax_scale * kLog2e;

  typename Shapes::MmaS mma_s;
  typename Shapes::MmaO mma_o;
  Tensor sQ = local_tile(make_tensor(make_smem_ptr(smem.q), typename Shapes::SmemQ{}),
                         Shape<_64, Int<D>>{}, make_coord(warpgroup, _0{}, _));  // (64, D, S)
  Tensor sK = make_tensor(make_smem_ptr(smem.k), typename Shapes::SmemK{});      // (N, D, S)
  Tensor sV = make_tensor(make_smem_ptr(smem.v), typename Shapes::SmemV{});      // (D, N, S)
  auto thread_s = mma_s.get_slice(thread);
  auto thread_o = mma_o.get_slice(thread);
  // wgmma operands: Q (64, D, S), K (N, D, S), V (D, N, S).
  Tensor fQ = thread_s.partition_fragment_A(sQ);
  Tensor fK = thread_s.partition_fragment_B(sK);
  Tensor fV = thread_o.partition_fragment_B(sV);
  Tensor s = partition_fragment_C(mma_s, Shape<_64, Int<N>>{});  // S (64, N)
  Tensor prob = make_tensor_like(s);                             // P (64, N) in float32
  Tensor o = partition_fragment_C(mma_o, Shape<_64, Int<D>>{});  // O (64, D)
  // P (64, N), the A operand of P V.
  Tensor fP = make_tensor<Element>(Shape<Shape<_2, _2, _2>, _1, Int<N / 16>>{});

  // Named barrier w is the turn of warpgroup w to issue products.
  auto await_turn = [&] {
    if constexpr (Shapes::PingPong) cutlass::arch::NamedBarrier::sync(2 * kWarpgroup, warpgroup);
  };
  auto pass_turn = [&] {
    if constexpr (Shapes::PingPong) {
      cutlass::arch::NamedBarrier::arrive(2 * kWarpgroup, (warpgroup + 1) % Consumers);
    }
  };

  // One lane of each warp arrives; electing it takes no register.
  auto release = [](cutlass::arch::ClusterBarrier& empty) {
    if (elect_one_sync()) empty.arrive();
  };

  Pipeline<Stages> k_stage, v_stage;
  Pipeline<Shapes::QStages> q_stage;
  Pipeline<kWorkDepth> work_stage;
  bool o_empty = true;  // the next P V overwrites O
  float o_scale[2];     // by which rows of O are multiplied
  auto scale_o = [&] {
    CUTE_UNROLL
    for (int n = 0; n < D / 2; n += 4) {
      o(n) *= o_scale[0], o(n + 1) *= o_scale[0], o(n + 2) *= o_scale[1], o(n + 3) *= o_scale[1];
    }
  };
  // Issues S = Q K^T.
  auto qk = [&] {
    issue(mma_s, fQ(_, _, _, q_stage.index()), fK(_, _, _, k_stage.index()), s, false);
  };
  // Issues O += P V.
  auto pv = [&] {
    smem.v_full[v_stage.index()].wait(v_stage.phase());
    issue(mma_o, fP, fV(_, _, _, v_stage.index()), o, !o_empty);
  };
  // Issues S of the next block and P V of the last one; without overlap one after the other.
  auto qk_and_pv = [&] {
    if constexpr (Shapes::Overlap) {
      qk();
      pv();
    } else {
      pv();
      warpgroup_wait<0>();
      warpgroup_fence_operand(o);
      qk();
    }
  };
  int own_rows = N;  // rows of the V of the last P that belong to its span
  // Zeroes rows of V that are a neighbour's: their P is 0, and 0 x inf would be NaN. Every
  // warpgroup does it for itself.
  auto clear_foreign_v = [&] {
    if (own_rows == N) return;
    smem.v_full[v_stage.index()].wait(v_stage.phase());
#pragma unroll 1  // rare
    for (int i = thread; i < (N - own_rows) * D; i += kWarpgroup) {
      sV(i % D, own_rows + i / D, v_stage.index()) = Element(0);
    }
    cutlass::arch::fence_view_async_shared();
    cutlass::arch::NamedBarrier::sync(kWarpgroup, Consumers + warpgroup);
  };
  // After the wait for S.
  auto finish_qk = [&] {
    warpgroup_fence_operand(s);
    release(smem.k_empty[k_stage.index()]);
    refill.k();
    k_stage.advance();
  };
  // After the wait for P V.
  auto finish_pv = [&] {
    warpgroup_fence_operand(o);
    release(smem.v_empty[v_stage.index()]);
    refill.v();
    v_stage.advance();
  };

  auto wait_for_k = [&] { smem.k_full[k_stage.index()].wait(k_stage.phase()); };

  constexpr int kSize = N / 2;  // elements of S that a thread holds
  constexpr int kEarly = Shapes::kPolicy.early_elements;
  smem.work_full[0].wait(0);
  bool more_tiles = smem.work[0].head >= 0;
  if (!more_tiles) return;
  if (warpgroup == Consumers - 1) pass_turn();
  BlockIterator<N> block(smem.work[0], p.args.spans);
  block.next();
  smem.q_full[0].wait(0);
  wait_for_k();
  await_turn();
  qk();
  pass_turn();
  warpgroup_wait<0>();
  finish_qk();
  while (more_tiles) {
    // S of the tile's first block is here.
    WorkItem const& work = smem.work[work_stage.index()];
    bool const first = work.tile.flags & kFirst;
    float earlier[2];  // LSE; it and O are needed behind the first softmax
    if (!first) load_partial(p, work, row, lane, o, earlier);
    OnlineSoftmax softmax;
    int unmasked = block.unmasked_blocks();  // blocks from this one on that need no mask
    if (unmasked == 0) apply_mask(s, block, row, lane);
    bool over[2] = {true, true};
    softmax.rescale(s, prob, over, o_scale, scale_log2);
    to_operand<Element>(prob, fP);
    o_empty = first;
    if (!first) {
      softmax.merge_partial(earlier, o_scale, lane);
      scale_o();
      __syncwarp();  // every lane has read its rows' LSE; one of them will overwrite it
    }
    bool more_blocks;
    auto release_q = [&] {  // after the last S of the tile
      release(smem.q_empty[q_stage.index()]);
      refill.q();
      q_stage.advance();
    };
    auto next_tile = [&] {
      work_stage.advance();
      smem.work_full[work_stage.index()].wait(work_stage.phase());
      more_tiles = smem.work[work_stage.index()].head >= 0;
      if (more_tiles) block.begin_tile(smem.work[work_stage.index()]);
    };
    // Goes to the next block and waits for its K. Behind the last block it does what the policy
    // puts before that block's softmax.
    auto next_block = [&] {
      own_rows = block.own_rows();
      more_blocks = true;
      if (--unmasked > 0) {
        block.next_unmasked_block();
      } else {
        block.complete();
        more_blocks = block.next();
        if (more_blocks) unmasked = block.unmasked_blocks();
      }
      if (more_blocks) {
        wait_for_k();
      } else {
        if constexpr (Shapes::kPolicy.releases_q_early) release_q();
        if constexpr (Shapes::kPolicy.looks_ahead) next_tile();
      }
    };
    next_block();
    while (more_blocks) {
      // P V of the block before runs beside S of this block, and beside its softmax.
      clear_foreign_v();
      await_turn();
      qk_and_pv();
      pass_turn();
      o_empty = false;
      warpgroup_wait<Shapes::Overlap ? 1 : 0>();
      finish_qk();
      if (unmasked == 0) apply_mask(s, block, row, lane);
      float sum[2][2] = {};
      softmax.template exponentiate<0, kEarly>(s, prob, sum, scale_log2);
      next_block();  // its branches keep these exponentials above the wait
      warpgroup_wait<0>();
      finish_pv();
      to_operand<Element, 0, kEarly>(prob, fP);
      softmax.template exponentiate<kEarly, kSize>(s, prob, sum, scale_log2);
      to_operand<Element, kEarly, kSize>(prob, fP);
      if (!softmax.accumulate(sum, over)) {
        softmax.rescale(s, prob, over, o_scale, scale_log2);
        to_operand<Element>(prob, fP);
        scale_o();
      }
    }

    // The tile's last P V. With two stages of Q the first S of the next tile is issued before it.
    clear_foreign_v();
    if constexpr (!Shapes::kPolicy.releases_q_early) release_q();
    if constexpr (!Shapes::kPolicy.looks_ahead) next_tile();
    auto finish_rows = [&] { store_lse<Shapes>(p, work, row, lane, softmax, o_scale); };
    if (Shapes::QStages > 1 && more_tiles) {
      smem.q_full[q_stage.index()].wait(q_stage.phase());
      wait_for_k();
      await_turn();
      qk_and_pv();
      pass_turn();
      finish_rows();
      warpgroup_wait<0>();
      finish_qk();
    } else {
      await_turn();
      pv();
      pass_turn();
      if constexpr (Shapes::QStages > 1) finish_rows();
      warpgroup_wait<0>();
    }
    finish_pv();
    if constexpr (Shapes::QStages == 1) finish_rows();  // no registers are left beside P V
    scale_o();
    store_output<Shapes>(p, work, warp, lane, o, smem.o + kWarpRows * D * warp);
    __syncwarp();
    release(smem.work_empty[work_stage.previous().index()]);
    if (Shapes::QStages == 1 && more_tiles) {
      smem.q_full[q_stage.index()].wait(q_stage.phase());
      wait_for_k();
      await_turn();
      qk();
      pass_turn();
      warpgroup_wait<0>();
      finish_qk();
    }
  }
  if (warpgroup == 0) await_turn();  // the last turn, which nobody else takes
  tma_store_wait<0>();               // the stores read shared memory until then
}

}  // namespace ringfa3
