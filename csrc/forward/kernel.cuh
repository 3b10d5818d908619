// FlashAttention-3 forward (Algorithms 1 and 2 of the paper) over the tiles of a plan.
//
// A persistent CTA runs work items from a queue. One producer warpgroup gives most of its registers
// away: its first warp streams Q, K and V into shared memory (load.cuh), its second fetches work
// items (work_queue.cuh). The consumer warpgroups compute (consume.cuh).
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "forward/consume.cuh"
#include "forward/load.cuh"
#include "forward/shapes.cuh"
#include "forward/work_queue.cuh"
#include "hopper/launch.cuh"

namespace ringfa3 {

using namespace cute;

// One thread, before a __syncthreads.
template <class Shapes>
CUTE_DEVICE void init_barriers(ForwardParams<Shapes> const& p,
                               typename Shapes::SharedStorage& smem) {
  constexpr int kWarps = 4 * Shapes::Consumers;
  for (CUtensorMap const* map : {&p.q, &p.k, &p.v, &p.out}) prefetch_tma_descriptor(map);
  for (int i = 0; i < Shapes::QStages; ++i) {
    for (int part = 0; part < Shapes::QParts; ++part) {
      smem.q_full[i][part].init(1), smem.q_empty[i][part].init(kWarps / Shapes::QParts);
    }
  }
  smem.work_wanted.init(1);
  for (int i = 0; i < Shapes::Stages; ++i) {
    smem.k_full[i].init(1), smem.v_full[i].init(1);
    smem.k_empty[i].init(kWarps), smem.v_empty[i].init(kWarps);
  }
  for (int i = 0; i < kWorkDepth; ++i) {  // the loader releases work items, too
    smem.work_full[i].init(1), smem.work_empty[i].init(kWarps + Shapes::Producers);
    smem.work[i].head = kNoWork;
  }
  cutlass::arch::fence_barrier_init();
}

template <class Shapes, class Consumer = ForwardConsumer<Shapes>>
__global__ void __launch_bounds__(Shapes::Threads, 1)
    forward_kernel(__grid_constant__ ForwardParams<Shapes> const p) {
  extern __shared__ __align__(1024) char raw[];
  auto& smem = *reinterpret_cast<typename Shapes::SharedStorage*>(raw);
  if (threadIdx.x == 0) init_barriers<Shapes>(p, smem);
  __syncthreads();
  if (threadIdx.x < kWarpgroup) {
    cutlass::arch::warpgroup_reg_dealloc<Shapes::kRegisters.producer>();
    if (threadIdx.x < kWarp) {
      if (elect_one_sync()) load_tiles<Shapes>(p, smem);
    } else if (threadIdx.x < 2 * kWarp) {
      fetch_work<Shapes>(p, smem);
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<Shapes::kRegisters.consumer>();
    Consumer(p, smem).run();
  }
}

inline ForwardArgs const& common_args(ForwardArgs const& args) { return args; }
inline ForwardArgs const& common_args(QuantisedForwardArgs const& args) { return args.forward; }

// `kernel` is named by the caller: nvcc compiles no kernel that is a default argument of a
// template.
template <class Shapes, void (*kernel)(ForwardParams<Shapes>)>
cudaError_t launch_forward(typename Shapes::Args const& args, cudaStream_t stream) {
  using Element = typename Shapes::Element;
  using ElementQK = typename Shapes::ElementQK;
  using ElementPV = typename Shapes::ElementPV;
  ForwardArgs const& a = common_args(args);
  int const heads = a.q.heads;
  ForwardParams<Shapes> p{.q = {},
                          .k = {},
                          .v = {},
                          .out = {},
                          .args = a,
                          .heads = heads,
                          .group = heads / a.k.heads,
                          .num_work = a.num_tiles * heads,
                          .scale_log2 = a.softmax_scale * kLog2e,
                          .scales = {},
                          .narrow = {}};
  if constexpr (Shapes::Quantised) p.scales = args.scales;
  constexpr int kBlocks = kKeyTile / Shapes::N;  // of a tile of V
  bool const v_fits = Shapes::QuantisedV
                          ? encode<ElementPV>(p.v, a.v, Shapes::DV, Shapes::N, kBlocks)
                          : encode<ElementPV>(p.v, a.v, Shapes::N, Shapes::DV);
  if (!v_fits || !encode<ElementQK>(p.q, a.q, Shapes::M / Shapes::QParts, Shapes::D) ||
      !encode<ElementQK>(p.k, a.k, Shapes::N, Shapes::D) ||
      !encode<Element>(p.out, a.out, kWarpRows, Shapes::DV)) {
    return cudaErrorInvalidValue;
  }
  if constexpr (Shapes::kNarrows) {
    constexpr int kRows = Shapes::kPolicy.narrow_keys;
    if (!encode<ElementQK>(p.narrow.k, a.k, kRows, Shapes::D) ||
        !encode<ElementPV>(p.narrow.v, a.v, kRows, Shapes::DV)) {
      return cudaErrorInvalidValue;
    }
  }
  static_assert(registers_suffice(Shapes::kRegisters, Shapes::Producers, Shapes::Consumers));
  constexpr int kSmem = sizeof(typename Shapes::SharedStorage);
  static_assert(kSmem <= 227 * 1024, "more than an SM has");
  cudaError_t const status = allow_shared<kernel>(kSmem);
  if (status != cudaSuccess) return status;
  int const grid = min(a.num_ctas, p.num_work);
  kernel<<<grid, Shapes::Threads, kSmem, stream>>>(p);
  return cudaGetLastError();
}

template <class Shapes>
cudaError_t launch_forward(typename Shapes::Args const& args, cudaStream_t stream) {
  return launch_forward<Shapes, forward_kernel<Shapes>>(args, stream);
}

}  // namespace ringfa3
