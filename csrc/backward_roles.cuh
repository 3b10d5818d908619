// Consumers of tiles of 64 keys: one warpgroup has P and dV, the other dS and dK.
//
// P^T goes from the first to the second through shared memory, in float32; a thread of each holds
// the same elements. Of dQ each computes half of the columns.
//
// Letters in shapes: M rows of a block of queries, N keys of a tile, D head dim, S stages.
#pragma once

#include "backward_consumer.cuh"

namespace ringfa3 {

using namespace cute;

template <class Traits, bool kValues>
CUTE_DEVICE void consume_role(BackwardParams const& p, typename Traits::SharedStorage& smem) {
  using Element = typename Traits::Element;
  constexpr int M = Traits::M, N = Traits::N, D = Traits::D;
  constexpr int kColumns = Traits::DqColumns, kAll = Traits::Consumers * kWarpgroup;
  constexpr int kWarpgroupHere = kValues ? 0 : 1;
  static_assert(M == 64 && N == 64 && Traits::DsStages == 1);
  int const thread = threadIdx.x % kWarpgroup;
  int const lane = thread % kWarp;
  int const warp_key = thread / kWarp * 16;
  int const key = warp_key + lane / 4;  // and key + 8
  float const scale_log2 = p.args.softmax_scale * kLog2e;

  typename Traits::MmaS mma_s;
  typename Traits::MmaKV mma_kv;
  typename Traits::MmaQ mma_q;
  // S^T = K Q^T and dV += P^T dO, or dP^T = V dO^T and dK += dS^T Q.
  Tensor sKV = make_tensor(make_smem_ptr(kValues ? smem.k : smem.v), typename Traits::SmemK{});
  Tensor sQ = make_tensor(make_smem_ptr(smem.q), typename Traits::SmemQ{});           // (M, D, S)
  Tensor sDO = make_tensor(make_smem_ptr(smem.dout), typename Traits::SmemDout{});    // (M, D, S)
  Tensor sKt = make_tensor(make_smem_ptr(smem.k), typename Traits::SmemKt{});         // (D, N)
  Tensor sQt = make_tensor(make_smem_ptr(smem.q), typename Traits::SmemQt{});         // (D, M, S)
  Tensor sDOt = make_tensor(make_smem_ptr(smem.dout), typename Traits::SmemDoutT{});  // (D, M, S)
  Tensor sDS = make_tensor(make_smem_ptr(smem.ds), typename Traits::SmemDs{});        // (M, N, S)
  auto thread_s = mma_s.get_slice(thread);
  auto thread_kv = mma_kv.get_slice(thread);
  auto thread_q = mma_q.get_slice(thread);
  Tensor fKV = thread_s.partition_fragment_A(sKV);
  Tensor fQ = thread_s.partition_fragment_B(sQ);
  Tensor fDO = thread_s.partition_fragment_B(sDO);
  Tensor fQt = thread_kv.partition_fragment_B(sQt);
  Tensor fDOt = thread_kv.partition_fragment_B(sDOt);
  Tensor fDS = thread_q.partition_fragment_A(sDS);
  Tensor fKt = thread_q.partition_fragment_B(
      local_tile(sKt, Shape<Int<kColumns>, Int<N>>{}, make_coord(Int<kWarpgroupHere>{}, _0{})));
  Tensor sum = partition_fragment_C(mma_kv, Shape<_64, Int<D>>{});  // dV or dK

  auto clear_sum = [&] { clear(sum); };
  auto* const to_ds = ds_place(sDS, warp_key, lane);
  auto step = [&](uint32_t count) {
    StageState<Traits::QStages> const q_state{count};
    StageState<Traits::DoutStages> const dout_state{count};
    int const q_at = q_state.index(), dout_at = dout_state.index();
    smem.q_full[q_at].wait(q_state.phase());
    RowBlock const& block = smem.blocks[q_at];
    bool const masked = block.masked, last = block.last;
    if (!kValues || block.rows < M) smem.dout_full[dout_at].wait(dout_state.phase());
    if (block.rows < M) {
      clear_foreign<Traits, M>(smem.q + q_at * M * D, block.rows);
      clear_foreign<Traits, M>(smem.dout + dout_at * M * D, block.rows);
    }
    Tensor s = partition_fragment_C(mma_s, Shape<_64, Int<M>>{});                   // or dP^T
    Tensor fS = make_tensor<Element>(Shape<Shape<_2, _2, _2>, _1, Int<M / 16>>{});  // P^T or dS^T
    auto* const exchanged = reinterpret_cast<float4*>(smem.p) + thread;
    if constexpr (kValues) {
      issue(mma_s, fKV, fQ(_, _, _, q_at), s, false);
      warpgroup_wait<0>();
      warpgroup_fence_operand(s);
      exponentiate<M>(s, smem.lse[q_at], scale_log2, lane);
      if (masked) hide<M>(s, block, key, lane);
      CUTE_UNROLL
      for (int n = 0; n < M / 2; n += 4) {
        exchanged[n / 4 * kWarpgroup] = make_float4(s(n), s(n + 1), s(n + 2), s(n + 3));
      }
      cutlass::arch::NamedBarrier::arrive(kAll, kPReady);
      to_operand<Element>(s, fS);
      smem.dout_full[dout_at].wait(dout_state.phase());
      issue(mma_kv, fS, fDOt(_, _, _, dout_at), sum, true);
    } else {
      issue(mma_s, fKV, fDO(_, _, _, dout_at), s, false);
      cutlass::arch::NamedBarrier::sync(kAll, kPReady);
      Tensor prob = make_tensor<float>(Shape<Int<M / 2>>{});
      CUTE_UNROLL
      for (int n = 0; n < M / 2; n += 4) {
        float4 const x = exchanged[n / 4 * kWarpgroup];
        prob(n) = x.x, prob(n + 1) = x.y, prob(n + 2) = x.z, prob(n + 3) = x.w;
      }
      warpgroup_wait<0>();
      warpgroup_fence_operand(s);
      differentiate<M>(prob, s, smem.delta[dout_at], lane);
      if (masked) hide<M>(s, block, key, lane);
      to_operand<Element>(s, fS);
      // The other has read the last dS: it has sent this block's P since.
      store_ds<M>(fS, to_ds);
      issue(mma_kv, fS, fQt(_, _, _, q_at), sum, true);
    }
    cutlass::arch::NamedBarrier::sync(kAll, kDsReady);
    Tensor dq = partition_fragment_C(mma_q, Shape<_64, Int<kColumns>>{});
    issue(mma_q, fDS(_, _, _, 0), fKt, dq, false);
    warpgroup_wait<1>();
    warpgroup_fence_operand(sum);
    if (lane == 0) smem.dout_empty[dout_at].arrive();
    warpgroup_wait<0>();
    warpgroup_fence_operand(dq);
    send_dq<Traits>(smem, dq, block, count, kWarpgroupHere);
    if (lane == 0) smem.q_empty[q_at].arrive();
    return last;
  };
  auto walk = [&](uint32_t count) {
    while (!step(count++)) continue;
    return count;
  };
  auto finish = [&](Portion const& portion, int kv_head) {
    float const valid = wait_for_partial(p.args, portion, lane);
    CUTE_UNROLL
    for (int n = 0; n < D / 2; ++n) sum(n) *= kValues ? valid : valid * p.args.softmax_scale;
    store_gradient<Traits>(p.args, kValues ? p.args.dv : p.args.dk, portion, kv_head, key, lane,
                           sum);
  };
  each_portion<Traits>(smem, kWarpgroupHere, clear_sum, walk, finish);
}

template <class Traits>
CUTE_DEVICE void consume_roles(BackwardParams const& p, typename Traits::SharedStorage& smem) {
  if (cutlass::canonical_warp_group_idx() == 1) {
    consume_role<Traits, true>(p, smem);
  } else {
    consume_role<Traits, false>(p, smem);
  }
}

}  // namespace ringfa3
