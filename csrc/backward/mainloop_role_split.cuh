// Consumers of tiles of 64 keys: one warpgroup computes P and dV, the other dS and dK.
//
// Both warpgroups issue the same products on operands of their own: S^T = K Q^T and dV += P^T dO in
// the first, dP^T = V dO^T and dK += dS^T Q in the second. P^T goes from the first to the second
// through shared memory, in float32. Each computes half of the columns of dQ = dS K. There are no
// turns; for row block j:
//
//   warpgroup 0 | dV(j) | wait for dS(j) | dQ(j), S(j+1)  | P(j+1), sent           | dV(j+1) ...
//   warpgroup 1 | dK(j) | wait for dS(j) | dQ(j), dP(j+1) | wait for P(j+1), dS(j+1) | dK(j+1) ...
//
// Inside a warpgroup, adding dQ(j) to global memory overlaps S(j+1) or dP(j+1).
//
// Letters in shapes: M rows of a block of queries, N keys of a tile, D head dim, S stages.
#pragma once

#include "backward/mainloop_common.cuh"

namespace ringfa3 {

using namespace cute;

// The stages of Q and behind them those of dO, as one tensor (M, D, S), and transposed (D, M, S).
template <class Shapes>
struct RowStages {
  using Shared = typename Shapes::SharedStorage;
  static_assert(offsetof(Shared, dout) == offsetof(Shared, q) + sizeof(Shared::q));
  static constexpr int kStages = Shapes::QStages + Shapes::DoutStages;
  using Rows = decltype(tile_to_shape(typename Shapes::AtomK{},
                                      Shape<Int<Shapes::M>, Int<Shapes::D>, Int<kStages>>{}));
  using RowsT = decltype(tile_to_shape(typename Shapes::AtomMN{},
                                       Shape<Int<Shapes::D>, Int<Shapes::M>, Int<kStages>>{},
                                       Step<_2, _1, _3>{}));
};

// A operand of S^T or dP^T: K in the first warpgroup, V in the second, (64, D).
template <class Shapes>
CUTE_DEVICE auto key_or_value_operand(typename Shapes::SharedStorage& smem, int warpgroup,
                                      int thread) {
  using Shared = typename Shapes::SharedStorage;
  static_assert(offsetof(Shared, v) == offsetof(Shared, k) + sizeof(Shared::k));
  return typename Shapes::MmaS{}.get_slice(thread).partition_fragment_A(make_tensor(
      make_smem_ptr(smem.k + warpgroup * (Shapes::N * Shapes::D)), typename Shapes::SmemK{}));
}

template <class Shapes>
struct RoleSplitConsumer {
  using Element = typename Shapes::Element;
  using Shared = typename Shapes::SharedStorage;
  using MmaS = typename Shapes::MmaS;
  using MmaKV = typename Shapes::MmaKV;
  using MmaQ = typename Shapes::MmaQ;
  static constexpr int M = Shapes::M, N = Shapes::N, D = Shapes::D;
  static_assert(M == 64 && N == 64 && Shapes::DqTilesEach == 2);
  using QStage = Pipeline<Shapes::QStages>;
  using DoutStage = Pipeline<Shapes::DoutStages>;
  using DsStage = Pipeline<Shapes::DsStages>;
  using BlockStage = Pipeline<Shapes::BlockDepth>;
  using FragmentS = decltype(partition_fragment_C(MmaS{}, Shape<_64, Int<M>>{}));
  using FragmentKV = decltype(partition_fragment_C(MmaKV{}, Shape<_64, Int<D>>{}));
  using FragmentQ = decltype(partition_fragment_C(MmaQ{}, Shape<_64, _64>{}));
  using FragmentP = decltype(make_tensor<Element>(Shape<Shape<_2, _2, _2>, _1, Int<M / 16>>{}));

  BackwardParams const& p;
  Shared& smem;
  int const thread, warpgroup;
  bool const has_dv;  // the first warpgroup: P and dV; else dS and dK
  int const lane;
  int const warp_key;  // the warp's first key in the tile
  int const key;       // the thread holds this one and key + 8
  float const scale_log2;

  MmaS mma_s;
  MmaKV mma_kv;
  MmaQ mma_q;
  decltype(key_or_value_operand<Shapes>(smem, 0, 0)) fKV;                             // (64, D)
  decltype(row_operand<MmaS, typename RowStages<Shapes>::Rows>(smem.q, 0)) fRows;     // (M, D, S)
  decltype(row_operand<MmaKV, typename RowStages<Shapes>::RowsT>(smem.q, 0)) fRowsT;  // (D, M, S)
  decltype(ds_operand<Shapes>(smem.ds, 0, 0)) fDS;                                    // (M, N, S)
  decltype(key_columns_operand<Shapes>(smem.k, 0, 0)) fKt0, fKt1;                     // (64, N)
  FragmentKV sum;           // dV or dK (64, D)
  FragmentP fS;             // P^T or dS^T (64, M), the A operand of dV or dK
  Element* const to_ds;     // where the lane stores dS^T
  float4* const exchanged;  // P^T on its way; a thread of each warpgroup has the same elements

