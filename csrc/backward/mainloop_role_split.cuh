// Consumers of tiles of 64 keys: one warpgroup has P and dV, the other dS and dK.
//
// P^T goes from the first to the second through shared memory, in float32; a thread of each holds
// the same elements. Of dQ each computes half of the columns. Both run the same products, on
// operands of their own: S^T = K Q^T and dV += P^T dO, or dP^T = V dO^T and dK += dS^T Q.
//
// Letters in shapes: M rows of a block of queries, N keys of a tile, D head dim, S stages.
#pragma once

#include "backward/mainloop_common.cuh"

namespace ringfa3 {

using namespace cute;

template <class Traits>
CUTE_DEVICE void consume_roles(BackwardParams const& p, typename Traits::SharedStorage& smem) {
  using Element = typename Traits::Element;
  using Shared = typename Traits::SharedStorage;
  constexpr int M = Traits::M, N = Traits::N, D = Traits::D;
  static_assert(M == 64 && N == 64 && Traits::DqTilesEach == 2);
  int const thread = threadIdx.x % kWarpgroup;
  int const warpgroup = cutlass::canonical_warp_group_idx() - 1;  // known to be uniform
  bool const values = warpgroup == 0;                             // has P and dV
  int const lane = thread % kWarp;
  int const warp_key = thread / kWarp * 16;
  int const key = warp_key + lane / 4;  // and key + 8
  float const scale_log2 = p.args.softmax_scale * kLog2e;

  typename Traits::MmaS mma_s;
  typename Traits::MmaKV mma_kv;
  typename Traits::MmaQ mma_q;
  // The stages of Q and, behind them, of dO.
  constexpr int kStages = Traits::QStages + Traits::DoutStages;
  static_assert(offsetof(Shared, dout) == offsetof(Shared, q) + sizeof(Shared::q));
  static_assert(offsetof(Shared, v) == offsetof(Shared, k) + sizeof(Shared::k));
  using SmemRows =
      decltype(tile_to_shape(typename Traits::AtomK{}, Shape<Int<M>, Int<D>, Int<kStages>>{}));
  using SmemRowsT = decltype(tile_to_shape(
      typename Traits::AtomMN{}, Shape<Int<D>, Int<M>, Int<kStages>>{}, Step<_2, _1, _3>{}));
  Tensor sKV = make_tensor(make_smem_ptr(smem.k + warpgroup * (N * D)), typename Traits::SmemK{});
  Tensor sRows = make_tensor(make_smem_ptr(smem.q), SmemRows{});                // (M, D, S)
  Tensor sRowsT = make_tensor(make_smem_ptr(smem.q), SmemRowsT{});              // (D, M, S)
  Tensor sKt = make_tensor(make_smem_ptr(smem.k), typename Traits::SmemKt{});   // (D, N)
  Tensor sDS = make_tensor(make_smem_ptr(smem.ds), typename Traits::SmemDs{});  // (M, N, S)
  auto thread_s = mma_s.get_slice(thread);
  auto thread_kv = mma_kv.get_slice(thread);
  auto thread_q = mma_q.get_slice(thread);
  Tensor fKV = thread_s.partition_fragment_A(sKV);
  Tensor fRows = thread_s.partition_fragment_B(sRows);
  Tensor fRowsT = thread_kv.partition_fragment_B(sRowsT);
  Tensor fDS = thread_q.partition_fragment_A(sDS);
  auto columns = [&](int piece) {  // of K, that give a piece of dQ
    return thread_q.partition_fragment_B(
        local_tile(sKt, Shape<_64, Int<N>>{}, make_coord(2 * warpgroup + piece, _0{})));
  };
  Tensor fKt0 = columns(0), fKt1 = columns(1);
  Tensor sum = partition_fragment_C(mma_kv, Shape<_64, Int<D>>{});                // dV or dK
  Tensor fS = make_tensor<Element>(Shape<Shape<_2, _2, _2>, _1, Int<M / 16>>{});  // P^T or dS^T
  auto* const to_ds = ds_place(sDS, warp_key, lane);
  auto* const exchanged = reinterpret_cast<float4*>(smem.p) + thread;

  auto clear_sum = [&] { clear(sum); };
  auto await_block = [&](uint32_t count) {
    StageState<Traits::QStages> const q_state{count};
    smem.q_full[q_state.index()].wait(q_state.phase());
    RowBlock const& block = smem.blocks[count % Traits::BlockDepth];
    if (block.flags & kForeign) {
      StageState<Traits::DoutStages> const dout_state{count};
      smem.dout_full[dout_state.index()].wait(dout_state.phase());
      clear_foreign<Traits, M>(smem.q + q_state.index() * M * D, block.rows);
      clear_foreign<Traits, M>(smem.dout + dout_state.index() * M * D, block.rows);
    }
  };
  auto await_dout = [&](uint32_t count) {
    StageState<Traits::DoutStages> const dout_state{count};
    smem.dout_full[dout_state.index()].wait(dout_state.phase());
  };
  auto q_stage = [&](uint32_t count) { return int(count % Traits::QStages); };
  auto dout_stage = [&](uint32_t count) {
    return Traits::QStages + int(count % Traits::DoutStages);
  };
  // S^T, computed, to P^T. The other has read the P of the block before: dS has come from it.
  auto weigh_values = [&](uint32_t count, auto& s) {
    RowBlock const& block = smem.blocks[count % Traits::BlockDepth];
    exponentiate(s, RowValues<M>(smem.lse[count % Traits::QStages], lane), scale_log2);
    if (block.flags & kMasked) hide<M>(s, Seen(block, key, lane));
    CUTE_UNROLL
    for (int n = 0; n < M / 2; n += 4) {
      exchanged[n / 4 * kWarpgroup] = make_float4(s(n), s(n + 1), s(n + 2), s(n + 3));
    }
    __syncwarp();
    if (lane == 0) smem.p_full.arrive();
    to_operand<Element>(s, fS);
  };
  // dP^T, computed, to dS^T. Two stages of dS: the other has sent this block's P after it had used
  // the dS that was there.
  auto weigh_keys = [&](uint32_t count, auto& dp) {
    StageState<Traits::DsStages> const ds_state{count};
    RowBlock const& block = smem.blocks[count % Traits::BlockDepth];
    smem.p_full.wait(StageState<1>{count}.phase());
    Tensor prob = make_tensor<float>(Shape<Int<M / 2>>{});
    CUTE_UNROLL
    for (int n = 0; n < M / 2; n += 4) {
      float4 const x = exchanged[n / 4 * kWarpgroup];
      prob(n) = x.x, prob(n + 1) = x.y, prob(n + 2) = x.z, prob(n + 3) = x.w;
    }
    differentiate(prob, dp, RowValues<M>(smem.delta[count % Traits::DoutStages], lane));
    if (block.flags & kMasked) hide<M>(dp, Seen(block, key, lane));
    to_operand<Element>(dp, fS);
    store_ds<M>(fS, to_ds + ds_state.index() * (M * N));
    cutlass::arch::fence_view_async_shared();
    __syncwarp();
    if (lane == 0) smem.ds_full[ds_state.index()].arrive();
  };
  auto issue_s = [&](uint32_t count, auto& s) {
    if (!values) await_dout(count);
    int const stage = values ? q_stage(count) : dout_stage(count);
    issue(mma_s, fKV, fRows(_, _, _, stage), s, false);
  };
  auto weigh = [&](uint32_t count, auto& s) {
    warpgroup_wait<0>();
    warpgroup_fence_operand(s);
    if (values) {
      weigh_values(count, s);
    } else {
      weigh_keys(count, s);
    }
  };
  // The block's part of the sums.
  auto issue_sum = [&](uint32_t count) {
    await_dout(count);
    int const stage = values ? dout_stage(count) : q_stage(count);
    issue(mma_kv, fS, fRowsT(_, _, _, stage), sum, true);
  };
  auto issue_dq = [&](uint32_t count, auto const& fKt, auto& dq) {
    issue(mma_q, fDS(_, _, _, count % Traits::DsStages), fKt, dq, false);
  };
  auto send = [&](uint32_t count, auto& dq, int piece) {
    warpgroup_fence_operand(dq);
    RowBlock const& block = smem.blocks[count % Traits::BlockDepth];
    if (p.args.turns) {
      send_dq<Traits>(smem, dq, block, count, piece, warpgroup);
    } else {
      add_dq<Traits>(p.args.grid.dq, dq, block, piece, warpgroup);
    }
  };
  // The products of a block but for S^T and dP^T. Leaves the second piece of dQ in flight.
  auto spend = [&](uint32_t count, auto& dq) {
    StageState<Traits::DsStages> const ds_state{count};
    Tensor dq0 = partition_fragment_C(mma_q, Shape<_64, _64>{});
    issue_sum(count);
    smem.ds_full[ds_state.index()].wait(ds_state.phase());
    issue_dq(count, fKt0, dq0);
    warpgroup_wait<1>();
    warpgroup_fence_operand(sum);
    if (lane == 0) smem.dout_empty[count % Traits::DoutStages].arrive();
    issue_dq(count, fKt1, dq);
    warpgroup_wait<1>();
    send(count, dq0, 0);
  };
  auto release = [&](uint32_t count) {
    __syncwarp();  // all lanes have read the block
    if (lane == 0) {
      smem.q_empty[count % Traits::QStages].arrive();
      smem.block_done[count % Traits::BlockDepth].arrive();
    }
  };
  // Across blocks: S^T or dP^T of the next one is computed while dQ of this one is sent. No product
  // is in flight where the loop begins again.
  auto walk = [&](uint32_t unit_number, uint32_t count) {
    if (!values) smem.v_full.wait(StageState<1>{unit_number}.phase());
    await_block(count);
    {
      Tensor s = partition_fragment_C(mma_s, Shape<_64, Int<M>>{});
      issue_s(count, s);
      weigh(count, s);
    }
    for (; !(smem.blocks[count % Traits::BlockDepth].flags & kLastBlock); ++count) {
      Tensor s = partition_fragment_C(mma_s, Shape<_64, Int<M>>{});
      Tensor dq = partition_fragment_C(mma_q, Shape<_64, _64>{});
      spend(count, dq);
      await_block(count + 1);
      issue_s(count + 1, s);
      warpgroup_wait<1>();
      send(count, dq, 1);
      release(count);
      weigh(count + 1, s);
    }
    if (lane == 0) smem.v_empty.arrive();
    Tensor dq = partition_fragment_C(mma_q, Shape<_64, _64>{});
    spend(count, dq);
    warpgroup_wait<0>();
    if (lane == 0) smem.k_empty.arrive();
    send(count, dq, 1);
    release(count);
    return count + 1;
  };
  auto finish = [&](WorkUnit const& unit, int kv_head) {
    float const scale = values ? 1.f : p.args.softmax_scale;
    CUTE_UNROLL
    for (int n = 0; n < D / 2; ++n) sum(n) *= scale;
    store_gradient<Traits>(p.args, values ? p.args.dv : p.args.dk, unit, kv_head, key, lane, sum);
  };
  uint32_t const blocks = each_work_unit<Traits>(smem, clear_sum, walk, finish);
  end_dq<Traits>(smem, warpgroup, p.args.turns ? blocks : 0);
}

}  // namespace ringfa3
