// Consumers of a tile of 128 keys that a pair of CTAs shares. Each CTA has 64 of the keys: one
// warpgroup computes P and dV, the other dS and dK.
//
// Both warpgroups issue the same products on operands of their own: S^T = K Q^T and dV += P^T dO in
// the first, dP^T = V dO^T and dK += dS^T Q in the second. P^T goes from the first to the second
// through shared memory, in float32. dS goes to both CTAs. Each warpgroup computes a quarter of the
// columns of dQ = dS K, over all keys of the tile: the CTA holds these columns of the peer's K,
// too. The CTAs visit the same row blocks; for row block j:
//
//   warpgroup 0 | dV(j), adding dQ(j-1) | S(j+1), dQ(j)  | P(j+1), sent to warpgroup 1
//   warpgroup 1 | dK(j), adding dQ(j-1) | dQ(j), dP(j+1) | dS(j+1), sent to 0 and the peer
//
// S(j+1) precedes dQ(j), so that P(j+1) is computed concurrently with dQ and dP. It follows dV(j),
// because dO has one stage: the load of dO(j+1) awaits dV(j), and dP(j+1) awaits the load. dQ is
// added to global memory during dV and dK of the next block. A stage of Q or dO is freed as soon as
// its last product has ended, because the loads are on the critical path.
//
// P has one stage and dS has two. No barrier signals that they are free, because it follows:
//
//   * Warpgroup 0 sends P(j+1) after its dQ(j) has ended, which waited for dS(j) of this CTA.
//   * Warpgroup 1 stores dS(j+1) after its own dQ(j) has ended, and after P(j+1) has come. So when
//     dS(j+1) of the peer is here, both warpgroups of the peer have read their dS(j), and the copy
//     of dS(j) to the peer has ended.
//   * Warpgroup 1 stores dS(j+2) after its dQ(j+1) has ended, which waited for the peer's dS(j+1).
//
// Letters in shapes: M rows of a block of queries, N keys of a CTA, D head dim of Q and K, DV head
// dim of V and O, S stages.
#pragma once

#include "backward/mainloop_common.cuh"
#include "hopper/cluster.cuh"

namespace ringfa3 {

using namespace cute;

// A operand of S^T or dP^T: K (64, D) or V (64, DV).
template <class Shapes, class Layout>
CUTE_DEVICE auto keys_operand(typename Shapes::Element* keys, int thread) {
  return typename Shapes::MmaS{}.get_slice(thread).partition_fragment_A(
      make_tensor(make_smem_ptr(keys), Layout{}));
}

// One thread: hands dS of every block to the consumers, and a copy to those of the peer.
template <class Shapes>
CUTE_DEVICE void send_ds(typename Shapes::SharedStorage& smem) {
  constexpr int kStageElements = Shapes::M * Shapes::N;
  constexpr int kStageBytes = kStageElements * sizeof(typename Shapes::Element);
  uint32_t const peer = block_rank_in_cluster() ^ 1;
  for (uint32_t count = 0;; ++count) {
    PipelineState<Shapes::BlockDepth> const block{count};
    PipelineState<Shapes::DsStages> const stage{count};
    smem.block_ready[block.index()].wait(block.phase());
    bool const ends = smem.blocks[block.index()].head < 0;
    smem.block_done[block.index()].arrive();
    if (ends) return;
    smem.peer_ds_full[stage.index()].arrive_and_expect_tx(kStageBytes);  // for the peer's dS
    smem.ds_stored[stage.index()].wait(stage.phase());
    cutlass::arch::fence_view_async_shared();  // after the stores of a warpgroup
    smem.ds_full[stage.index()].arrive();
    int const offset = stage.index() * kStageElements;
    copy_to_cta(peer, smem.peer_ds + offset, smem.ds + offset, kStageBytes,
                smem.peer_ds_full[stage.index()]);
  }
}

// The first warpgroup has P and dV, the second dS and dK.
template <class Shapes, bool HasDv>
struct RoleSplitConsumer {
  using Element = typename Shapes::Element;
  using Shared = typename Shapes::SharedStorage;
  using MmaS = typename Shapes::MmaS;
  using MmaKV = conditional_t<HasDv, typename Shapes::MmaV, typename Shapes::MmaK>;
  using MmaQ = typename Shapes::MmaQ;
  static constexpr int M = Shapes::M, N = Shapes::N, D = Shapes::D, DV = Shapes::DV;
  static constexpr int kWarpgroupIndex = HasDv ? 0 : 1;
  static_assert(M == 64 && N == 64 && Shapes::Ctas == 2 && Shapes::DqTilesEach == 1);
  using QStage = PipelineState<Shapes::QStages>;
  using DoutStage = PipelineState<Shapes::DoutStages>;
  using DsStage = PipelineState<Shapes::DsStages>;
  using BlockStage = PipelineState<Shapes::BlockDepth>;
  using Keys = conditional_t<HasDv, typename Shapes::SmemK, typename Shapes::SmemV>;
  // B operands of S^T or dP^T, and of dV or dK
  using Rows = conditional_t<HasDv, typename Shapes::SmemQ, typename Shapes::SmemDout>;
  using RowsT = conditional_t<HasDv, typename Shapes::SmemDoutT, typename Shapes::SmemQt>;
  using PeerKt = typename Shapes::SmemPeerKt;
  using FragmentS = decltype(partition_fragment_C(MmaS{}, Shape<_64, Int<M>>{}));
  using FragmentKV = decltype(partition_fragment_C(MmaKV{}, Shape<_64, Int<HasDv ? DV : D>>{}));
  using FragmentQ = decltype(partition_fragment_C(MmaQ{}, Shape<_64, Int<Shapes::kDqColumns>>{}));
  using FragmentP = decltype(make_tensor<Element>(Shape<Shape<_2, _2, _2>, _1, Int<M / 16>>{}));

