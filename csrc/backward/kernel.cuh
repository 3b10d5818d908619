// FlashAttention-3 backward (Appendix B.1 of the paper) over the work units of a plan.
//
// A persistent CTA keeps a tile of K and V in shared memory and iterates over the row blocks that
// see it, for all query heads of a work unit, with dK and dV in registers. S^T and dP^T are
// computed transposed, so that P^T is the A operand of dV += P^T dO in the registers where it was
// computed, and dS^T that of dK += dS^T Q. For dQ = dS K, dS goes through shared memory. dQ is
// added to global memory in float32: by writer warps where tiles have 128 keys or turns are kept,
// else by the consumers.
//
// One producer warpgroup gives most of its registers away: its warps load (load.cuh), fetch work
// (work_queue.cuh), and write the dQ of one consumer warpgroup each (dq_tiles.cuh).
//
// Letters in shapes: M rows of a block of queries, N keys of a tile, D head dim, S stages.
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
  for (CUtensorMap const* map : {&p.q, &p.dout, &p.k, &p.v}) prefetch_tma_descriptor(map);
  for (int i = 0; i < Shapes::QStages; ++i) {
    smem.q_full[i].init(2), smem.q_empty[i].init(kWarps);
  }
  for (int i = 0; i < Shapes::BlockDepth; ++i) {
    smem.block_ready[i].init(1);
    smem.block_done[i].init(Shapes::kPolicy.role_split ? kWarps : Shapes::Consumers);
  }
  for (int i = 0; i < Shapes::DoutStages; ++i) {
    smem.dout_full[i].init(2), smem.dout_empty[i].init(kWarps);
  }
  for (int i = 0; i < Shapes::DsStages; ++i) {
    smem.ds_full[i].init(Shapes::kPolicy.role_split ? 4 : kWarps);
    smem.ds_empty[i].init(kWarps);
  }
  smem.p_full.init(4);
  smem.k_full.init(1), smem.k_empty.init(kWarps);
  smem.v_full.init(1), smem.v_empty.init(kWarps);
  for (int i = 0; i < Shapes::Consumers; ++i) {
    smem.dq_full[i].init(4), smem.dq_empty[i].init(1);
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
  if constexpr (!Shapes::kPolicy.role_split) {
    if (threadIdx.x < 2 * 64) {  // two matrices (8, 8) of `SmemOnes`
      bool const one = threadIdx.x < 64 && threadIdx.x % 8 < 3;
      smem.ones[threadIdx.x] = bfloat16_t(one ? 1.f : 0.f);
    }
    cutlass::arch::fence_view_async_shared();
  }
  __syncthreads();
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
    } else {
      if (elect_one_sync()) write_dq<Shapes>(p.args, smem, threadIdx.x / kWarp - 2);
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<kConsumerRegisters>();
    if constexpr (Shapes::kPolicy.role_split) {
      RoleSplitConsumer<Shapes>(p, smem).run();
    } else {
      KeySplitConsumer<Shapes>(p, smem).run();
    }
  }
}

template <class Shapes>
cudaError_t launch_backward(BackwardArgs const& a, cudaStream_t stream) {
  using Element = typename Shapes::Element;
  BackwardParams p;
  for (auto const& [map, x, rows] : {std::tuple(&p.q, &a.q, Shapes::M),
                                     {&p.dout, &a.dout, Shapes::M},
                                     {&p.k, &a.k, Shapes::N},
                                     {&p.v, &a.v, Shapes::N}}) {
    if (!encode<Element>(*map, *x, rows, Shapes::D)) return cudaErrorInvalidValue;
  }
  p.args = a;
  p.kv_heads = static_cast<int32_t>(a.k.heads);
  p.group = static_cast<int32_t>(a.q.heads / a.k.heads);
  p.num_work = a.num_work_units * p.kv_heads;
  constexpr int kSmem = sizeof(typename Shapes::SharedStorage);
  static_assert(kSmem <= 227 * 1024, "more than an SM has");
  auto kernel = backward_kernel<Shapes>;
  static std::atomic<uint64_t> allowed;
  cudaError_t const status = allow_shared(kernel, kSmem, allowed);
  if (status != cudaSuccess) return status;
  return launch_early(kernel, dim3(min(a.num_ctas, p.num_work)), Shapes::Threads, kSmem, stream, p);
}

}  // namespace ringfa3