  CUTE_DEVICE RoleSplitConsumer(BackwardParams const& p, Shared& smem)
      : p(p),
        smem(smem),
        thread(threadIdx.x % kWarpgroup),
        warpgroup(cutlass::canonical_warp_group_idx() - 1),  // uniform
        has_dv(warpgroup == 0),
        lane(thread % kWarp),
        warp_key(thread / kWarp * 16),
        key(warp_key + lane / 4),
        scale_log2(p.args.softmax_scale * kLog2e),
        fKV(key_or_value_operand<Shapes>(smem, warpgroup, thread)),
        fRows(row_operand<MmaS, typename RowStages<Shapes>::Rows>(smem.q, thread)),
        fRowsT(row_operand<MmaKV, typename RowStages<Shapes>::RowsT>(smem.q, thread)),
        fDS(ds_operand<Shapes>(smem.ds, 0, thread)),
        fKt0(key_columns_operand<Shapes>(smem.k, 2 * warpgroup, thread)),
        fKt1(key_columns_operand<Shapes>(smem.k, 2 * warpgroup + 1, thread)),
        to_ds(ds_address<Shapes>(smem, warp_key, lane)),
        exchanged(reinterpret_cast<float4*>(smem.p) + thread) {}

  CUTE_DEVICE void run() {
    uint32_t const blocks = run_work_items<Shapes>(smem, *this);
    end_dq<Shapes>(smem, warpgroup, p.args.turns ? blocks : 0);
  }

  // See `run_work_items`. No product is in flight at the start of an iteration.
  __device__ uint32_t run_unit(uint32_t unit, uint32_t count) {
    if (!has_dv) smem.v_full.wait(Pipeline<1>{unit}.phase());
    await_block(count);
    {
      FragmentS s;
      issue_s_or_dp(count, s);
      softmax_backward(count, s);
    }
    for (; !(block_at(count).flags & kLastBlock); ++count) {
      FragmentS s;
      FragmentQ dq;
      issue_sum_and_dq(count, dq);
      await_block(count + 1);
      issue_s_or_dp(count + 1, s);
      warpgroup_wait<1>();
      add_or_send_dq(count, dq, 1);
      release_block(count);
      softmax_backward(count + 1, s);
    }
    if (lane == 0) smem.v_empty.arrive();
    FragmentQ dq;
    issue_sum_and_dq(count, dq);
    warpgroup_wait<0>();
    if (lane == 0) smem.k_empty.arrive();
    add_or_send_dq(count, dq, 1);
    release_block(count);
    return count + 1;
  }

  // dV or dK, and both dQ tiles of a block. Leaves the second dQ tile in flight.
  __device__ void issue_sum_and_dq(uint32_t count, FragmentQ& dq) {
    DsStage const ds_stage{count};
    FragmentQ dq0;
    issue_sum(count);
    smem.ds_full[ds_stage.index()].wait(ds_stage.phase());
    issue_dq(count, fKt0, dq0);
    warpgroup_wait<1>();
    warpgroup_fence_operand(sum);
    if (lane == 0) smem.dout_empty[DoutStage{count}.index()].arrive();
    issue_dq(count, fKt1, dq);
    warpgroup_wait<1>();
    add_or_send_dq(count, dq0, 0);
  }

  // S^T or dP^T, the only product in flight, becomes P^T or dS^T.
  __device__ void softmax_backward(uint32_t count, FragmentS& s) {
    warpgroup_wait<0>();
    warpgroup_fence_operand(s);
    if (has_dv) {
      exchange_p(count, s);
    } else {
      store_ds_of(count, s);
    }
  }

  // S^T becomes P^T, which the other warpgroup reads from shared memory. It has read the block
  // before: this block's turn came after dS of that one.
  __device__ void exchange_p(uint32_t count, FragmentS& s) {
    RowBlock const& block = block_at(count);
    compute_p(s, RowValues<M>(smem.lse[QStage{count}.index()], lane), scale_log2);
    if (block.flags & kMasked) apply_mask<M>(s, BlockMask(block, key, lane));
    CUTE_UNROLL
    for (int n = 0; n < M / 2; n += 4) {
      exchanged[n / 4 * kWarpgroup] = make_float4(s(n), s(n + 1), s(n + 2), s(n + 3));
    }
    __syncwarp();
    if (lane == 0) smem.p_full.arrive();
    to_operand<Element>(s, fS);
  }

