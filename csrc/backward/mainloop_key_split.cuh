// Consumers of tiles of 128 keys: a warpgroup for each half of the keys, with its dK and dV.
//
// They take turns: one issues its part of dV and dK of block j, of dQ of block j - 1, for which the
// other's dS is there by then, and S^T and dP^T of block j + 1; the other meanwhile makes P^T and
// dS^T of what it has issued before. These stay in registers for dV and dK; only dQ reads dS.
//
// Letters in shapes: M rows of a block of queries, N keys of a tile, D head dim, S stages.
#pragma once

#include "backward/mainloop_common.cuh"

namespace ringfa3 {

using namespace cute;

// P^T stays in the registers in which S^T has come.
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
  Tensor fP = make_tensor<Element>(Shape<Shape<_2, _2, _2>, _1, Int<M / 16>>{});  // P^T
  Tensor fMyDS = make_tensor_like(fP);                                            // dS^T

  // Warpgroups issue their products in turns, so one weighs its scores while the other's run.
  auto my_turn = [&] {
    cutlass::arch::NamedBarrier::sync(Traits::Consumers * kWarpgroup, kTurn + warpgroup);
  };
  auto next_turn = [&] {
    cutlass::arch::NamedBarrier::arrive(Traits::Consumers * kWarpgroup, kTurn + 1 - warpgroup);
  };
  if (warpgroup == 1) next_turn();
  auto block_at = [&](uint32_t count) -> RowBlock const& {
    return smem.blocks[count % Traits::BlockDepth];
  };
  // Flags of the block that is weighed or to be weighed, and where they are looked up ahead, those
  // of the next one above them.
  int flags = 0;
  auto flags_of = [&](uint32_t count) {
    StageState<Traits::BlockDepth> const place{count};
    smem.block_ready[place.index()].wait(place.phase());
    return block_at(count).flags;
  };
  auto look_ahead = [&](uint32_t count) {
    if constexpr (Traits::LooksAhead) {
      if (!(flags & kLastBlock)) flags |= flags_of(count) << kBlockFlagBits;
    }
  };
  auto next_flags = [&](uint32_t count) {
    flags = Traits::LooksAhead ? flags >> kBlockFlagBits : flags_of(count);
  };
  // Both warpgroups, neither in its turn: clears what is a neighbour's.
  auto clear_block = [&](uint32_t count) {
    StageState<Traits::QStages> const q_state{count};
    StageState<Traits::DoutStages> const dout_state{count};
    smem.q_full[q_state.index()].wait(q_state.phase());
    smem.dout_full[dout_state.index()].wait(dout_state.phase());
    clear_foreign<Traits, M>(smem.q + q_state.index() * M * D, block_at(count).rows);
    clear_foreign<Traits, M>(smem.dout + dout_state.index() * M * D, block_at(count).rows);
  };
  auto issue_s = [&](uint32_t count, auto& s) {
    StageState<Traits::QStages> const q_state{count};
    smem.q_full[q_state.index()].wait(q_state.phase());
    issue(mma_s, fK, fQ(_, _, _, q_state.index()), s, false);
  };
  auto issue_dp = [&](uint32_t count, auto& dp) {
    StageState<Traits::DoutStages> const dout_state{count};
    smem.dout_full[dout_state.index()].wait(dout_state.phase());
    // V's descriptors anew, or registers are spilled; K's too would cost more than it saves.
    issue(mma_s, opaque(fV), fDO(_, _, _, dout_state.index()), dp, false);
  };
  // S^T and dP^T, the last products in flight, to P^T and dS^T. Three stages of dS: in its last
  // turn the other warpgroup has used what was there.
  auto weigh = [&](uint32_t count, auto& s, auto& dp) {
    StageState<Traits::DsStages> const ds_state{count};
    float const* const lse = smem.lse[count % Traits::QStages];
    float const* const delta = smem.delta[count % Traits::DoutStages];
    bool const masked = flags & kMasked;
    Seen seen;
    if (masked) seen = Seen(block_at(count), key, lane);
    RowValues<M> of_rows;
    if constexpr (Traits::ReadsAhead) of_rows = RowValues<M>(lse, lane);
    warpgroup_wait<1>();
    warpgroup_fence_operand(s);
    if constexpr (!Traits::ReadsAhead) of_rows = RowValues<M>(lse, lane);
    exponentiate(s, of_rows, scale_log2);
    if (masked) hide<M>(s, seen);
    to_operand<Element>(s, fP);
    if constexpr (Traits::ReadsAhead) of_rows = RowValues<M>(delta, lane);
    warpgroup_wait<0>();
    warpgroup_fence_operand(dp);
    if constexpr (!Traits::ReadsAhead) of_rows = RowValues<M>(delta, lane);
    differentiate(s, dp, of_rows);
    if (masked) hide<M>(dp, seen);
    to_operand<Element>(dp, fMyDS);
    store_ds<M>(fMyDS, to_ds + ds_state.index() * (M * N));
    __syncwarp();
    if (lane == 0) smem.ds_full[ds_state.index()].arrive();
  };
  auto issue_dv = [&](uint32_t count) {
    issue(mma_kv, fP, fDOt(_, _, _, count % Traits::DoutStages), dv, true);
  };
  auto issue_dk = [&](uint32_t count) {
    issue(mma_kv, fMyDS, fQt(_, _, _, count % Traits::QStages), dk, true);
  };
  auto dv_done = [&](uint32_t count) {
    warpgroup_fence_operand(dv);
    if (lane == 0) smem.dout_empty[count % Traits::DoutStages].arrive();
  };
  auto dk_done = [&](uint32_t count) {
    warpgroup_fence_operand(dk);
    if (lane == 0) smem.q_empty[count % Traits::QStages].arrive();
  };
  auto issue_dq = [&](uint32_t count, auto& dq) {
    StageState<Traits::DsStages> const ds_state{count};
    smem.ds_full[ds_state.index()].wait(ds_state.phase());
    cutlass::arch::fence_view_async_shared();  // behind all that both warpgroups have stored
    issue(mma_q, fDS(_, _, _, ds_state.index()), fKt, dq, false);
  };
  auto send = [&](uint32_t count, auto& dq) {
    warpgroup_fence_operand(dq);
    send_dq<Traits>(smem, dq, block_at(count), count, 0, warpgroup);
    if (lane == 0) smem.block_done[count % Traits::BlockDepth].arrive();
  };
  // A block's part of the sums, dQ of the one before, and the scores of the one after.
  auto step = [&](bool opening, uint32_t count) {
    Tensor s = partition_fragment_C(mma_s, Shape<_64, Int<M>>{});
    Tensor dp = partition_fragment_C(mma_s, Shape<_64, Int<M>>{});
    next_flags(count + 1);
    if (flags & kForeign) clear_block(count + 1);
    my_turn();
    issue_dv(count);
    Tensor dq = partition_fragment_C(mma_q, Shape<_64, _64>{});
    if (!opening) issue_dq(count - 1, dq);
    issue_dk(count);
    warpgroup_wait<1>();
    dv_done(count);
    if (!opening) send(count - 1, dq);
    issue_s(count + 1, s);
    warpgroup_wait<1>();
    dk_done(count);
    issue_dp(count + 1, dp);
    next_turn();
    look_ahead(count + 2);
    weigh(count + 1, s, dp);
  };
  // No product is in flight where the loop begins again.
  auto walk = [&](uint32_t unit_number, uint32_t count) {
    uint32_t const begin = count;
    {
      Tensor s = partition_fragment_C(mma_s, Shape<_64, Int<M>>{});
      Tensor dp = partition_fragment_C(mma_s, Shape<_64, Int<M>>{});
      flags = flags_of(count);
      if (flags & kForeign) clear_block(count);
      my_turn();
      issue_s(count, s);
      smem.v_full.wait(StageState<1>{unit_number}.phase());
      issue_dp(count, dp);
      next_turn();
      look_ahead(count + 1);
      weigh(count, s, dp);
    }
    for (; !(flags & kLastBlock); ++count) step(count == begin, count);
    if (lane == 0) smem.v_empty.arrive();
    Tensor dq = partition_fragment_C(mma_q, Shape<_64, _64>{});
    my_turn();
    if (count > begin) {
      issue_dv(count);
      issue_dq(count - 1, dq);
      issue_dk(count);
      next_turn();
      warpgroup_wait<1>();
      dv_done(count);
      send(count - 1, dq);
      warpgroup_wait<0>();
    } else {
      issue_dv(count);
      issue_dk(count);
      next_turn();
      warpgroup_wait<0>();
      dv_done(count);
    }
    dk_done(count);
    issue_dq(count, dq);
    warpgroup_wait<0>();
    if (lane == 0) smem.k_empty.arrive();
    send(count, dq);
    return count + 1;
  };
  auto finish = [&](WorkUnit const& unit, int kv_head) {
    CUTE_UNROLL
    for (int n = 0; n < D / 2; ++n) dk(n) *= p.args.softmax_scale;
    store_gradient<Traits>(p.args, p.args.dk, unit, kv_head, key, lane, dk);
    store_gradient<Traits>(p.args, p.args.dv, unit, kv_head, key, lane, dv);
  };
  uint32_t const blocks = each_work_unit<Traits>(smem, clear_sums, walk, finish);
  end_dq<Traits>(smem, warpgroup, blocks);
  if (warpgroup == 0) my_turn();  // the turn that nobody takes
}

}  // namespace ringfa3