  BackwardParams const& p;
  Shared& smem;
  int const thread;
  int const lane;
  int const warp_key;  // the warp's first key of the CTA
  int const key;       // the thread holds this one and key + 8
  KeyFactor key_factor;

  MmaS mma_s;
  MmaKV mma_kv;
  MmaQ mma_q;
  decltype(keys_operand<Shapes, Keys>(smem.k, 0)) fKeys;     // K (64, D) or V (64, DV)
  decltype(row_operand<MmaS, Rows>(smem.q, 0)) fRows;        // Q (M, D, S) or dO (M, DV, S)
  decltype(row_operand<MmaKV, RowsT>(smem.q, 0)) fRowsT;     // dO (DV, M, S) or Q (D, M, S)
  decltype(ds_operand<Shapes>(smem.ds, 0, 0)) fDS, fPeerDS;  // (M, N, S)
  decltype(key_columns_operand<Shapes>(smem.k, 0, 0)) fKt;   // (kDqColumns, N)
  decltype(key_columns_operand<Shapes, PeerKt>(smem.peer_k, 0, 0)) fPeerKt;  // (kDqColumns, N)
  FragmentKV sum;           // dV (64, DV) or dK (64, D)
  FragmentQ dq;             // a dQ tile, added to global memory a block later
  int flags = 0;            // BlockFlags of the block of S or dP
  FragmentP fS;             // P^T or dS^T (64, M), the A operand of dV or dK
  Element* const to_ds;     // where the lane stores dS^T
  float4* const exchanged;  // P^T on its way; a thread of each warpgroup has the same elements

  CUTE_DEVICE RoleSplitConsumer(BackwardParams const& p, Shared& smem)
      : p(p),
        smem(smem),
        thread(threadIdx.x % kWarpgroup),
        lane(thread % kWarp),
        warp_key(thread / kWarp * 16),
        key(warp_key + lane / 4),
        key_factor{1.f, p.args.softmax_scale * kLog2e, 0.f},
        fKeys(keys_operand<Shapes, Keys>(HasDv ? smem.k : smem.v, thread)),
        fRows(row_operand<MmaS, Rows>(HasDv ? smem.q : smem.dout, thread)),
        fRowsT(row_operand<MmaKV, RowsT>(HasDv ? smem.dout : smem.q, thread)),
        fDS(ds_operand<Shapes>(smem.ds, 0, thread)),
        fPeerDS(ds_operand<Shapes>(smem.peer_ds, 0, thread)),
        fKt(key_columns_operand<Shapes>(smem.k, dq_tile(), thread)),
        fPeerKt(key_columns_operand<Shapes, PeerKt>(smem.peer_k, kWarpgroupIndex, thread)),
        to_ds(ds_address<Shapes>(smem, warp_key, lane)),
        exchanged(reinterpret_cast<float4*>(smem.p) + thread) {}

  CUTE_DEVICE void run() { run_work_items<Shapes>(p.args, smem, *this); }