  // dP^T becomes dS^T. dS has two stages: the other warpgroup has read this stage before it sent P
  // of this block.
  __device__ void store_ds_of(uint32_t count, FragmentS& dp) {
    DsStage const ds_stage{count};
    RowBlock const& block = block_at(count);
    smem.p_full.wait(Pipeline<1>{count}.phase());
    Tensor prob = make_tensor<float>(Shape<Int<M / 2>>{});  // P^T
    CUTE_UNROLL
    for (int n = 0; n < M / 2; n += 4) {
      float4 const x = exchanged[n / 4 * kWarpgroup];
      prob(n) = x.x, prob(n + 1) = x.y, prob(n + 2) = x.z, prob(n + 3) = x.w;
    }
    compute_ds(prob, dp, RowValues<M>(smem.delta[DoutStage{count}.index()], lane));
    if (block.flags & kMasked) apply_mask<M>(dp, BlockMask(block, key, lane));
    to_operand<Element>(dp, fS);
    store_ds<M>(fS, to_ds + ds_stage.index() * (M * N));
    cutlass::arch::fence_view_async_shared();
    __syncwarp();
    if (lane == 0) smem.ds_full[ds_stage.index()].arrive();
  }

  __device__ void issue_s_or_dp(uint32_t count, FragmentS& s) {
    if (!has_dv) await_dout(count);
    int const stage = has_dv ? q_index(count) : dout_index(count);
    issue(mma_s, fKV, fRows(_, _, _, stage), s, false);
  }

  // dV += P^T dO or dK += dS^T Q.
  __device__ void issue_sum(uint32_t count) {
    await_dout(count);
    int const stage = has_dv ? dout_index(count) : q_index(count);
    issue(mma_kv, fS, fRowsT(_, _, _, stage), sum, true);
  }

  template <class Columns>
  __device__ void issue_dq(uint32_t count, Columns const& fKt, FragmentQ& dq) {
    issue(mma_q, fDS(_, _, _, DsStage{count}.index()), fKt, dq, false);
  }

  __device__ void add_or_send_dq(uint32_t count, FragmentQ& dq, int tile) {
    warpgroup_fence_operand(dq);
    RowBlock const& block = block_at(count);
    if (p.args.turns) {
      send_dq<Shapes>(smem, dq, block, count, tile, warpgroup);
    } else {
      add_dq<Shapes>(p.args.grid.dq, dq, block, tile, warpgroup);
    }
  }

  __device__ void release_block(uint32_t count) {
    __syncwarp();  // all lanes have read the block
    if (lane == 0) {
      smem.q_empty[QStage{count}.index()].arrive();
      smem.block_done[BlockStage{count}.index()].arrive();
    }
  }

  // Waits for Q of a block, and zeroes rows of Q and dO that are a neighbour's.
  __device__ void await_block(uint32_t count) {
    QStage const q_stage{count};
    smem.q_full[q_stage.index()].wait(q_stage.phase());
    RowBlock const& block = block_at(count);
    if (block.flags & kForeign) {
      DoutStage const dout_stage{count};
      smem.dout_full[dout_stage.index()].wait(dout_stage.phase());
      clear_foreign<Shapes, M>(smem.q + q_stage.index() * M * D, block.rows);
      clear_foreign<Shapes, M>(smem.dout + dout_stage.index() * M * D, block.rows);
    }
  }

  __device__ void await_dout(uint32_t count) {
    DoutStage const stage{count};
    smem.dout_full[stage.index()].wait(stage.phase());
  }

  // Stages of Q and of dO in `RowStages`.
  __device__ int q_index(uint32_t count) { return QStage{count}.index(); }
  __device__ int dout_index(uint32_t count) { return Shapes::QStages + DoutStage{count}.index(); }

  __device__ RowBlock const& block_at(uint32_t count) {
    return smem.blocks[BlockStage{count}.index()];
  }

  __device__ void clear_sums() { clear(sum); }

  __device__ void store_sums(WorkUnit const& unit, int kv_head) {
    float const scale = has_dv ? 1.f : p.args.softmax_scale;
    CUTE_UNROLL
    for (int n = 0; n < D / 2; ++n) sum(n) *= scale;
    store_gradient<Shapes>(p.args, has_dv ? p.args.dv : p.args.dk, unit, kv_head, key, lane, sum);
  }
};

}  // namespace ringfa3
