// Masks as words: one bit per column that a thread holds of an accumulator row. R2P moves the bits
// of a word to predicates in one instruction.
#pragma once

#include <cute/tensor.hpp>

namespace ringfa3 {

using namespace cute;

// How many columns of a thread, 0, 1, 8, 9, 16, 17 ..., lie before column x.
CUTE_DEVICE int columns_before(int x) {
  uint32_t const rest = max(x, 0);
  return static_cast<int>(rest / 8 * 2 + min(rest % 8, 2u));
}

// The n lowest bits; none for n < 0, all for n >= 32.
CUTE_DEVICE uint32_t low_bits(int n) { return __funnelshift_lc(0u, 1u, max(n, 0)) - 1; }

}  // namespace ringfa3
