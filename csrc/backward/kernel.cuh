// FlashAttention-3 backward (Appendix B.1 of the paper) over the key tiles of a plan.
//
// A CTA keeps a tile of K and V and walks the blocks of rows that see it, for all query heads of a
// KV head, with dK and dV in registers. S^T and dP^T are computed transposed, so that P^T already
// is an operand of dV += P^T dO, and dS^T one of dK += dS^T Q. For dQ = dS K, dS goes through
// shared memory; dQ is added to global memory in float32, by warps of its own where tiles have 128
// keys or turns are kept.
//
// Letters in shapes: M rows of a block of queries, N keys of a tile, D head dim, S stages.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "backward/mainloop_key_split.cuh"
#include "backward/mainloop_role_split.cuh"
#include "backward/work_queue.cuh"
#include "hopper/launch.cuh"

namespace ringfa3 {

using namespace cute;

template <class Traits>
__global__ void __launch_bounds__(Traits::Threads, 1)
    backward_kernel(__grid_constant__ BackwardParams const p) {
  extern __shared__ __align__(1024) char raw[];
  auto& smem = *reinterpret_cast<typename Traits::SharedStorage*>(raw);
  constexpr int kWarps = 4 * Traits::Consumers;
  if (threadIdx.x == 0) {
    for (CUtensorMap const* map : {&p.q, &p.dout, &p.k, &p.v}) prefetch_tma_descriptor(map);
    for (int i = 0; i < Traits::QStages; ++i) {
      smem.q_full[i].init(2), smem.q_empty[i].init(kWarps);
    }
    for (int i = 0; i < Traits::BlockDepth; ++i) {
      smem.block_ready[i].init(1), smem.block_done[i].init(kWarps);
    }
    for (int i = 0; i < Traits::DoutStages; ++i) {
      smem.dout_full[i].init(2), smem.dout_empty[i].init(kWarps);
    }
    for (int i = 0; i < Traits::DsStages; ++i) smem.ds_full[i].init(Traits::Roles ? 4 : kWarps);
    smem.p_full.init(4);
    smem.k_full.init(1), smem.k_empty.init(kWarps);
    smem.v_full.init(1), smem.v_empty.init(kWarps);
    for (int i = 0; i < Traits::Consumers; ++i) {
      smem.dq_full[i].init(4), smem.dq_empty[i].init(1);
    }
    for (int i = 0; i < kWorkDepth; ++i) {
      smem.work_full[i].init(1), smem.work_empty[i].init(kWarps);
    }
    cutlass::arch::fence_barrier_init();
  }
  __syncthreads();
  wait_for_earlier_kernels();
  if (threadIdx.x < kWarpgroup) {
    cutlass::arch::warpgroup_reg_dealloc<Traits::ProducerRegisters>();
    if (threadIdx.x < kWarp) {
      if (elect_one_sync()) load_blocks<Traits>(p, smem);
    } else if (threadIdx.x < 2 * kWarp) {
      if (elect_one_sync()) {
        plan_blocks<Traits>(p, smem);
        launch_next_kernel();
      }
    } else {
      if (elect_one_sync()) write_dq<Traits>(p.args, smem, threadIdx.x / kWarp - 2);
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<Traits::ConsumerRegisters>();
    if constexpr (Traits::Roles) {
      consume_roles<Traits>(p, smem);
    } else {
      consume_halves<Traits>(p, smem);
    }
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
  p.num_work = a.num_work_units * p.kv_heads;
  constexpr int kSmem = sizeof(typename Traits::SharedStorage);
  static_assert(kSmem <= 227 * 1024, "more than an SM has");
  auto kernel = backward_kernel<Traits>;
  static std::atomic<uint64_t> allowed;
  cudaError_t const status = allow_shared(kernel, kSmem, allowed);
  if (status != cudaSuccess) return status;
  return launch_early(kernel, dim3(min(a.num_ctas, p.num_work)), Traits::Threads, kSmem, stream, p);
}

}  // namespace ringfa3
