// Consumers of tiles of 128 keys: a warpgroup for each half of the keys, with its dK and dV.
//
// Letters in shapes: M rows of a block of queries, N keys of a tile, D head dim, S stages.
#pragma once

#include "backward_consumer.cuh"

namespace ringfa3 {

using namespace cute;

// P^T and dS^T stay in the registers in which S^T and dP^T have come.
template <class Traits>
CUTE_DEVICE void consume_halves(BackwardParams const& p, typename Traits::SharedStorage& smem) {
  using Element = typename Traits::Element;
  constexpr int M = Traits::M, N = Traits::N, D = Traits::D;
  int const thread = threadIdx.x % kWarpgroup;
  int const warpgroup = cutlass::canonical_warp_group_idx() - 1;  // known to be uniform
  int const lane = thread % kWarp;
  int const warp_key = 64 * warpgroup + thread / kWarp * 16;
  int const key = warp_key + lane / 4;  // and key + 8
  float const scale_log2 = p.args.softmax_scale * kLog2e;

  typename Traits::MmaS mma_s;
  typename Traits::MmaKV mma_kv;
  typename Traits::MmaQ mma_q;
  Tensor sK = make_tensor(make_smem_ptr(smem.k), typename Traits::SmemK{});           // (N, D)
  Tensor sV = make_tensor(make_smem_ptr(smem.v), typename Traits::SmemK{});           // (N, D)
  Tensor sQ = make_tensor(make_smem_ptr(smem.q), typename Traits::SmemQ{});           // (M, D, S)
  Tensor sDO = make_tensor(make_smem_ptr(smem.dout), typename Traits::SmemDout{});    // (M, D, S)
  Tensor sKt = make_tensor(make_smem_ptr(smem.k), typename Traits::SmemKt{});         // (D, N)
  Tensor sQt = make_tensor(make_smem_ptr(smem.q), typename Traits::SmemQt{});         // (D, M, S)
  Tensor sDOt = make_tensor(make_smem_ptr(smem.dout), typename Traits::SmemDoutT{});  // (D, M, S)
  Tensor sDS = make_tensor(make_smem_ptr(smem.ds), typename Traits::SmemDs{});        // (M, N, S)
  // Of dQ (M, D) a warpgroup computes 64 rows, or where there are no more, half of the columns.
  constexpr bool kRowHalves = M > 64;
  auto thread_s = mma_s.get_slice(thread);
  auto thread_kv = mma_kv.get_slice(thread);
  auto thread_q = mma_q.get_slice(thread);
  Tensor fK = thread_s.partition_fragment_A(
      local_tile(sK, Shape<_64, Int<D>>{}, make_coord(warpgroup, _0{})));
  Tensor fV = thread_s.partition_fragment_A(
      local_tile(sV, Shape<_64, Int<D>>{}, make_coord(warpgroup, _0{})));
  Tensor fQ = thread_s.partition_fragment_B(sQ);
  Tensor fDO = thread_s.partition_fragment_B(sDO);
  Tensor fQt = thread_kv.partition_fragment_B(sQt);
  Tensor fDOt = thread_kv.partition_fragment_B(sDOt);
  Tensor fDS = thread_q.partition_fragment_A(
      local_tile(sDS, Shape<_64, Int<N>>{}, make_coord(kRowHalves ? warpgroup : 0, _0{}, _)));
  Tensor fKt = thread_q.partition_fragment_B(
      local_tile(sKt, Shape<_64, Int<N>>{}, make_coord(kRowHalves ? 0 : warpgroup, _0{})));
  Tensor dk = partition_fragment_C(mma_kv, Shape<_64, Int<D>>{});
  Tensor dv = partition_fragment_C(mma_kv, Shape<_64, Int<D>>{});

  auto clear_sums = [&] {
    clear(dk);
    clear(dv);
  };
  auto* const to_ds = ds_place(sDS, warp_key, lane);
  Tensor fP = make_tensor<Element>(Shape<Shape<_2, _2, _2>, _1, Int<M / 16>>{});    // P^T
  Tensor fDSt = make_tensor<Element>(Shape<Shape<_2, _2, _2>, _1, Int<M / 16>>{});  // dS^T

  auto await_block = [&](uint32_t count) {
    StageState<Traits::QStages> const q_state{count};
    smem.q_full[q_state.index()].wait(q_state.phase());
    RowBlock const& block = smem.blocks[q_state.index()];
    if (block.rows < M) {
      StageState<Traits::DoutStages> const dout_state{count};
      smem.dout_full[dout_state.index()].wait(dout_state.phase());
      clear_foreign<Traits, M>(smem.q + q_state.index() * M * D, block.rows);
      clear_foreign<Traits, M>(smem.dout + dout_state.index() * M * D, block.rows);
    }
  };
  auto issue_s = [&](uint32_t count, auto& s) {
    issue(mma_s, fK, fQ(_, _, _, count % Traits::QStages), s, false);
  };
  auto issue_dp = [&](uint32_t count, auto& dp) {
    StageState<Traits::DoutStages> const dout_state{count};
    smem.dout_full[dout_state.index()].wait(dout_state.phase());
    issue(mma_s, fV, fDO(_, _, _, dout_state.index()), dp, false);
  };
  // S^T and dP^T, the last two products in flight, to P^T and dS^T. Two stages of dS: whoever
  // writes one has seen that all hold the dS after the one that was there, so they are done with
  // it.
  auto weigh = [&](uint32_t count, auto& s, auto& dp) {
    StageState<Traits::DsStages> const ds_state{count};
    RowBlock const& block = smem.blocks[count % Traits::QStages];
    bool const masked = block.masked;
    Seen seen;
    if (masked) seen = Seen(block, key, lane);
    warpgroup_wait<1>();
    warpgroup_fence_operand(s);
    exponentiate<M>(s, smem.lse[count % Traits::QStages], scale_log2, lane);
    if (masked) hide<M>(s, seen);
    warpgroup_wait<0>();
    warpgroup_fence_operand(dp);
    differentiate<M>(s, dp, smem.delta[count % Traits::DoutStages], lane);
    if (masked) hide<M>(dp, seen);
    to_operand<Element>(dp, fDSt);
    store_ds<M>(fDSt, to_ds + ds_state.index() * (M * N));
    __syncwarp();
    if (lane == 0) smem.ds_full[ds_state.index()].arrive();
    to_operand<Element>(s, fP);
  };
  auto issue_sums = [&](uint32_t count) {
    issue(mma_kv, fP, fDOt(_, _, _, count % Traits::DoutStages), dv, true);
    issue(mma_kv, fDSt, fQt(_, _, _, count % Traits::QStages), dk, true);
  };
  auto issue_dq = [&](uint32_t count, auto& dq) {
    StageState<Traits::DsStages> const ds_state{count};
    smem.ds_full[ds_state.index()].wait(ds_state.phase());
    issue(mma_q, fDS(_, _, _, ds_state.index()), fKt, dq, false);
  };
  // The sums and dQ of the `count`-th block have been computed.
  auto send = [&](uint32_t count, auto& dq) {
    warpgroup_fence_operand(dq);
    int const q_at = count % Traits::QStages;
    send_dq<Traits>(smem, dq, smem.blocks[q_at], count, 0, warpgroup);
    if (lane == 0) {
      smem.dout_empty[count % Traits::DoutStages].arrive();
      smem.q_empty[q_at].arrive();
    }
  };
  // Across blocks: S^T of the next one is computed while dQ of this one is sent. No product is in
  // flight where the loop begins again.
  auto walk = [&](uint32_t count) {
    await_block(count);
    {
      Tensor s = partition_fragment_C(mma_s, Shape<_64, Int<M>>{});
      Tensor dp = partition_fragment_C(mma_s, Shape<_64, Int<M>>{});
      issue_s(count, s);
      issue_dp(count, dp);
      weigh(count, s, dp);
    }
    for (; !smem.blocks[count % Traits::QStages].last; ++count) {
      Tensor s = partition_fragment_C(mma_s, Shape<_64, Int<M>>{});
      Tensor dp = partition_fragment_C(mma_s, Shape<_64, Int<M>>{});
      Tensor dq = partition_fragment_C(mma_q, Shape<_64, _64>{});
      issue_sums(count);
      await_block(count + 1);
      issue_dq(count, dq);
      warpgroup_wait<1>();
      warpgroup_fence_operand(dv);
      warpgroup_fence_operand(dk);
      issue_s(count + 1, s);
      warpgroup_wait<1>();
      send(count, dq);
      issue_dp(count + 1, dp);
      weigh(count + 1, s, dp);
    }
    Tensor dq = partition_fragment_C(mma_q, Shape<_64, _64>{});
    issue_sums(count);
    issue_dq(count, dq);
    warpgroup_wait<0>();
    warpgroup_fence_operand(dv);
    warpgroup_fence_operand(dk);
    send(count, dq);
    return count + 1;
  };
  auto finish = [&](Portion const& portion, int kv_head) {
    float const valid = wait_for_partial(p.args, portion, lane);
    CUTE_UNROLL
    for (int n = 0; n < D / 2; ++n) dk(n) *= p.args.softmax_scale * valid, dv(n) *= valid;
    store_gradient<Traits>(p.args, p.args.dk, portion, kv_head, key, lane, dk);
    store_gradient<Traits>(p.args, p.args.dv, portion, kv_head, key, lane, dv);
  };
  each_portion<Traits>(smem, warpgroup, clear_sums, walk, finish);
}

}  // namespace ringfa3
