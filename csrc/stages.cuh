// Sizes that all kernels share, and places in circular buffers.
#pragma once

#include <cute/tensor.hpp>

namespace ringfa3 {

using namespace cute;

// A place in a circular buffer of S stages, and the parity that its barriers have there.
template <int S>
struct StageState {
  static_assert((S & (S - 1)) == 0, "one counter holds both");
  uint32_t count = 0;
  CUTE_DEVICE int index() const { return count % S; }
  CUTE_DEVICE uint32_t phase() const { return count / S & 1; }
  CUTE_DEVICE void advance() { ++count; }
};

}  // namespace ringfa3
