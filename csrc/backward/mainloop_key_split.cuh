// Consumers of tiles of 128 keys: each warpgroup computes dK and dV of 64 keys.
//
// For row block j: S = K Q^T and dP = V dO^T, P and dS by the softmax backward, dV += P^T dO,
// dK += dS^T Q, dQ = dS K; S, dP, P and dS are held transposed. The warpgroups alternate in issuing
// products, so that each computes P and dS while the other's products run. dQ(j) reads the dS of
// both warpgroups, so it is issued one block later:
//
//   warpgroup 0 | dQ(j-1) dV(j) dK(j) S(j+1) dP(j+1) | P, dS of j+1
//   warpgroup 1 | P, dS of j                         | dQ(j-1) dV(j) dK(j) S(j+1) dP(j+1)
//
// Inside a warpgroup, handing dQ to its writer overlaps dV and dK, and computing P overlaps dP. LSE
// and D are added by the products of S and dP, see `BackwardShapes::Statistic`. P and dS stay in
// registers for dV and dK; only dQ reads dS from shared memory.
//
// Letters in shapes: M rows of a block of queries, N keys of a tile, D head dim, S stages.
#pragma once

#include "backward/mainloop_common.cuh"

namespace ringfa3 {

using namespace cute;

// A operand of S^T, and of dP^T: the warpgroup's 64 keys of K, or of V, (64, D).
template <class Shapes>
CUTE_DEVICE auto key_operand(typename Shapes::Element* keys, int warpgroup, int thread) {
  Tensor x = make_tensor(make_smem_ptr(keys), typename Shapes::SmemK{});  // (N, D)
  return typename Shapes::MmaS{}.get_slice(thread).partition_fragment_A(
      local_tile(x, Shape<_64, Int<Shapes::D>>{}, make_coord(warpgroup, _0{})));
}

// With dequantised operands, in place of `Ones`: (64, 16), three columns of the factor of the keys,
// then zeros.
template <class Shapes>
CUTE_DEVICE auto factor_tile(typename Shapes::SharedStorage& smem, int warpgroup) {
  return make_tensor(make_smem_ptr(smem.factor[warpgroup]), typename Shapes::SmemFactor{});
}

template <class Shapes>
struct KeySplitConsumer {
  using Element = typename Shapes::Element;
  using Shared = typename Shapes::SharedStorage;
  using MmaS = typename Shapes::MmaS;
  using MmaKV = typename Shapes::MmaK;  // and of dV
  using MmaQ = typename Shapes::MmaQ;
  static constexpr BackwardPolicy kPolicy = Shapes::kPolicy;
  static constexpr int M = Shapes::M, N = Shapes::N, D = Shapes::D;
  static_assert(Shapes::DV == D);
  // A warpgroup computes 64 rows of dQ (M, D), or with M = 64, half of the columns.
  static constexpr bool kRowHalves = M > 64;
  using QStage = PipelineState<Shapes::QStages>;
  using DoutStage = PipelineState<Shapes::DoutStages>;
  using DsStage = PipelineState<Shapes::DsStages>;
  using BlockStage = PipelineState<Shapes::BlockDepth>;
  using FragmentS = decltype(partition_fragment_C(MmaS{}, Shape<_64, Int<M>>{}));
  using FragmentKV = decltype(partition_fragment_C(MmaKV{}, Shape<_64, Int<D>>{}));
  using FragmentQ = decltype(partition_fragment_C(MmaQ{}, Shape<_64, Int<Shapes::kDqColumns>>{}));
  using FragmentP = decltype(make_tensor<Element>(Shape<Shape<_2, _2, _2>, _1, Int<M / 16>>{}));

  BackwardParams const& p;
  Shared& smem;
  int const thread, warpgroup, lane;
  int const warp_key;  // the warp's first key in the tile
  int const key;       // the thread holds this one and key + 8
  KeyFactor key_factor;

