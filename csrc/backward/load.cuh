// The producer: streams row blocks, and the K and V of work units, into shared memory.
#pragma once

#include "backward/shapes.cuh"
#include "hopper/cluster.cuh"
#include "hopper/pipeline.cuh"
#include "plan/row_blocks.h"

namespace ringfa3 {

using namespace cute;

// One thread: loads LSE (`which` = 0) or D (1) of a block's rows; the bytes complete `full`.
template <class Shapes>
CUTE_DEVICE void load_statistic(BackwardParams const& p,
                                cutlass::arch::ClusterTransactionBarrier& full,
                                typename Shapes::Statistic (&to)[Shapes::M], int target,
                                int which) {
  auto const* const from =
      static_cast<typename Shapes::Statistic const*>(p.args.padded.statistics) +
      (int64_t{2} * target + which) * Shapes::M;
  full.arrive_and_expect_tx(sizeof(to));
  SM90_BULK_COPY_G2S::copy(from, reinterpret_cast<uint64_t*>(&full), to, sizeof(to));
}

// One thread: loads Q, LSE, dO and D of every block as soon as a stage is free. With the first
// block of a work unit it loads V, once the unit before has ended its last dP, and K, once that
// unit has ended. In a pair it also loads this CTA's half of the columns of the peer's K.
template <class Shapes>
CUTE_DEVICE void load_blocks(BackwardParams const& p, typename Shapes::SharedStorage& smem) {
  constexpr int M = Shapes::M, N = Shapes::N, D = Shapes::D, DV = Shapes::DV;
  constexpr int kSlabOfK = Shapes::kSlabOfK;
  constexpr bool kDeltaWithQ = Shapes::kPolicy.role_split;  // so that dO is freed early
  PipelineState<1> kv;
  for (uint32_t count = 0;; ++count) {
    PipelineState<Shapes::QStages> const q{count};
    PipelineState<Shapes::DoutStages> const dout{count};
    PipelineState<Shapes::BlockDepth> const stage{count};
    smem.block_ready[stage.index()].wait(stage.phase());
    RowBlock const& block = smem.blocks[stage.index()];
    if (block.head < 0) return;
    bool const first = block.flags & kFirstBlock;
    smem.q_empty[q.index()].wait(q.phase() ^ 1);
    auto& q_full = smem.q_full[q.index()];
    load_box<M, D>(p.q, q_full, smem.q + q.index() * M * D, block.token, block.head);
    load_statistic<Shapes>(p, q_full, smem.lse[q.index()], block.target, 0);
    if constexpr (kDeltaWithQ) {
      load_statistic<Shapes>(p, q_full, smem.delta[q.index()], block.target, 1);
    }
    if (first) {
      smem.v_empty.wait(kv.phase() ^ 1);
      load_box<N, DV>(p.v, smem.v_full, smem.v, block.key_row, block.head / p.group);
    }
    smem.dout_empty[dout.index()].wait(dout.phase() ^ 1);
    auto& dout_full = smem.dout_full[dout.index()];
    load_box<M, DV>(p.dout, dout_full, smem.dout + dout.index() * M * DV, block.token, block.head);
    if constexpr (!kDeltaWithQ) {
      load_statistic<Shapes>(p, dout_full, smem.delta[dout.index()], block.target, 1);
    }
    if (first) {
      smem.k_empty.wait(kv.phase() ^ 1);
      load_box<N, D, kSlabOfK>(p.k, smem.k_full, smem.k, block.key_row, block.head / p.group);
      if constexpr (Shapes::Ctas > 1) {
        int const rank = block_rank_in_cluster();
        load_box<N, D / 2, kSlabOfK>(p.k, smem.k_full, smem.peer_k, block.key_row + (rank ? -N : N),
                                     block.head / p.group, rank * (D / 2));
      }
      kv.advance();
    }
  }
}

}  // namespace ringfa3
