// Clusters: CTAs that run concurrently and access each other's shared memory.
#pragma once

#include <cute/arch/cluster_sm90.hpp>
#include <cute/tensor.hpp>
#include <cutlass/arch/barrier.h>

namespace ringfa3 {

using namespace cute;

// The shared-memory address, for instructions on a cluster, at which CTA `rank` has `position`.
CUTE_DEVICE uint32_t address_in(uint32_t rank, void const* position) {
  return set_block_rank(cast_smem_ptr_to_uint(position), rank);
}

// All threads of the cluster: each waits until all have come, or have ended.
CUTE_DEVICE void sync_cluster() {
  asm volatile(
      "barrier.cluster.arrive.release;\n"
      "barrier.cluster.wait.acquire;\n" ::
          : "memory");
}

// One thread: copies `bytes` of shared memory to `to` in CTA `rank`, where they complete `full`.
CUTE_DEVICE void copy_to_cta(uint32_t rank, void* to, void const* from, int bytes,
                             cutlass::arch::ClusterTransactionBarrier const& full) {
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, "
      "[%3];" ::"r"(address_in(rank, to)),
      "r"(cast_smem_ptr_to_uint(from)), "r"(bytes), "r"(address_in(rank, &full))
      : "memory");
}

// One thread: writes a word to `to` in CTA `rank`, where its 4 bytes complete `full`.
CUTE_DEVICE void send_word(uint32_t rank, int32_t* to, int32_t value,
                           cutlass::arch::ClusterTransactionBarrier const& full) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.s32 [%0], %1, [%2];" ::"r"(
          address_in(rank, to)),
      "r"(value), "r"(address_in(rank, &full))
      : "memory");
}

}  // namespace ringfa3
