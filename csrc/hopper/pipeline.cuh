// Circular buffers in shared memory: which stage comes next, and its barriers' parity.
#pragma once

#include <cute/tensor.hpp>
#include <cutlass/arch/barrier.h>

namespace ringfa3 {

using namespace cute;

// The position of a producer or consumer in a circular buffer of `Stages` stages. A consumer waits
// for a stage's full barrier with `phase()`, a producer for its empty barrier with `phase() ^ 1`.
template <int Stages>
struct PipelineState {
  uint32_t count = 0;  // stages completed so far, fewer than 2^32
  CUTE_DEVICE int index() const { return count % Stages; }
  CUTE_DEVICE uint32_t phase() const { return count / Stages & 1; }
  CUTE_DEVICE void advance() { ++count; }
  CUTE_DEVICE PipelineState previous() const { return {count - 1}; }
};

// A warp: one lane arrives. Electing it takes no register.
CUTE_DEVICE void release(cutlass::arch::ClusterBarrier& empty) {
  if (elect_one_sync()) empty.arrive();
}

}  // namespace ringfa3
