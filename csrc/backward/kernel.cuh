// FlashAttention-3 backward (Appendix B.1 of the paper) over the work units of a plan.
//
// A persistent CTA holds a tile of K and V in shared memory, and dK and dV in registers. It
// iterates over the row blocks that attend to the tile, for all query heads of a work unit. S^T and
// dP^T are computed transposed, so that P^T is the A operand of dV += P^T dO in the registers where
// it was computed, and dS^T that of dK += dS^T Q. For dQ = dS K, dS goes through shared memory. dQ
// is added to global memory in float32.
//
// Where a tile is shared by a pair of CTAs, each computes dK and dV of half of its keys. The CTAs
// exchange dS, and each computes half of the columns of dQ over all keys of the tile, so that half
// as many numbers are added to dQ.
//
// One producer warpgroup gives most of its registers away: its warps load (load.cuh), fetch work
// (work_queue.cuh), and write the dQ of one consumer warpgroup each, or order the additions of the
// consumers (dq_tiles.cuh), or send dS to the peer (mainloop_role_split.cuh).
//
// Letters in shapes: M rows of a block of queries, N keys of a CTA, D head dim, S stages.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "backward/dq_tiles.cuh"
#include "backward/load.cuh"
#include "backward/mainloop_key_split.cuh"
#include "backward/mainloop_role_split.cuh"
#include "backward/shapes.cuh"
#include "backward/work_queue.cuh"
#include "hopper/launch.cuh"
#include "hopper/sync.cuh"

namespace ringfa3 {

using namespace cute;

// One thread, before a __syncthreads.
template <class Shapes>
CUTE_DEVICE void init_barriers(BackwardParams const& p, typename Shapes::SharedStorage& smem) {
  constexpr int kWarps = 4 * Shapes::Consumers;
  constexpr bool kPair = Shapes::Ctas > 1;
  for (CUtensorMap const* map : {&p.q, &p.dout, &p.k, &p.v}) prefetch_tma_descriptor(map);
  for (int i = 0; i < Shapes::QStages; ++i) {
    smem.q_full[i].init(kPair ? 3 : 2), smem.q_empty[i].init(kWarps);
  }
  for (int i = 0; i < Shapes::BlockDepth; ++i) {
    smem.block_ready[i].init(1);
    smem.block_done[i].init(kPair ? kWarps + 1 + (p.args.dq_semaphore != nullptr)
                                  : Shapes::Consumers);
  }
  for (int i = 0; i < Shapes::DoutStages; ++i) {
    smem.dout_full[i].init(kPair ? 1 : 2), smem.dout_empty[i].init(kWarps);
  }
  for (int i = 0; i < Shapes::DsStages; ++i) {
    smem.ds_full[i].init(kPair ? 1 : kWarps);
    if constexpr (!kPair) smem.ds_empty[i].init(kWarps);
  }
  smem.p_full.init(4);
  smem.k_full.init(1 + kPair), smem.k_empty.init(kWarps);
  smem.v_full.init(1), smem.v_empty.init(Shapes::kPolicy.role_split ? 4 : kWarps);
  if constexpr (kPair) {
    smem.sent_full.init(1), smem.sent_empty.init(1);
    smem.dq_granted.init(1), smem.dq_added.init(kWarps);
    for (int i = 0; i < Shapes::DsStages; ++i) {
      smem.ds_stored[i].init(4), smem.peer_ds_full[i].init(1);
    }
  }
  if constexpr (!kPair) {
    for (int i = 0; i < Shapes::Consumers; ++i) {
      smem.dq_full[i].init(4), smem.dq_empty[i].init(1);
    }
  }
  for (int i = 0; i < kWorkDepth; ++i) {
    smem.work_full[i].init(1), smem.work_empty[i].init(kWarps);
  }
  cutlass::arch::fence_barrier_init();
}

template <class Shapes>
__global__ void __launch_bounds__(Shapes::Threads, 1)
    backward_kernel(__grid_constant__ BackwardParams const p) {
  extern __shared__ __align__(1024) char raw[];
  auto& smem = *reinterpret_cast<typename Shapes::SharedStorage*>(raw);
  if (threadIdx.x == 0) init_barriers<Shapes>(p, smem);
  __syncthreads();
  if constexpr (Shapes::Ctas > 1) sync_cluster();  // the peer arrives at barriers of this CTA
  wait_for_earlier_kernels();
  if (threadIdx.x < kWarpgroup) {
    cutlass::arch::warpgroup_reg_dealloc<kProducerRegisters>();
    if (threadIdx.x < kWarp) {
      if (elect_one_sync()) load_blocks<Shapes>(p, smem);
    } else if (threadIdx.x < 2 * kWarp) {
      if (elect_one_sync()) {
        fetch_row_blocks<Shapes>(p, smem);
        launch_next_kernel();
      }
    } else if constexpr (Shapes::kPolicy.role_split) {
      if (threadIdx.x < 3 * kWarp) {
        if (elect_one_sync()) send_ds<Shapes>(smem);
      } else if (p.args.dq_semaphore) {
        if (elect_one_sync()) order_dq<Shapes>(p.args, smem);
      }
    } else {
      if (elect_one_sync()) write_dq<Shapes>(p.args, smem, threadIdx.x / kWarp - 2);
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<kConsumerRegisters>();
    if constexpr (Shapes::kPolicy.role_split) {
      if (cutlass::canonical_warp_group_idx() == 1) {  // uniform
        RoleSplitConsumer<Shapes, true>(p, smem).run();
      } else {
        RoleSplitConsumer<Shapes, false>(p, smem).run();
      }
    } else {
      KeySplitConsumer<Shapes>(p, smem).run();
    }
  }
  if constexpr (Shapes::Ctas > 1) sync_cluster();  // the peer has read and signalled its last
}

template <class Shapes>
cudaError_t launch_backward(BackwardArgs const& a, cudaStream_t stream) {
  using Element = typename Shapes::Element;
  BackwardParams p;
  constexpr int D = Shapes::D, DV = Shapes::DV, kSlabOfK = Shapes::kSlabOfK;
  constexpr int kWidthOfK = Shapes::kNarrowSlabs ? kSlabOfK : D;
  for (auto const& [map, x, rows, width] : {std::tuple(&p.q, &a.q, Shapes::M, D),
                                            {&p.dout, &a.dout, Shapes::M, DV},
                                            {&p.k, &a.k, Shapes::N, kWidthOfK},
                                            {&p.v, &a.v, Shapes::N, DV}}) {
    int const boxes = map == &p.k ? D / width : 1;
    if (!encode<Element>(*map, *x, rows, width, boxes)) return cudaErrorInvalidValue;
  }
  p.args = a;
  p.kv_heads = a.k.heads;
  p.group = a.q.heads / a.k.heads;
  p.num_work = a.num_work_units * p.kv_heads;
  constexpr int kSmem = sizeof(typename Shapes::SharedStorage);
  static_assert(kSmem <= 227 * 1024, "more than an SM has");
  constexpr auto kernel = backward_kernel<Shapes>;
  cudaError_t const status = allow_shared<kernel>(kSmem);
  if (status != cudaSuccess) return status;
  int const clusters = min(max(a.num_ctas / Shapes::Ctas, 1), p.num_work);
  return launch_early(kernel, dim3(clusters * Shapes::Ctas), Shapes::Threads, kSmem, stream, p,
                      Shapes::Ctas);
}

}  // namespace ringfa3
