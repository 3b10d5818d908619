// The order in which the consumer warpgroups issue their products, by named barriers.
#pragma once

#include <cutlass/arch/barrier.h>

#include "hopper/warp.cuh"

namespace ringfa3 {

// As CUTLASS's OrderedSequenceBarrier: a warpgroup waits until the one before it has arrived,
// issues its products, and arrives for the next one. Warpgroup w waits at named barrier w; the
// barriers [Consumers, 2 Consumers) belong to one warpgroup each. Without `PingPong` nobody waits.
template <int Consumers, bool PingPong>
struct WarpgroupOrder {
  int const warpgroup;

  __device__ void wait() const {
    if constexpr (PingPong) cutlass::arch::NamedBarrier::sync(2 * kWarpgroup, warpgroup);
  }
  __device__ void arrive() const {
    if constexpr (PingPong) {
      int const next = (warpgroup + 1) % Consumers;
      cutlass::arch::NamedBarrier::arrive(2 * kWarpgroup, next);
    }
  }
  // The warpgroup alone.
  __device__ void sync() const {
    cutlass::arch::NamedBarrier::sync(kWarpgroup, Consumers + warpgroup);
  }
};

}  // namespace ringfa3
