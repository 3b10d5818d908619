// FlashAttention-3 backward (Appendix B.1 of the paper) over the key tiles of a plan.
//
// A CTA keeps a tile of K and V and walks the blocks of rows that see it, for all query heads of a
// KV head, with dK and dV in registers. S^T and dP^T are computed transposed, so that P^T and dS^T
// already are operands of dV += P^T dO and dK += dS^T Q; only dS goes through shared memory, for
// dQ = dS K, which is added to global memory in float32 by warps of its own.
//
// Letters in shapes: M rows of a block of queries, N keys of a tile, D head dim, S stages.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "backward_epilogue.cuh"
#include "backward_scheduler.cuh"
#include "launch.cuh"
#include "products.cuh"

namespace ringfa3 {

using namespace cute;

enum BackwardBarriers : int { kDsReady = 1, kPReady = 2, kOwn = 3 };  // kOwn + warpgroup

// An accumulator (64 keys, M rows) of a thread: element 4j + 2r + c is of key `key` + 8r of the
// tile and row 8j + 2 (lane % 4) + c of the block.

// S^T to P^T = exp2(scale * S^T - LSE).
template <int M, class Scores>
CUTE_DEVICE void exponentiate(Scores& s, float const* lse, float scale_log2, int lane) {
  CUTE_UNROLL
  for (int j = 0; j < M / 8; ++j) {
    float2 const at = *reinterpret_cast<float2 const*>(lse + 8 * j + 2 * (lane % 4));
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      float& x = s(4 * j + 2 * r);
      float& y = s(4 * j + 2 * r + 1);
      x = exp2f(x * scale_log2 - at.x), y = exp2f(y * scale_log2 - at.y);
    }
  }
}

// dP^T to dS^T = P^T (dP^T - D).
template <int M, class Scores, class Gradient>
CUTE_DEVICE void differentiate(Scores const& p, Gradient& dp, float const* delta, int lane) {
  CUTE_UNROLL
  for (int j = 0; j < M / 8; ++j) {
    float2 const at = *reinterpret_cast<float2 const*>(delta + 8 * j + 2 * (lane % 4));
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      int const n = 4 * j + 2 * r;
      dp(n) = p(n) * (dp(n) - at.x), dp(n + 1) = p(n + 1) * (dp(n + 1) - at.y);
    }
  }
}

// Sets to 0 what the thread's keys `key` and `key + 8` of the tile must not be seen by.
template <int M, class Accumulator>
CUTE_DEVICE void hide(Accumulator& x, RowBlock const& block, int key, int lane) {
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) {
    int const k = key + 8 * r, offset = 2 * (lane % 4);
    int const first = k + block.low - offset;
    int const last = k < block.keys ? min(block.rows - 1, k + block.high) - offset : -1;
    CUTE_UNROLL
    for (int n = 0; n < M / 2; n += 4) {
      CUTE_UNROLL
      for (int c = 0; c < 2; ++c) {
        int const row = 2 * n + c;  // 8 * (n / 4) + c
        if (row < first || row > last) x(n + 2 * r + c) = 0.f;
      }
    }
  }
}

// One warpgroup: rows [owned, rows) of a tensor in shared memory become 0. They are a neighbour's;
// they meet factors that are 0, and 0 x inf would be NaN.
template <class Traits, class Shared>
CUTE_DEVICE void clear_foreign(Shared const& x, int owned, int warpgroup) {
  constexpr int D = Traits::D, kRows = decltype(size<0>(x))::value;
  for (int i = threadIdx.x % kWarpgroup; i < (kRows - owned) * D; i += kWarpgroup) {
    x(owned + i / D, i % D) = typename Traits::Element(0);
  }
  cutlass::arch::fence_view_async_shared();
  cutlass::arch::NamedBarrier::sync(kWarpgroup, kOwn + warpgroup);
}

// dS^T of a warp's 16 keys from `key` on, as an A operand has it, to dS (M, N) in shared memory.
template <int M, class Operand, class Shared>
CUTE_DEVICE void store_ds(Operand const& ds, Shared const& sDS, int key, int lane) {
  auto const* words = reinterpret_cast<uint32_t const*>(raw_pointer_cast(ds.data()));
  CUTE_UNROLL
  for (int j = 0; j < M / 8; j += 2) {  // (8, 8) matrices: rows 8j, 8j + 8; keys key, key + 8
    auto& at = sDS(8 * j + lane / 16 * 8, key + lane % 16);
    SM90_U32x4_STSM_N::copy(words[2 * j], words[2 * j + 1], words[2 * j + 2], words[2 * j + 3],
                            reinterpret_cast<uint128_t&>(at));
  }
}

