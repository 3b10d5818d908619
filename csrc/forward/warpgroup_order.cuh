// The order in which the consumer warpgroups issue their products, by named barriers.
#pragma once

#include "forward/shapes.cuh"

namespace ringfa3 {

// As CUTLASS's OrderedSequenceBarrier: a warpgroup waits until the one before it has arrived,
// issues its products, and arrives for the next one. Warpgroup w waits at named barrier w; the
// barriers [Consumers, 2 Consumers) belong to one warpgroup each.
template <class Shapes>
struct WarpgroupOrder {
  int const warpgroup;

  __device__ void wait() const {
    if constexpr (Shapes::kPolicy.ping_pong)
      cutlass::arch::NamedBarrier::sync(2 * kWarpgroup, warpgroup);
  }
  __device__ void arrive() const {
    if constexpr (Shapes::kPolicy.ping_pong) {
      int const next = (warpgroup + 1) % Shapes::Consumers;
      cutlass::arch::NamedBarrier::arrive(2 * kWarpgroup, next);
    }
  }
  // The warpgroup alone.
  __device__ void sync() const {
    cutlass::arch::NamedBarrier::sync(kWarpgroup, Shapes::Consumers + warpgroup);
  }
};

}  // namespace ringfa3