  MmaS mma_s;
  MmaKV mma_kv;
  MmaQ mma_q;
  typename Shapes::MmaStatistic mma_statistic;
  decltype(key_operand<Shapes>(smem.k, 0, 0)) fK, fV;                           // (64, D)
  decltype(row_operand<MmaS, typename Shapes::SmemQ>(smem.q, 0)) fQ;            // (M, D, S)
  decltype(row_operand<MmaS, typename Shapes::SmemDout>(smem.dout, 0)) fDO;     // (M, D, S)
  decltype(row_operand<MmaKV, typename Shapes::SmemQt>(smem.q, 0)) fQt;         // (D, M, S)
  decltype(row_operand<MmaKV, typename Shapes::SmemDoutT>(smem.dout, 0)) fDOt;  // (D, M, S)
  decltype(ds_operand<Shapes>(smem.ds, 0, 0)) fDS;                              // (64, N, S)
  decltype(key_columns_operand<Shapes>(smem.k, 0, 0)) fKt;                      // (64, N)
  decltype(statistic_operand<Shapes>(smem.lse, 0)) fLSE;                        // (M, 16, S)
  decltype(statistic_operand<Shapes>(smem.delta, 0)) fDelta;                    // (M, 16, S)
  FragmentKV dk, dv;                                                            // (64, D)
  Element* const to_ds;  // where the lane stores dS^T
  FragmentP fP;          // P^T (64, M), the A operand of dV
  FragmentP fOwnDS;      // dS^T (64, M), the A operand of dK
  // BlockFlags of the block whose P is computed next; where the policy looks ahead, those of the
  // block after it in the bits above.
  int flags = 0;

  CUTE_DEVICE KeySplitConsumer(BackwardParams const& p, Shared& smem)
      : p(p),
        smem(smem),
        thread(threadIdx.x % kWarpgroup),
        warpgroup(cutlass::canonical_warp_group_idx() - 1),  // uniform
        lane(thread % kWarp),
        warp_key(64 * warpgroup + thread / kWarp * 16),
        key(warp_key + lane / 4),
        key_factor{1.f, p.args.softmax_scale * kLog2e, 0.f},
        fK(key_operand<Shapes>(smem.k, warpgroup, thread)),
        fV(key_operand<Shapes>(smem.v, warpgroup, thread)),
        fQ(row_operand<MmaS, typename Shapes::SmemQ>(smem.q, thread)),
        fDO(row_operand<MmaS, typename Shapes::SmemDout>(smem.dout, thread)),
        fQt(row_operand<MmaKV, typename Shapes::SmemQt>(smem.q, thread)),
        fDOt(row_operand<MmaKV, typename Shapes::SmemDoutT>(smem.dout, thread)),
        fDS(ds_operand<Shapes>(smem.ds, kRowHalves ? warpgroup : 0, thread)),
        fKt(key_columns_operand<Shapes>(smem.k, kRowHalves ? 0 : warpgroup, thread)),
        fLSE(statistic_operand<Shapes>(smem.lse, thread)),
        fDelta(statistic_operand<Shapes>(smem.delta, thread)),
        to_ds(ds_address<Shapes>(smem, warp_key, lane)) {}

  CUTE_DEVICE void run() {
    if (warpgroup == 1) pass_order();
    run_work_items<Shapes>(p.args, smem, *this);
    if (warpgroup == 0) wait_for_order();  // for the last pass, which nobody else waits for
  }

  // See `run_work_items`. No product is in flight at the start of an iteration.
  __device__ uint32_t run_unit(uint32_t unit, uint32_t count) {
    uint32_t const begin = count;
    if constexpr (Shapes::Dequantised) store_factor();
    {
      FragmentS s, dp;
      flags = flags_of(count);
      if (flags & kTailRows) zero_tail_of_block(count);
      await_q(count);
      smem.v_full.wait(PipelineState<1>{unit}.phase());
      wait_for_order();
      issue_s(count, s);
      await_dout(count);
      issue_dp(count, dp);
      pass_order();
      look_ahead(count + 1);
      softmax_backward(count, s, dp);
    }
    for (; !(flags & kLastBlock); ++count) next_block(count == begin, count);
    if (lane == 0) smem.v_empty.arrive();
    return finish_unit(begin, count);
  }