// One warpgroup: hands its part of a block's dQ to the warp that adds it, piece by piece.
template <class Traits, class Accumulator>
CUTE_DEVICE void send_dq(typename Traits::SharedStorage& smem, Accumulator const& dq,
                         RowBlock const& block, StageState<1>& state, int warpgroup) {
  int const thread = threadIdx.x % kWarpgroup;
  auto* const to = reinterpret_cast<float4*>(smem.dq[warpgroup]) + thread;
  CUTE_UNROLL
  for (int piece = 0; piece < Traits::PiecesEach; ++piece) {
    smem.dq_empty[warpgroup].wait(state.phase() ^ 1);
    CUTE_UNROLL
    for (int i = 0; i < 8; ++i) {
      int const n = 32 * piece + 4 * i;
      to[i * kWarpgroup] = make_float4(dq(n), dq(n + 1), dq(n + 2), dq(n + 3));
    }
    cutlass::arch::fence_view_async_shared();
    if (thread == 0) {
      int const first = block.target * Traits::Pieces + warpgroup * Traits::PiecesEach;
      smem.pieces[warpgroup] = DqPiece{first + piece, block.turn};
    }
    __syncwarp();
    if (thread % kWarp == 0) smem.dq_full[warpgroup].arrive();
    state.advance();
  }
}

// A warpgroup for each half of the keys. No product is in flight when a block ends.
template <class Traits>
CUTE_DEVICE void consume_halves(BackwardParams const& p, typename Traits::SharedStorage& smem) {
  using Element = typename Traits::Element;
  constexpr int M = Traits::M, N = Traits::N, D = Traits::D;
  constexpr int kColumns = Traits::DqColumns;
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
  Tensor fKt = thread_q.partition_fragment_B(local_tile(
      sKt, Shape<Int<kColumns>, Int<N>>{}, make_coord(kRowHalves ? 0 : warpgroup, _0{})));
  Tensor dk = partition_fragment_C(mma_kv, Shape<_64, Int<D>>{});
  Tensor dv = partition_fragment_C(mma_kv, Shape<_64, Int<D>>{});

  StageState<kWorkDepth> work_state;
  StageState<1> kv_state, dq_state;
  StageState<Traits::QStages> q_state;
  StageState<Traits::DoutStages> dout_state;
  StageState<Traits::DsStages> ds_state;
  while (true) {
    smem.work_full[work_state.index()].wait(work_state.phase());
    KeyWork const& work = smem.work[work_state.index()];
    if (work.kv_head < 0) break;
    clear(dk);
    clear(dv);
    if (work.portion.blocks > 0) {
      smem.kv_full.wait(kv_state.phase());
      kv_state.advance();
      if (work.portion.rows < N) clear_foreign<Traits>(sK, work.portion.rows, warpgroup);
      bool last = false;
      while (!last) {
        smem.q_full[q_state.index()].wait(q_state.phase());
        RowBlock const& block = smem.blocks[q_state.index()];
        bool const masked = block.masked;
        last = block.last;
        if (block.rows < M) {
          smem.dout_full[dout_state.index()].wait(dout_state.phase());
          clear_foreign<Traits>(sQ(_, _, q_state.index()), block.rows, warpgroup);
          clear_foreign<Traits>(sDO(_, _, dout_state.index()), block.rows, warpgroup);
        }
        Tensor s = partition_fragment_C(mma_s, Shape<_64, Int<M>>{});
        Tensor dp = partition_fragment_C(mma_s, Shape<_64, Int<M>>{});
        Tensor fP = make_tensor<Element>(Shape<Shape<_2, _2, _2>, _1, Int<M / 16>>{});
        Tensor fDSt = make_tensor<Element>(Shape<Shape<_2, _2, _2>, _1, Int<M / 16>>{});
        issue(mma_s, fK, fQ(_, _, _, q_state.index()), s, false);
        smem.dout_full[dout_state.index()].wait(dout_state.phase());
        issue(mma_s, fV, fDO(_, _, _, dout_state.index()), dp, false);
        warpgroup_wait<1>();
        warpgroup_fence_operand(s);
        exponentiate<M>(s, smem.lse[q_state.index()], scale_log2, lane);
        if (masked) hide<M>(s, block, key, lane);
        warpgroup_wait<0>();
        warpgroup_fence_operand(dp);
        differentiate<M>(s, dp, smem.delta[dout_state.index()], lane);
        to_operand<Element>(s, fP);
        if (masked) hide<M>(dp, block, key, lane);
        to_operand<Element>(dp, fDSt);
        issue(mma_kv, fP, fDOt(_, _, _, dout_state.index()), dv, true);

        store_ds<M>(fDSt, sDS(_, _, ds_state.index()), warp_key, lane);
        cutlass::arch::fence_view_async_shared();
        cutlass::arch::NamedBarrier::sync(Traits::Consumers * kWarpgroup, kDsReady);
        Tensor dq = partition_fragment_C(mma_q, Shape<_64, Int<kColumns>>{});
        issue(mma_q, fDS(_, _, _, ds_state.index()), fKt, dq, false);
        ds_state.advance();
        warpgroup_wait<1>();
        warpgroup_fence_operand(dv);
        if (thread == 0) smem.dout_empty[dout_state.index()].arrive();
        dout_state.advance();
        issue(mma_kv, fDSt, fQt(_, _, _, q_state.index()), dk, true);
        warpgroup_wait<1>();
        warpgroup_fence_operand(dq);
        send_dq<Traits>(smem, dq, block, dq_state, warpgroup);
        warpgroup_wait<0>();
        warpgroup_fence_operand(dk);
        if (thread == 0) smem.q_empty[q_state.index()].arrive();
        q_state.advance();
      }
      if (thread == 0) smem.kv_empty.arrive();
    }
    for (int n = 0; n < D / 2; ++n) dk(n) *= p.args.softmax_scale;
    wait_for_partial(p.args, work.portion, lane);
    store_gradient<Traits>(p.args, p.args.dk, work.portion, work.kv_head, key, lane, dk);
    store_gradient<Traits>(p.args, p.args.dv, work.portion, work.kv_head, key, lane, dv);
    __syncwarp();
    if (lane == 0) smem.work_empty[work_state.index()].arrive();
    work_state.advance();
  }
  if (thread == 0) {
    smem.dq_empty[warpgroup].wait(dq_state.phase() ^ 1);
    smem.pieces[warpgroup].number = -1;
  }
  __syncwarp();
  if (lane == 0) smem.dq_full[warpgroup].arrive();
}