  // See `run_work_items`. No product is in flight at the start of an iteration.
  __device__ uint32_t run_unit(uint32_t unit, uint32_t count) {
    if constexpr (!HasDv) smem.v_full.wait(PipelineState<1>{unit}.phase());
    uint32_t const begin = count;
    {
      FragmentS s;
      issue_s_or_dp(count, s);
      softmax_backward<0>(count, s);
    }
    for (; !(flags & kLastBlock); ++count) {
      FragmentS s;
      add_to_sum(count, begin);
      if constexpr (HasDv) {
        issue_s_or_dp(count + 1, s);
        issue_dq(count);
        softmax_backward<2>(count + 1, s);
      } else {
        issue_dq(count);
        issue_s_or_dp(count + 1, s);
        softmax_backward<0>(count + 1, s);
      }
    }
    if constexpr (!HasDv) {
      if (lane == 0) smem.v_empty.arrive();
    }
    add_to_sum(count, begin);
    issue_dq(count);
    warpgroup_wait<0>();
    if (lane == 0) smem.k_empty.arrive();
    add_dq_tile(count);
    return count + 1;
  }

  // dV += P^T dO or dK += dS^T Q. Meanwhile dQ of the block before is added to global memory. If
  // other tiles must add to it first, dO or Q is released before the wait for them. A unit begins
  // with block `begin`.
  __device__ void add_to_sum(uint32_t count, uint32_t begin) {
    bool const adds = count != begin;
    issue_sum(count);
    bool const early = adds && may_add(count - 1);  // warps may differ
    if (early) add_dq_tile(count - 1);
    warpgroup_wait<0>();
    warpgroup_fence_operand(sum);
    if (lane == 0) {
      (HasDv ? smem.dout_empty[DoutStage{count}.index()] : smem.q_empty[QStage{count}.index()])
          .arrive();
    }
    if (adds && !early) add_dq_tile(count - 1);
  }

  // Whether dQ of a block may be added to global memory without a wait.
  __device__ bool may_add(uint32_t count) {
    return !p.args.dq_semaphore || smem.dq_granted.test_wait(PipelineState<1>{count}.phase());
  }

  // S^T or dP^T of a block, of which it reads the flags.
  __device__ void issue_s_or_dp(uint32_t count, FragmentS& s) {
    if constexpr (HasDv) {
      QStage const stage{count};
      smem.q_full[stage.index()].wait(stage.phase());
      flags = block_at(count).flags;
    } else {
      DoutStage const stage{count};
      smem.dout_full[stage.index()].wait(stage.phase());
      flags = block_at(count).flags;
      zero_tail_of_dout(count);
    }
    int const stage = HasDv ? QStage{count}.index() : DoutStage{count}.index();
    issue(mma_s, opaque(fKeys), opaque(fRows)(_, _, _, stage), s, false);
  }

  // dV += P^T dO or dK += dS^T Q. The next segment's rows of Q matter to dK alone: S has ended.
  __device__ void issue_sum(uint32_t count) {
    if constexpr (HasDv) {
      DoutStage const stage{count};
      smem.dout_full[stage.index()].wait(stage.phase());
      zero_tail_of_dout(count);
    } else if (flags & kTailRows) {
      zero_tail_rows<M, D, kWarpgroup>(smem.q + QStage{count}.index() * M * D, block_at(count).rows,
                                       thread, kWarpgroupBarrier + kWarpgroupIndex);
    }
    int const stage = HasDv ? DoutStage{count}.index() : QStage{count}.index();
    issue(mma_kv, fS, opaque(fRowsT)(_, _, _, stage), sum, true);
  }

  // Both warpgroups, each once for a block: zeroes rows of dO that belong to the next segment.
  __device__ void zero_tail_of_dout(uint32_t count) {
    if (flags & kTailRows) {
      zero_tail_rows<Shapes, M, DV>(smem.dout + DoutStage{count}.index() * M * DV,
                                    block_at(count).rows);
    }
  }

  // Two groups: dQ = dS K over the keys of this CTA, then over the peer's.
  __device__ void issue_dq(uint32_t count) {
    DsStage const stage{count};
    mma_q.accumulate_ = GMMA::ScaleOut::Zero;
    smem.ds_full[stage.index()].wait(stage.phase());
    warpgroup_fence_operand(dq);
    warpgroup_arrive();
    add_to_dq(opaque(fDS)(_, _, _, stage.index()), opaque(fKt));
    warpgroup_commit_batch();
    smem.peer_ds_full[stage.index()].wait(stage.phase());
    warpgroup_arrive();
    add_to_dq(opaque(fPeerDS)(_, _, _, stage.index()), opaque(fPeerKt));
    warpgroup_commit_batch();
  }

