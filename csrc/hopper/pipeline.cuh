// Sizes that all kernels share, and places in circular buffers.
#pragma once

#include <cute/tensor.hpp>

namespace ringfa3 {

using namespace cute;

constexpr int kWarp = 32;
constexpr int kWarpgroup = 128;
constexpr int kWarpRows = 16;    // of S and O that a warp holds
constexpr int kWorkDepth = 4;    // the piece that ends, the next, and room to come
constexpr int kBlocksAhead = 4;  // blocks left to load, or to decode, when the next is fetched
constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

// A place in a circular buffer of S stages, and the parity that its barriers have there.
template <int S>
struct StageState {
  uint32_t count = 0;  // of places gone through, fewer than 2^32
  CUTE_DEVICE int index() const { return count % S; }
  CUTE_DEVICE uint32_t phase() const { return count / S & 1; }
  CUTE_DEVICE void advance() { ++count; }
  CUTE_DEVICE StageState before() const { return {count - 1}; }
};

}  // namespace ringfa3