template <class Traits>
__global__ void __launch_bounds__(Traits::Threads, 1)
    backward_kernel(__grid_constant__ BackwardParams const p) {
  extern __shared__ __align__(1024) char raw[];
  auto& smem = *reinterpret_cast<typename Traits::SharedStorage*>(raw);
  if (threadIdx.x == 0) {
    for (CUtensorMap const* map : {&p.q, &p.dout, &p.k, &p.v}) prefetch_tma_descriptor(map);
    for (int i = 0; i < Traits::QStages; ++i) {
      smem.q_full[i].init(2), smem.q_empty[i].init(Traits::Consumers);
    }
    for (int i = 0; i < Traits::DoutStages; ++i) {
      smem.dout_full[i].init(2), smem.dout_empty[i].init(Traits::Consumers);
    }
    smem.kv_full.init(2), smem.kv_empty.init(Traits::Consumers);
    for (int i = 0; i < Traits::Consumers; ++i) {
      smem.dq_full[i].init(4), smem.dq_empty[i].init(1);
    }
    smem.work_wanted.init(1);
    for (int i = 0; i < kWorkDepth; ++i) {
      smem.work_full[i].init(1), smem.work_empty[i].init(4 * Traits::Consumers + 1);
    }
    cutlass::arch::fence_barrier_init();
  }
  __syncthreads();
  wait_for_earlier_kernels();
  if (threadIdx.x < kWarpgroup) {
    cutlass::arch::warpgroup_reg_dealloc<Traits::ProducerRegisters>();
    if (threadIdx.x < kWarp) {
      if (elect_one_sync()) load_portions<Traits>(p, smem);
    } else if (threadIdx.x < 2 * kWarp) {
      fetch_portions<Traits>(p, smem);
      launch_next_kernel();
    } else if (elect_one_sync()) {
      write_dq<Traits>(p.args, smem, threadIdx.x / kWarp - 2);
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<Traits::ConsumerRegisters>();
    consume_halves<Traits>(p, smem);
  }
}

template <class Traits>
cudaError_t launch_backward(BackwardArgs const& a, cudaStream_t stream) {
  using Element = typename Traits::Element;
  BackwardParams p;
  for (auto const& [map, x, rows] : {std::tuple(&p.q, &a.q, Traits::M),
                                     {&p.dout, &a.dout, Traits::M},
                                     {&p.k, &a.k, Traits::N},
                                     {&p.v, &a.v, Traits::N}}) {
    if (!encode<Element>(*map, *x, rows, Traits::D)) return cudaErrorInvalidValue;
  }
  p.args = a;
  p.kv_heads = static_cast<int32_t>(a.k.heads);
  p.group = static_cast<int32_t>(a.q.heads / a.k.heads);
  p.num_work = a.num_portions * p.kv_heads;
  constexpr int kSmem = sizeof(typename Traits::SharedStorage);
  auto kernel = backward_kernel<Traits>;
  cudaError_t status =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmem);
  if (status != cudaSuccess) return status;
  return launch_early(kernel, dim3(min(a.num_ctas, p.num_work)), Traits::Threads, kSmem, stream, p);
}

}  // namespace ringfa3