  template <class A, class B>
  __device__ void add_to_dq(A const& ds, B const& keys) {
    CUTE_UNROLL
    for (int k = 0; k < size<2>(ds); ++k) {
      gemm(mma_q, ds(_, _, k), keys(_, _, k), dq);
      mma_q.accumulate_ = GMMA::ScaleOut::One;
    }
  }

  // S^T or dP^T ends and becomes P^T or dS^T; dQ ends, too. After S^T or dP^T, `InFlight` groups
  // have been issued.
  template <int InFlight>
  __device__ void softmax_backward(uint32_t count, FragmentS& s) {
    QStage const stage{count};  // LSE and D come with Q
    if constexpr (!HasDv) smem.q_full[stage.index()].wait(stage.phase());
    RowValues<M> const of_rows(HasDv ? smem.lse[stage.index()] : smem.delta[stage.index()], lane);
    warpgroup_wait<InFlight>();
    warpgroup_fence_operand(s);
    if constexpr (HasDv) {
      send_p(count, s, of_rows);
    } else {
      store_ds_of(count, s, of_rows);
    }
  }

  // S^T becomes P^T, for the other warpgroup and as the operand of dV. The other warpgroup has read
  // the block before: its dS has come. dQ ends before P^T is stored.
  __device__ void send_p(uint32_t count, FragmentS& s, RowValues<M> const& lse) {
    compute_p<Shapes>(s, lse, key_factor);
    if (flags & kMasked) apply_mask<M>(s, BlockMask(block_at(count), key, lane));
    warpgroup_wait<0>();
    CUTE_UNROLL
    for (int n = 0; n < M / 2; n += 4) {
      exchanged[n / 4 * kWarpgroup] = make_float4(s(n), s(n + 1), s(n + 2), s(n + 3));
    }
    __syncwarp();
    if (lane == 0) {
      smem.p_full.arrive();
      smem.q_empty[QStage{count}.index()].arrive();
    }
    to_operand<Element>(s, fS);
  }

  // dP^T becomes dS^T. `send_ds` issues the proxy fence.
  __device__ void store_ds_of(uint32_t count, FragmentS& dp, RowValues<M> const& delta) {
    if (lane == 0) smem.dout_empty[DoutStage{count}.index()].arrive();
    int const stage = DsStage{count}.index();
    smem.p_full.wait(PipelineState<1>{count}.phase());
    Tensor prob = make_tensor<float>(Shape<Int<M / 2>>{});  // P^T
    CUTE_UNROLL
    for (int n = 0; n < M / 2; n += 4) {
      float4 const x = exchanged[n / 4 * kWarpgroup];
      prob(n) = x.x, prob(n + 1) = x.y, prob(n + 2) = x.z, prob(n + 3) = x.w;
    }
    compute_ds(prob, dp, delta);
    if (flags & kMasked) apply_mask<M>(dp, BlockMask(block_at(count), key, lane));
    to_operand<Element>(dp, fS);
    store_ds<M>(fS, to_ds + stage * (M * N));
    __syncwarp();
    if (lane == 0) smem.ds_stored[stage].arrive();
  }

  // Adds dQ of a block to global memory, and releases the block.
  __device__ void add_dq_tile(uint32_t count) {
    warpgroup_fence_operand(dq);
    RowBlock const& block = block_at(count);
    if (p.args.dq_semaphore) smem.dq_granted.wait(PipelineState<1>{count}.phase());
    add_dq<Shapes>(p.args.padded.dq, dq, block.target * Shapes::DqTiles + dq_tile());
    __syncwarp();  // all lanes have read the block, and added
    if (lane == 0) {
      smem.block_done[BlockStage{count}.index()].arrive();
      if (p.args.dq_semaphore) smem.dq_added.arrive();
    }
  }

  // The warpgroup's dQ tile of a block, and its columns of K.
  __device__ int dq_tile() const { return first_dq_tile() + kWarpgroupIndex; }

  __device__ typename Shapes::Block const& block_at(uint32_t count) {
    return smem.blocks[BlockStage{count}.index()];
  }

  __device__ void clear_sums() { clear(sum); }

  __device__ void store_sums(WorkUnit const& unit, int kv_head) {
    if constexpr (!HasDv) {
      finish_gradient<Shapes>(sum, p.args.softmax_scale * key_factor.factor, lane);
    } else if constexpr (Shapes::Dequantised) {
      CUTE_UNROLL
      for (int n = 0; n < size(sum); ++n) sum(n) *= key_factor.factor;
    }
    store_gradient<Shapes>(p.args, HasDv ? p.args.dv : p.args.dk, unit, kv_head,
                           N * block_rank_in_cluster() + key, lane, sum);
  }
};

}  // namespace ringfa3