  // dV and dK of block `count`, dQ of the block before unless it is the `first`, S and dP of the
  // block after.
  __device__ void next_block(bool first, uint32_t count) {
    FragmentS s, dp;
    next_flags(count + 1);
    if (flags & kTailRows) zero_tail_of_block(count + 1);
    wait_for_order();
    FragmentQ dq;
    if (!first) issue_dq(count - 1, dq);
    issue_dv(count);
    issue_dk(count);
    if constexpr (kPolicy.awaits_q_early) await_q(count + 1);
    warpgroup_wait<2>();
    if (!first) send(count - 1, dq);
    warpgroup_wait<1>();
    finish_dv(count);
    if constexpr (!kPolicy.awaits_q_early) await_q(count + 1);
    issue_s(count + 1, s);
    warpgroup_wait<1>();
    finish_dk(count);
    await_dout(count + 1);
    issue_dp(count + 1, dp);
    pass_order();
    look_ahead(count + 2);
    softmax_backward(count + 1, s, dp);
  }

  // dV, dK and dQ of the unit's last block, and dQ of the block before it. Returns the next block.
  CUTE_DEVICE uint32_t finish_unit(uint32_t begin, uint32_t count) {
    FragmentQ dq;
    wait_for_order();
    if (count > begin) {
      issue_dv(count);
      issue_dq(count - 1, dq);
      issue_dk(count);
      pass_order();
      warpgroup_wait<1>();
      finish_dv(count);
      send(count - 1, dq);
      warpgroup_wait<0>();
    } else {
      issue_dv(count);
      issue_dk(count);
      pass_order();
      warpgroup_wait<0>();
      finish_dv(count);
    }
    finish_dk(count);
    issue_dq(count, dq);
    warpgroup_wait<0>();
    if (lane == 0) smem.k_empty.arrive();
    send(count, dq);
    return count + 1;
  }

  // S^T - LSE and dP^T - D, the last two products in flight, become P^T = exp2(scale * (S^T - LSE))
  // and dS^T = P^T (dP^T - D), both over the factor of the keys. The first product is S^T - LSE
  // times the factor.
  __device__ void softmax_backward(uint32_t count, FragmentS& s, FragmentS& dp) {
    DsStage const ds_stage{count};
    bool const masked = flags & kMasked;
    BlockMask mask;
    if (masked) mask = BlockMask(block_at(count), key, lane);
    warpgroup_wait<1>();
    warpgroup_fence_operand(s);
    CUTE_UNROLL
    for (int n = 0; n < M / 2; ++n) {
      s(n) = probability<Shapes>(s(n) * key_factor.scale_log2, key_factor);
    }
    if (masked) apply_mask<M>(s, mask);
    to_operand<Element>(s, fP);
    warpgroup_wait<0>();
    warpgroup_fence_operand(dp);
    CUTE_UNROLL
    for (int n = 0; n < M / 2; ++n) dp(n) *= s(n);
    if (masked) apply_mask<M>(dp, mask);
    to_operand<Element>(dp, fOwnDS);
    smem.ds_empty[ds_stage.index()].wait(ds_stage.phase() ^ 1);
    store_ds<M>(fOwnDS, to_ds + ds_stage.index() * (M * N));
    __syncwarp();
    if (lane == 0) smem.ds_full[ds_stage.index()].arrive();
  }

  __device__ void issue_s(uint32_t count, FragmentS& s) {
    QStage const stage{count};
    auto const lse = fLSE(_, _, _, stage.index());
    if constexpr (Shapes::Dequantised) {
      MmaS mma;
      auto const factor =
          mma.get_slice(thread).partition_fragment_A(factor_tile<Shapes>(smem, warpgroup));
      issue_sum(mma, factor, lse, mma_s, fK, fQ(_, _, _, stage.index()), s);
    } else {
      issue_sum(mma_statistic, Ones(lane).words, lse, mma_s, fK, fQ(_, _, _, stage.index()), s);
    }
  }

  // Before the first S of a work unit; `wait_for_order` precedes that. The last S of the unit
  // before has ended in all warps, since they have met in the `wait_for_order` of `finish_unit`.
  __device__ void store_factor() {
    Tensor tile = factor_tile<Shapes>(smem, warpgroup);
    int const row = thread % 64, column = thread / 64 * 8;
    CUTE_UNROLL
    for (int n = 0; n < 8; ++n) {
      tile(row, column + n) = Element(column + n < 3 ? key_factor.factor : 0.f);
    }
    cutlass::arch::fence_view_async_shared();
  }

