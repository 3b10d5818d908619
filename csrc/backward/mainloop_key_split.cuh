// Consumers of tiles of 128 keys: each warpgroup computes dK and dV of 64 keys.
//
// For row block j: S = K Q^T and dP = V dO^T, P and dS by the softmax backward, dV += P^T dO,
// dK += dS^T Q, dQ = dS K; S, dP, P and dS are held transposed. The warpgroups take turns to issue
// products, so that each computes P and dS while the other's products run. dQ(j) reads the dS of
// both warpgroups, so it is issued one turn later:
//
//   warpgroup 0 | dV(j) dQ(j-1) dK(j) S(j+1) dP(j+1) | P, dS of j+1                       |
//   dV(j+1).. warpgroup 1 | P, dS of j                         | dV(j) dQ(j-1) dK(j) S(j+1) dP(j+1)
//   | P, dS ..
//
// Inside a warpgroup, computing P overlaps dP. P and dS stay in registers for dV and dK; only dQ
// reads dS from shared memory.
//
// Letters in shapes: M rows of a block of queries, N keys of a tile, D head dim, S stages.
#pragma once

#include "backward/mainloop_common.cuh"

namespace ringfa3 {

using namespace cute;

// State and operations of one warpgroup; `run_unit` has the loop over blocks. The operations are
// lambdas and not methods: for a struct that holds the state nvcc emits other code.
template <class Shapes>
CUTE_DEVICE void consume_key_split(BackwardParams const& p, typename Shapes::SharedStorage& smem) {
  using QStage = Pipeline<Shapes::QStages>;
  using DoutStage = Pipeline<Shapes::DoutStages>;
  using DsStage = Pipeline<Shapes::DsStages>;
  using BlockStage = Pipeline<Shapes::BlockDepth>;
  using Element = typename Shapes::Element;
  constexpr int M = Shapes::M, N = Shapes::N, D = Shapes::D;
  int const thread = threadIdx.x % kWarpgroup;
  int const warpgroup = cutlass::canonical_warp_group_idx() - 1;  // uniform
  int const lane = thread % kWarp;
  int const warp_key = 64 * warpgroup + thread / kWarp * 16;  // the warp's first key in the tile
  int const key = warp_key + lane / 4;                        // and key + 8
  float const scale_log2 = p.args.softmax_scale * kLog2e;

  typename Shapes::MmaS mma_s;
  typename Shapes::MmaKV mma_kv;
  typename Shapes::MmaQ mma_q;
  Tensor sK = make_tensor(make_smem_ptr(smem.k), typename Shapes::SmemK{});           // (N, D)
  Tensor sV = make_tensor(make_smem_ptr(smem.v), typename Shapes::SmemK{});           // (N, D)
  Tensor sQ = make_tensor(make_smem_ptr(smem.q), typename Shapes::SmemQ{});           // (M, D, S)
  Tensor sDO = make_tensor(make_smem_ptr(smem.dout), typename Shapes::SmemDout{});    // (M, D, S)
  Tensor sKt = make_tensor(make_smem_ptr(smem.k), typename Shapes::SmemKt{});         // (D, N)
  Tensor sQt = make_tensor(make_smem_ptr(smem.q), typename Shapes::SmemQt{});         // (D, M, S)
  Tensor sDOt = make_tensor(make_smem_ptr(smem.dout), typename Shapes::SmemDoutT{});  // (D, M, S)
  Tensor sDS = make_tensor(make_smem_ptr(smem.ds), typename Shapes::SmemDs{});        // (M, N, S)
  // Of dQ (M, D) a warpgroup computes 64 rows, or with M = 64, half of the columns.
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
  Tensor dk = partition_fragment_C(mma_kv, Shape<_64, Int<D>>{});  // dK (64, D)
  Tensor dv = partition_fragment_C(mma_kv, Shape<_64, Int<D>>{});  // dV (64, D)

  auto clear_sums = [&] {
    clear(dk);
    clear(dv);
  };
  auto* const to_ds = ds_address<Shapes>(smem, warp_key, lane);
  // A operands of dV and dK: P^T and dS^T, (64, M).
  Tensor fP = make_tensor<Element>(Shape<Shape<_2, _2, _2>, _1, Int<M / 16>>{});
  Tensor fOwnDS = make_tensor_like(fP);

  auto await_turn = [&] {
    cutlass::arch::NamedBarrier::sync(Shapes::Consumers * kWarpgroup, kTurn + warpgroup);
  };
  auto pass_turn = [&] {
    cutlass::arch::NamedBarrier::arrive(Shapes::Consumers * kWarpgroup, kTurn + 1 - warpgroup);
  };
  if (warpgroup == 1) pass_turn();
  auto block_at = [&](uint32_t count) -> RowBlock const& {
    return smem.blocks[BlockStage{count}.index()];
  };
  // BlockFlags of the block whose P is computed next; where the policy looks ahead, those of the
  // block after it in the bits above.
  int flags = 0;
  auto flags_of = [&](uint32_t count) {
    BlockStage const stage{count};
    smem.block_ready[stage.index()].wait(stage.phase());
    return block_at(count).flags;
  };
  auto look_ahead = [&](uint32_t count) {
    if constexpr (Shapes::kPolicy.looks_ahead) {
      if (!(flags & kLastBlock)) flags |= flags_of(count) << kBlockFlagBits;
    }
  };
  auto next_flags = [&](uint32_t count) {
    flags = Shapes::kPolicy.looks_ahead ? flags >> kBlockFlagBits : flags_of(count);
  };
  // Both warpgroups, neither in its turn: zeroes rows of Q and dO that are a neighbour's.
  auto clear_block = [&](uint32_t count) {
    QStage const q_stage{count};
    DoutStage const dout_stage{count};
    smem.q_full[q_stage.index()].wait(q_stage.phase());
    smem.dout_full[dout_stage.index()].wait(dout_stage.phase());
    clear_foreign<Shapes, M>(smem.q + q_stage.index() * M * D, block_at(count).rows);
    clear_foreign<Shapes, M>(smem.dout + dout_stage.index() * M * D, block_at(count).rows);
  };
  auto issue_s = [&](uint32_t count, auto& s) {
    QStage const q_stage{count};
    smem.q_full[q_stage.index()].wait(q_stage.phase());
    issue(mma_s, fK, fQ(_, _, _, q_stage.index()), s, false);
  };
  auto issue_dp = [&](uint32_t count, auto& dp) {
    DoutStage const dout_stage{count};
    smem.dout_full[dout_stage.index()].wait(dout_stage.phase());
    // Descriptors of V are computed anew, or registers spill. For K it would cost more than it
    // saves.
    issue(mma_s, opaque(fV), fDO(_, _, _, dout_stage.index()), dp, false);
  };
  // S^T and dP^T, the last two products in flight, become P^T and dS^T. dS has three stages: the
  // other warpgroup has read this one in its last turn.
  auto softmax_backward = [&](uint32_t count, auto& s, auto& dp) {
    DsStage const ds_stage{count};
    float const* const lse = smem.lse[QStage{count}.index()];
    float const* const delta = smem.delta[DoutStage{count}.index()];
    bool const masked = flags & kMasked;
    BlockMask mask;
    if (masked) mask = BlockMask(block_at(count), key, lane);
    RowValues<M> of_rows;
    if constexpr (Shapes::kPolicy.reads_ahead) of_rows = RowValues<M>(lse, lane);
    warpgroup_wait<1>();
    warpgroup_fence_operand(s);
    if constexpr (!Shapes::kPolicy.reads_ahead) of_rows = RowValues<M>(lse, lane);
    compute_p(s, of_rows, scale_log2);
    if (masked) apply_mask<M>(s, mask);
    to_operand<Element>(s, fP);
    if constexpr (Shapes::kPolicy.reads_ahead) of_rows = RowValues<M>(delta, lane);
    warpgroup_wait<0>();
    warpgroup_fence_operand(dp);
    if constexpr (!Shapes::kPolicy.reads_ahead) of_rows = RowValues<M>(delta, lane);
    compute_ds(s, dp, of_rows);
    if (masked) apply_mask<M>(dp, mask);
    to_operand<Element>(dp, fOwnDS);
    store_ds<M>(fOwnDS, to_ds + ds_stage.index() * (M * N));
    __syncwarp();
    if (lane == 0) smem.ds_full[ds_stage.index()].arrive();
  };
  auto issue_dv = [&](uint32_t count) {
    issue(mma_kv, fP, fDOt(_, _, _, DoutStage{count}.index()), dv, true);
  };
  auto issue_dk = [&](uint32_t count) {
    issue(mma_kv, fOwnDS, fQt(_, _, _, QStage{count}.index()), dk, true);
  };
  auto finish_dv = [&](uint32_t count) {
    warpgroup_fence_operand(dv);
    if (lane == 0) smem.dout_empty[DoutStage{count}.index()].arrive();
  };
  auto finish_dk = [&](uint32_t count) {
    warpgroup_fence_operand(dk);
    if (lane == 0) smem.q_empty[QStage{count}.index()].arrive();
  };
  auto issue_dq = [&](uint32_t count, auto& dq) {
    DsStage const ds_stage{count};
    smem.ds_full[ds_stage.index()].wait(ds_stage.phase());
    cutlass::arch::fence_view_async_shared();  // after the stores of both warpgroups
    issue(mma_q, fDS(_, _, _, ds_stage.index()), fKt, dq, false);
  };
  auto send = [&](uint32_t count, auto& dq) {
    warpgroup_fence_operand(dq);
    send_dq<Shapes>(smem, dq, block_at(count), count, 0, warpgroup);
    if (lane == 0) smem.block_done[BlockStage{count}.index()].arrive();
  };
  // dV and dK of block `count`, dQ of the block before unless it is the `first`, S and dP of the
  // block after.
  auto next_block = [&](bool first, uint32_t count) {
    Tensor s = partition_fragment_C(mma_s, Shape<_64, Int<M>>{});
    Tensor dp = partition_fragment_C(mma_s, Shape<_64, Int<M>>{});
    next_flags(count + 1);
    if (flags & kForeign) clear_block(count + 1);
    await_turn();
    issue_dv(count);
    Tensor dq = partition_fragment_C(mma_q, Shape<_64, _64>{});
    if (!first) issue_dq(count - 1, dq);
    issue_dk(count);
    warpgroup_wait<1>();
    finish_dv(count);
    if (!first) send(count - 1, dq);
    issue_s(count + 1, s);
    warpgroup_wait<1>();
    finish_dk(count);
    issue_dp(count + 1, dp);
    pass_turn();
    look_ahead(count + 2);
    softmax_backward(count + 1, s, dp);
  };
  // See `run_work_items`. No product is in flight at the start of an iteration.
  auto run_unit = [&](uint32_t unit_number, uint32_t count) {
    uint32_t const begin = count;
    {
      Tensor s = partition_fragment_C(mma_s, Shape<_64, Int<M>>{});
      Tensor dp = partition_fragment_C(mma_s, Shape<_64, Int<M>>{});
      flags = flags_of(count);
      if (flags & kForeign) clear_block(count);
      await_turn();
      issue_s(count, s);
      smem.v_full.wait(Pipeline<1>{unit_number}.phase());
      issue_dp(count, dp);
      pass_turn();
      look_ahead(count + 1);
      softmax_backward(count, s, dp);
    }
    for (; !(flags & kLastBlock); ++count) next_block(count == begin, count);
    if (lane == 0) smem.v_empty.arrive();
    Tensor dq = partition_fragment_C(mma_q, Shape<_64, _64>{});
    await_turn();
    if (count > begin) {
      issue_dv(count);
      issue_dq(count - 1, dq);
      issue_dk(count);
      pass_turn();
      warpgroup_wait<1>();
      finish_dv(count);
      send(count - 1, dq);
      warpgroup_wait<0>();
    } else {
      issue_dv(count);
      issue_dk(count);
      pass_turn();
      warpgroup_wait<0>();
      finish_dv(count);
    }
    finish_dk(count);
    issue_dq(count, dq);
    warpgroup_wait<0>();
    if (lane == 0) smem.k_empty.arrive();
    send(count, dq);
    return count + 1;
  };
  auto store_sums = [&](WorkUnit const& unit, int kv_head) {
    CUTE_UNROLL
    for (int n = 0; n < D / 2; ++n) dk(n) *= p.args.softmax_scale;
    store_gradient<Shapes>(p.args, p.args.dk, unit, kv_head, key, lane, dk);
    store_gradient<Shapes>(p.args, p.args.dv, unit, kv_head, key, lane, dv);
  };
  uint32_t const blocks = run_work_items<Shapes>(smem, clear_sums, run_unit, store_sums);
  end_dq<Shapes>(smem, warpgroup, blocks);
  if (warpgroup == 0) await_turn();  // the last turn, which nobody else takes
}

}  // namespace ringfa3
