// FlashAttention-3 forward (Algorithms 1 and 2 of the paper) over the tiles of a plan.
//
// A producer warp streams Q, K and V through shared memory by TMA. Each consumer warpgroup owns 64
// query rows; inside one, S(j+1) = Q K^T is issued before P(j) V, beside which softmax(j+1) begins,
// and between them a ring of named barriers lets one warpgroup's softmax run under another's matrix
// products.
//
// Letters in shapes: M rows of a tile, N keys of a block, D head dim, S stages.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "forward/epilogue.cuh"
#include "hopper/launch.cuh"
#include "hopper/wgmma.cuh"
#include "forward/work_queue.cuh"
#include "hopper/sync.cuh"
#include "forward/softmax.cuh"
#include "forward/shapes.cuh"

namespace ringfa3 {

using namespace cute;

// One thread: streams the Q of every tile and the K and V of its blocks. V comes one block behind
// K, as the consumers want them.
template <class Traits>
CUTE_DEVICE void load_tiles(ForwardParams<Traits> const& p, typename Traits::SharedStorage& smem) {
  constexpr int M = Traits::M, N = Traits::N, D = Traits::D;
  StageState<Traits::Stages> k_state;
  StageState<Traits::QStages> q_state;
  StageState<kWorkDepth> work_state;
  uint32_t here = 1;  // bit n: the keys of word n have arrived; 0 is no word
  while (true) {
    smem.work_full[work_state.index()].wait(work_state.phase());
    Work& work = smem.work[work_state.index()];
    if (work.head < 0) return;
    auto load_q = [&] {
      smem.q_empty[q_state.index()].wait(q_state.phase() ^ 1);
      load_box<M, D>(p.q, smem.q_full[q_state.index()], smem.q + q_state.index() * M * D,
                     work.tile.row0, work.head);
      q_state.advance();
    };
    if constexpr (Traits::QStages > 1) load_q();
    auto load_v = [&](int row) {
      auto const v_state = k_state.before();
      smem.v_empty[v_state.index()].wait(v_state.phase() ^ 1);
      load_box<N, D>(p.v, smem.v_full[v_state.index()], smem.v + v_state.index() * N * D, row,
                     work.kv_head);
    };
    BlockIterator<N> block(work, p.args.spans);
    int visit = -1, key_row = 0;  // of the block's span
    int behind = -1;              // row of the last block, whose V is to be loaded
    bool asked = false;
    while (block.next()) {
      if (!asked && block.nearly_done(kBlocksAhead)) {
        smem.work_wanted.arrive();
        asked = true;
      }
      if (visit != block.index) {
        visit = block.index;
        Visit const v = block.visit();
        key_row = v.key_row;
        if (!(here >> v.arrival & 1)) {
          if (wait_for_arrival(p.args.arrivals + v.arrival)) {
            asm volatile("fence.proxy.async;" ::: "memory");  // before TMA loads what has arrived
            here |= 1u << v.arrival;
          } else {
            key_row = static_cast<int>(p.args.k.tokens);  // nothing is read past the last row
            work.called_off = true;
          }
        }
      }
      int const row = key_row + block.start;
      smem.k_empty[k_state.index()].wait(k_state.phase() ^ 1);
      load_box<N, D>(p.k, smem.k_full[k_state.index()], smem.k + k_state.index() * N * D, row,
                     work.kv_head);
      if (behind >= 0) {
        load_v(behind);
      } else if constexpr (Traits::QStages == 1) {
        load_q();  // behind the first K, which has room before the tile before is done with Q
      }
      k_state.advance();
      behind = row;
      block.done();
    }
    load_v(behind);
    smem.work_empty[work_state.index()].arrive();
    work_state.advance();
  }
}

// What consumers do with the stages that they give back: nothing, `load_tiles` fills them again.
struct LeftToProducer {
  CUTE_DEVICE void q() const {}
  CUTE_DEVICE void k() const {}
  CUTE_DEVICE void v() const {}
};

template <class Traits, class Refill = LeftToProducer>
CUTE_DEVICE void attend_tiles(ForwardParams<Traits> const& p, typename Traits::SharedStorage& smem,
                              Refill const& refill = {}) {
  using Element = typename Traits::Element;
  constexpr int N = Traits::N, D = Traits::D, Stages = Traits::Stages;
  constexpr int Consumers = Traits::Consumers;
  int const thread = threadIdx.x % kWarpgroup;
  int const warpgroup = cutlass::canonical_warp_group_idx() - Traits::Producers;  // known uniform
  int const lane = thread % kWarp;
  int const warp = cutlass::canonical_warp_idx_sync() - 4 * Traits::Producers;  // of the consumers
  int const row = kWarpRows * warp + lane / 4;                                  // and row + 8
  float const scale_log2 = p.args.softmax_scale * kLog2e;

  typename Traits::MmaS mma_s;
  typename Traits::MmaO mma_o;
  Tensor sQ = local_tile(make_tensor(make_smem_ptr(smem.q), typename Traits::SmemQ{}),
                         Shape<_64, Int<D>>{}, make_coord(warpgroup, _0{}, _));  // (64, D, S)
  Tensor sK = make_tensor(make_smem_ptr(smem.k), typename Traits::SmemK{});      // (N, D, S)
  Tensor sV = make_tensor(make_smem_ptr(smem.v), typename Traits::SmemV{});      // (D, N, S)
  auto thread_s = mma_s.get_slice(thread);
  auto thread_o = mma_o.get_slice(thread);
  Tensor fQ = thread_s.partition_fragment_A(sQ);
  Tensor fK = thread_s.partition_fragment_B(sK);
  Tensor fV = thread_o.partition_fragment_B(sV);
  Tensor s = partition_fragment_C(mma_s, Shape<_64, Int<N>>{});
  Tensor prob = make_tensor_like(s);  // P, on its way from S to an operand
  Tensor o = partition_fragment_C(mma_o, Shape<_64, Int<D>>{});
  Tensor fP = make_tensor<Element>(Shape<Shape<_2, _2, _2>, _1, Int<N / 16>>{});

  // Warpgroups issue their products one after the other: named barrier w is the turn of w.
  auto my_turn = [&] {
    if constexpr (Traits::PingPong) cutlass::arch::NamedBarrier::sync(2 * kWarpgroup, warpgroup);
  };
  auto next_turn = [&] {
    if constexpr (Traits::PingPong) {
      cutlass::arch::NamedBarrier::arrive(2 * kWarpgroup, (warpgroup + 1) % Consumers);
    }
  };

  // Every warp for itself: it takes no register to know who does it.
  auto give_back = [](cutlass::arch::ClusterBarrier& empty) {
    if (elect_one_sync()) empty.arrive();
  };

  StageState<Stages> k_state, v_state;
  StageState<Traits::QStages> q_state;
  StageState<kWorkDepth> work_state;
  bool fresh = true;  // O holds nothing of this tile's rows yet
  float factor[2];    // of O, for each row
  auto scale_output = [&] {
    CUTE_UNROLL
    for (int n = 0; n < D / 2; n += 4) {
      o(n) *= factor[0], o(n + 1) *= factor[0], o(n + 2) *= factor[1], o(n + 3) *= factor[1];
    }
  };
  auto issue_scores = [&] {
    issue(mma_s, fQ(_, _, _, q_state.index()), fK(_, _, _, k_state.index()), s, false);
  };
  auto issue_output = [&] {
    smem.v_full[v_state.index()].wait(v_state.phase());
    issue(mma_o, fP, fV(_, _, _, v_state.index()), o, !fresh);
  };
  // The next scores and the last P V; without overlap one after the other.
  auto issue_both = [&] {
    if constexpr (Traits::Overlap) {
      issue_scores();
      issue_output();
    } else {
      issue_output();
      warpgroup_wait<0>();
      warpgroup_fence_operand(o);
      issue_scores();
    }
  };
  // P is 0 where V is not the span's, but 0 x inf would be NaN. Every warpgroup clears for itself.
  int owned = N;
  auto clear_foreign_v = [&] {
    if (owned == N) return;
    smem.v_full[v_state.index()].wait(v_state.phase());
#pragma unroll 1  // rare
    for (int i = thread; i < (N - owned) * D; i += kWarpgroup) {
      sV(i % D, owned + i / D, v_state.index()) = Element(0);
    }
    cutlass::arch::fence_view_async_shared();
    cutlass::arch::NamedBarrier::sync(kWarpgroup, Consumers + warpgroup);
  };
  auto scores_done = [&] {
    warpgroup_fence_operand(s);
    give_back(smem.k_empty[k_state.index()]);
    refill.k();
    k_state.advance();
  };
  auto output_done = [&] {
    warpgroup_fence_operand(o);
    give_back(smem.v_empty[v_state.index()]);
    refill.v();
    v_state.advance();
  };

  auto wait_for_k = [&] { smem.k_full[k_state.index()].wait(k_state.phase()); };

  constexpr int kSize = N / 2, kEarly = Traits::kEarly;  // of a thread's part of S
  smem.work_full[0].wait(0);
  bool another = smem.work[0].head >= 0;
  if (!another) return;
  if (warpgroup == Consumers - 1) next_turn();
  BlockIterator<N> block(smem.work[0], p.args.spans);
  block.next();
  smem.q_full[0].wait(0);
  wait_for_k();
  my_turn();
  issue_scores();
  next_turn();
  warpgroup_wait<0>();
  scores_done();
  while (another) {
    // The scores of the first block are here.
    Work const& work = smem.work[work_state.index()];
    bool const first = work.tile.flags & kFirst;
    float earlier[2];  // LSE; it and O are waited for behind the first softmax
    if (!first) load_partial(p, work, row, lane, o, earlier);
    RowState rows;
    int run = block.plain();  // blocks from this one on that need no mask
    if (run == 0) hide(s, block, row, lane);
    bool over[2] = {true, true};
    rows.raise(s, prob, over, factor, scale_log2);
    to_operand<Element>(prob, fP);
    fresh = first;
    if (!first) {
      rows.resume(earlier, factor, lane);
      scale_output();
      __syncwarp();  // all lanes of a row have its LSE, of which one writes the next
    }
    bool more;
    auto q_done = [&] {  // it has had its last scores
      give_back(smem.q_empty[q_state.index()]);
      refill.q();
      q_state.advance();
    };
    auto next_tile = [&] {
      work_state.advance();
      smem.work_full[work_state.index()].wait(work_state.phase());
      another = smem.work[work_state.index()].head >= 0;
      if (another) block.begin_work(smem.work[work_state.index()]);
    };
    auto next_block = [&] {
      owned = block.owned();
      more = true;
      if (--run > 0) {
        block.follow();
      } else {
        block.done();
        more = block.next();
        if (more) run = block.plain();
      }
      if (more) {
        wait_for_k();
      } else {
        if constexpr (Traits::kFreesQAhead) q_done();
        if constexpr (Traits::kLooksAhead) next_tile();
      }
    };
    next_block();
    while (more) {
      // P V of the last block runs beside the scores of this one, and beside their softmax.
      clear_foreign_v();
      my_turn();
      issue_both();
      next_turn();
      fresh = false;
      warpgroup_wait<Traits::Overlap ? 1 : 0>();
      scores_done();
      if (run == 0) hide(s, block, row, lane);
      float sum[2][2] = {};
      rows.template exponentiate<0, kEarly>(s, prob, sum, scale_log2);
      next_block();  // branches, and so keeps these exponentials above the wait
      warpgroup_wait<0>();
      output_done();
      to_operand<Element, 0, kEarly>(prob, fP);
      rows.template exponentiate<kEarly, kSize>(s, prob, sum, scale_log2);
      to_operand<Element, kEarly, kSize>(prob, fP);
      if (!rows.take(sum, over)) {
        rows.raise(s, prob, over, factor, scale_log2);
        to_operand<Element>(prob, fP);
        scale_output();
      }
    }

    // The tile ends. The first scores of the next one come before its last P V, if Q can be there.
    clear_foreign_v();
    if constexpr (!Traits::kFreesQAhead) q_done();
    if constexpr (!Traits::kLooksAhead) next_tile();
    auto close_rows = [&] { finish_rows<Traits>(p, work, row, lane, rows, factor); };
    if (Traits::QStages > 1 && another) {
      smem.q_full[q_state.index()].wait(q_state.phase());
      wait_for_k();
      my_turn();
      issue_both();
      next_turn();
      close_rows();
      warpgroup_wait<0>();
      scores_done();
    } else {
      my_turn();
      issue_output();
      next_turn();
      if constexpr (Traits::QStages > 1) close_rows();
      warpgroup_wait<0>();
    }
    output_done();
    if constexpr (Traits::QStages == 1) close_rows();  // no registers are left beside a product
    scale_output();
    store_output<Traits>(p, work, warp, lane, o, smem.o + kWarpRows * D * warp);
    __syncwarp();
    give_back(smem.work_empty[work_state.before().index()]);
    if (Traits::QStages == 1 && another) {
      smem.q_full[q_state.index()].wait(q_state.phase());
      wait_for_k();
      my_turn();
      issue_scores();
      next_turn();
      warpgroup_wait<0>();
      scores_done();
    }
  }
  if (warpgroup == 0) my_turn();  // the turn that nobody takes
  tma_store_wait<0>();            // shared memory is the CTA's until then
}

// One thread, before the others go on.
template <class Traits>
CUTE_DEVICE void begin_barriers(ForwardParams<Traits> const& p,
                                typename Traits::SharedStorage& smem) {
  constexpr int kConsumerWarps = 4 * Traits::Consumers;
  for (CUtensorMap const* map : {&p.q, &p.k, &p.v, &p.out}) prefetch_tma_descriptor(map);
  for (int i = 0; i < Traits::QStages; ++i) {
    smem.q_full[i].init(1), smem.q_empty[i].init(kConsumerWarps);
  }
  smem.work_wanted.init(1);
  for (int i = 0; i < Traits::Stages; ++i) {
    smem.k_full[i].init(1), smem.v_full[i].init(1);
    smem.k_empty[i].init(kConsumerWarps), smem.v_empty[i].init(kConsumerWarps);
  }
  for (int i = 0; i < kWorkDepth; ++i) {  // emptied by who loads, too
    smem.work_full[i].init(1), smem.work_empty[i].init(kConsumerWarps + Traits::Producers);
  }
  cutlass::arch::fence_barrier_init();
}

template <class Traits>
__global__ void __launch_bounds__(Traits::Threads, 1)
    forward_kernel(__grid_constant__ ForwardParams<Traits> const p) {
  extern __shared__ __align__(1024) char raw[];
  auto& smem = *reinterpret_cast<typename Traits::SharedStorage*>(raw);
  if (threadIdx.x == 0) begin_barriers<Traits>(p, smem);
  __syncthreads();
  if (threadIdx.x < kWarpgroup) {
    cutlass::arch::warpgroup_reg_dealloc<Traits::ProducerRegisters>();
    if (threadIdx.x < kWarp) {
      if (elect_one_sync()) load_tiles<Traits>(p, smem);
    } else if (threadIdx.x < 2 * kWarp) {
      fetch_work<Traits>(p, smem);
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<Traits::ConsumerRegisters>();
    attend_tiles<Traits>(p, smem);
  }
}

template <class Traits>
cudaError_t launch_forward(ForwardArgs const& a, cudaStream_t stream,
                           void (*kernel)(ForwardParams<Traits>) = forward_kernel<Traits>) {
  using Element = typename Traits::Element;
  int const heads = static_cast<int>(a.q.heads);
  ForwardParams<Traits> p{.q = {},
                          .k = {},
                          .v = {},
                          .out = {},
                          .args = a,
                          .heads = heads,
                          .group = heads / static_cast<int>(a.k.heads),
                          .num_work = a.num_tiles * heads};
  if (!encode<Element>(p.q, a.q, Traits::M, Traits::D) ||
      !encode<Element>(p.k, a.k, Traits::N, Traits::D) ||
      !encode<Element>(p.v, a.v, Traits::N, Traits::D) ||
      !encode<Element>(p.out, a.out, kWarpRows, Traits::D)) {
    return cudaErrorInvalidValue;
  }
  constexpr int kSmem = sizeof(typename Traits::SharedStorage);
  static_assert(kSmem <= 227 * 1024, "more than an SM has");
  static std::atomic<uint64_t> allowed;
  cudaError_t const status = allow_shared(kernel, kSmem, allowed);
  if (status != cudaSuccess) return status;
  int const grid = min(a.num_ctas, p.num_work);
  kernel<<<grid, Traits::Threads, kSmem, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace ringfa3
