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

// State and operations of one warpgroup; `run_unit` has the loop over blocks. The operations are
// lambdas and not methods: for a struct that holds the state nvcc emits other code.
template <class Shapes>
CUTE_DEVICE void consume_role_split(BackwardParams const& p, typename Shapes::SharedStorage& smem) {
  using QStage = Pipeline<Shapes::QStages>;
  using DoutStage = Pipeline<Shapes::DoutStages>;
  using DsStage = Pipeline<Shapes::DsStages>;
  using BlockStage = Pipeline<Shapes::BlockDepth>;
  using Element = typename Shapes::Element;
  using Shared = typename Shapes::SharedStorage;
  constexpr int M = Shapes::M, N = Shapes::N, D = Shapes::D;
  static_assert(M == 64 && N == 64 && Shapes::DqTilesEach == 2);
  int const thread = threadIdx.x % kWarpgroup;
  int const warpgroup = cutlass::canonical_warp_group_idx() - 1;  // uniform
  bool const has_dv = warpgroup == 0;                             // else dK
  int const lane = thread % kWarp;
  int const warp_key = thread / kWarp * 16;
  int const key = warp_key + lane / 4;  // and key + 8
  float const scale_log2 = p.args.softmax_scale * kLog2e;

  typename Shapes::MmaS mma_s;
  typename Shapes::MmaKV mma_kv;
  typename Shapes::MmaQ mma_q;
  // The stages of Q, and behind them those of dO.
  constexpr int kStages = Shapes::QStages + Shapes::DoutStages;
  static_assert(offsetof(Shared, dout) == offsetof(Shared, q) + sizeof(Shared::q));
  static_assert(offsetof(Shared, v) == offsetof(Shared, k) + sizeof(Shared::k));
  using SmemRows =
      decltype(tile_to_shape(typename Shapes::AtomK{}, Shape<Int<M>, Int<D>, Int<kStages>>{}));
  using SmemRowsT = decltype(tile_to_shape(
      typename Shapes::AtomMN{}, Shape<Int<D>, Int<M>, Int<kStages>>{}, Step<_2, _1, _3>{}));
  Tensor sKV = make_tensor(make_smem_ptr(smem.k + warpgroup * (N * D)), typename Shapes::SmemK{});
  Tensor sRows = make_tensor(make_smem_ptr(smem.q), SmemRows{});                // (M, D, S)
  Tensor sRowsT = make_tensor(make_smem_ptr(smem.q), SmemRowsT{});              // (D, M, S)
  Tensor sKt = make_tensor(make_smem_ptr(smem.k), typename Shapes::SmemKt{});   // (D, N)
  Tensor sDS = make_tensor(make_smem_ptr(smem.ds), typename Shapes::SmemDs{});  // (M, N, S)
  auto thread_s = mma_s.get_slice(thread);
  auto thread_kv = mma_kv.get_slice(thread);
  auto thread_q = mma_q.get_slice(thread);
  Tensor fKV = thread_s.partition_fragment_A(sKV);
  Tensor fRows = thread_s.partition_fragment_B(sRows);
  Tensor fRowsT = thread_kv.partition_fragment_B(sRowsT);
  Tensor fDS = thread_q.partition_fragment_A(sDS);
  auto key_columns = [&](int tile) {  // of K, for a dQ tile
    return thread_q.partition_fragment_B(
        local_tile(sKt, Shape<_64, Int<N>>{}, make_coord(2 * warpgroup + tile, _0{})));
  };
  Tensor fKt0 = key_columns(0), fKt1 = key_columns(1);
  Tensor sum = partition_fragment_C(mma_kv, Shape<_64, Int<D>>{});  // dV or dK (64, D)
  Tensor fS = make_tensor<Element>(Shape<Shape<_2, _2, _2>, _1, Int<M / 16>>{});  // P^T or dS^T
  auto* const to_ds = ds_address<Shapes>(smem, warp_key, lane);
  auto* const exchanged = reinterpret_cast<float4*>(smem.p) + thread;

  auto clear_sum = [&] { clear(sum); };
  auto await_block = [&](uint32_t count) {
    QStage const q_stage{count};
    smem.q_full[q_stage.index()].wait(q_stage.phase());
    RowBlock const& block = smem.blocks[BlockStage{count}.index()];
    if (block.flags & kForeign) {
      DoutStage const dout_stage{count};
      smem.dout_full[dout_stage.index()].wait(dout_stage.phase());
      clear_foreign<Shapes, M>(smem.q + q_stage.index() * M * D, block.rows);
      clear_foreign<Shapes, M>(smem.dout + dout_stage.index() * M * D, block.rows);
    }
  };
  auto await_dout = [&](uint32_t count) {
    DoutStage const dout_stage{count};
    smem.dout_full[dout_stage.index()].wait(dout_stage.phase());
  };
  auto q_index = [&](uint32_t count) { return int(QStage{count}.index()); };
  auto dout_index = [&](uint32_t count) { return Shapes::QStages + int(DoutStage{count}.index()); };
  // S^T becomes P^T, which the other warpgroup reads from shared memory. It has read P of the block
  // before: this warpgroup has used the dS that came of it.
  auto exchange_p = [&](uint32_t count, auto& s) {
    RowBlock const& block = smem.blocks[BlockStage{count}.index()];
    compute_p(s, RowValues<M>(smem.lse[QStage{count}.index()], lane), scale_log2);
    if (block.flags & kMasked) apply_mask<M>(s, BlockMask(block, key, lane));
    CUTE_UNROLL
    for (int n = 0; n < M / 2; n += 4) {
      exchanged[n / 4 * kWarpgroup] = make_float4(s(n), s(n + 1), s(n + 2), s(n + 3));
    }
    __syncwarp();
    if (lane == 0) smem.p_full.arrive();
    to_operand<Element>(s, fS);
  };
  // dP^T becomes dS^T. dS has two stages: the other warpgroup has read this one before it sent P of
  // this block.
  auto store_ds_of = [&](uint32_t count, auto& dp) {
    DsStage const ds_stage{count};
    RowBlock const& block = smem.blocks[BlockStage{count}.index()];
    smem.p_full.wait(Pipeline<1>{count}.phase());
    Tensor prob = make_tensor<float>(Shape<Int<M / 2>>{});
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
  };
  auto issue_s_or_dp = [&](uint32_t count, auto& s) {
    if (!has_dv) await_dout(count);
    int const stage = has_dv ? q_index(count) : dout_index(count);
    issue(mma_s, fKV, fRows(_, _, _, stage), s, false);
  };
  auto softmax_backward = [&](uint32_t count, auto& s) {
    warpgroup_wait<0>();
    warpgroup_fence_operand(s);
    if (has_dv) {
      exchange_p(count, s);
    } else {
      store_ds_of(count, s);
    }
  };
  // dV += P^T dO or dK += dS^T Q.
  auto issue_sum = [&](uint32_t count) {
    await_dout(count);
    int const stage = has_dv ? dout_index(count) : q_index(count);
    issue(mma_kv, fS, fRowsT(_, _, _, stage), sum, true);
  };
  auto issue_dq = [&](uint32_t count, auto const& fKt, auto& dq) {
    issue(mma_q, fDS(_, _, _, DsStage{count}.index()), fKt, dq, false);
  };
  auto add_or_send_dq = [&](uint32_t count, auto& dq, int tile) {
    warpgroup_fence_operand(dq);
    RowBlock const& block = smem.blocks[BlockStage{count}.index()];
    if (p.args.turns) {
      send_dq<Shapes>(smem, dq, block, count, tile, warpgroup);
    } else {
      add_dq<Shapes>(p.args.grid.dq, dq, block, tile, warpgroup);
    }
  };
  // dV or dK, and both dQ tiles of a block. Leaves the second dQ tile in flight.
  auto issue_sum_and_dq = [&](uint32_t count, auto& dq) {
    DsStage const ds_stage{count};
    Tensor dq0 = partition_fragment_C(mma_q, Shape<_64, _64>{});
    issue_sum(count);
    smem.ds_full[ds_stage.index()].wait(ds_stage.phase());
    issue_dq(count, fKt0, dq0);
    warpgroup_wait<1>();
    warpgroup_fence_operand(sum);
    if (lane == 0) smem.dout_empty[DoutStage{count}.index()].arrive();
    issue_dq(count, fKt1, dq);
    warpgroup_wait<1>();
    add_or_send_dq(count, dq0, 0);
  };
  auto release_block = [&](uint32_t count) {
    __syncwarp();  // all lanes have read the block
    if (lane == 0) {
      smem.q_empty[QStage{count}.index()].arrive();
      smem.block_done[BlockStage{count}.index()].arrive();
    }
  };
  // See `run_work_items`. No product is in flight at the start of an iteration.
  auto run_unit = [&](uint32_t unit_number, uint32_t count) {
    if (!has_dv) smem.v_full.wait(Pipeline<1>{unit_number}.phase());
    await_block(count);
    {
      Tensor s = partition_fragment_C(mma_s, Shape<_64, Int<M>>{});
      issue_s_or_dp(count, s);
      softmax_backward(count, s);
    }
    for (; !(smem.blocks[BlockStage{count}.index()].flags & kLastBlock); ++count) {
      Tensor s = partition_fragment_C(mma_s, Shape<_64, Int<M>>{});
      Tensor dq = partition_fragment_C(mma_q, Shape<_64, _64>{});
      issue_sum_and_dq(count, dq);
      await_block(count + 1);
      issue_s_or_dp(count + 1, s);
      warpgroup_wait<1>();
      add_or_send_dq(count, dq, 1);
      release_block(count);
      softmax_backward(count + 1, s);
    }
    if (lane == 0) smem.v_empty.arrive();
    Tensor dq = partition_fragment_C(mma_q, Shape<_64, _64>{});
    issue_sum_and_dq(count, dq);
    warpgroup_wait<0>();
    if (lane == 0) smem.k_empty.arrive();
    add_or_send_dq(count, dq, 1);
    release_block(count);
    return count + 1;
  };
  auto store_sums = [&](WorkUnit const& unit, int kv_head) {
    float const scale = has_dv ? 1.f : p.args.softmax_scale;
    CUTE_UNROLL
    for (int n = 0; n < D / 2; ++n) sum(n) *= scale;
    store_gradient<Shapes>(p.args, has_dv ? p.args.dv : p.args.dk, unit, kv_head, key, lane, sum);
  };
  uint32_t const blocks = run_work_items<Shapes>(smem, clear_sum, run_unit, store_sums);
  end_dq<Shapes>(smem, warpgroup, p.args.turns ? blocks : 0);
}

}  // namespace ringfa3