  // Descriptors of V are computed anew, or registers spill; for K, too, it would cost more than it
  // saves.
  __device__ void issue_dp(uint32_t count, FragmentS& dp) {
    DoutStage const stage{count};
    issue_sum(mma_statistic, Ones(lane).words, fDelta(_, _, _, stage.index()), mma_s, opaque(fV),
              fDO(_, _, _, stage.index()), dp);
  }

  __device__ void issue_dv(uint32_t count) {
    issue(mma_kv, fP, fDOt(_, _, _, DoutStage{count}.index()), dv, true);
  }

  __device__ void issue_dk(uint32_t count) {
    issue(mma_kv, fOwnDS, fQt(_, _, _, QStage{count}.index()), dk, true);
  }

  // Waits for Q and LSE of a block.
  __device__ void await_q(uint32_t count) {
    QStage const stage{count};
    smem.q_full[stage.index()].wait(stage.phase());
  }

  // Waits for dO and D of a block.
  __device__ void await_dout(uint32_t count) {
    DoutStage const stage{count};
    smem.dout_full[stage.index()].wait(stage.phase());
  }

  __device__ void issue_dq(uint32_t count, FragmentQ& dq) {
    DsStage const stage{count};
    smem.ds_full[stage.index()].wait(stage.phase());
    cutlass::arch::fence_view_async_shared();  // after the stores of both warpgroups
    issue(mma_q, fDS(_, _, _, stage.index()), fKt, dq, false);
  }

  __device__ void finish_dv(uint32_t count) {
    warpgroup_fence_operand(dv);
    if (lane == 0) smem.dout_empty[DoutStage{count}.index()].arrive();
  }

  __device__ void finish_dk(uint32_t count) {
    warpgroup_fence_operand(dk);
    if (lane == 0) smem.q_empty[QStage{count}.index()].arrive();
  }

  __device__ void send(uint32_t count, FragmentQ& dq) {
    warpgroup_fence_operand(dq);
    if (lane == 0) smem.ds_empty[DsStage{count}.index()].arrive();
    send_dq<Shapes>(smem, dq, count, warpgroup);
  }

  __device__ typename Shapes::Block const& block_at(uint32_t count) {
    return smem.blocks[BlockStage{count}.index()];
  }

  __device__ int flags_of(uint32_t count) {
    BlockStage const stage{count};
    smem.block_ready[stage.index()].wait(stage.phase());
    return block_at(count).flags;
  }

  __device__ void look_ahead(uint32_t count) {
    if constexpr (kPolicy.looks_ahead) {
      if (!(flags & kLastBlock)) flags |= flags_of(count) << kBlockFlagBits;
    }
  }

  __device__ void next_flags(uint32_t count) {
    flags = kPolicy.looks_ahead ? flags >> kBlockFlagBits : flags_of(count);
  }

  // Both warpgroups, neither between its `wait_for_order` and `pass_order`: zeroes rows of Q and dO
  // that belong to the next segment.
  __device__ void zero_tail_of_block(uint32_t count) {
    await_q(count);
    await_dout(count);
    int const rows = block_at(count).rows;
    zero_tail_rows<Shapes, M>(smem.q + QStage{count}.index() * M * D, rows);
    zero_tail_rows<Shapes, M>(smem.dout + DoutStage{count}.index() * M * D, rows);
  }

  __device__ void clear_sums() {
    clear(dk);
    clear(dv);
  }

  __device__ void store_sums(WorkUnit const& unit, int kv_head) {
    finish_gradient<Shapes>(dk, p.args.softmax_scale * key_factor.factor, lane);
    if constexpr (Shapes::Dequantised) {
      CUTE_UNROLL
      for (int n = 0; n < D / 2; ++n) dv(n) *= key_factor.factor;
    }
    store_gradient<Shapes>(p.args, p.args.dk, unit, kv_head, key, lane, dk);
    store_gradient<Shapes>(p.args, p.args.dv, unit, kv_head, key, lane, dv);
  }

  __device__ void wait_for_order() {
    cutlass::arch::NamedBarrier::sync(Shapes::Consumers * kWarpgroup,
                                      kWarpgroupBarrier + warpgroup);
  }

  __device__ void pass_order() {
    cutlass::arch::NamedBarrier::arrive(Shapes::Consumers * kWarpgroup,
                                        kWarpgroupBarrier + 1 - warpgroup);
  }
};

}  // namespace ringfa3
