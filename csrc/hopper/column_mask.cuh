// Masks as words: a bit for each column that a thread has of a row of an accumulator. Constant bits
// of a word move to predicates at once (R2P).
#pragma once

#include <cute/tensor.hpp>

namespace ringfa3 {

using namespace cute;

// How many of the columns that a thread has of a row, 0, 1, 8, 9, 16, 17 ..., lie before x.
CUTE_DEVICE int columns_before(int x) {
  uint32_t const rest = max(x, 0);
  return static_cast<int>(rest / 8 * 2 + min(rest % 8, 2u));
}

// The lowest n bits; none for n < 0, all from 32 on.
CUTE_DEVICE uint32_t low_bits(int n) { return __funnelshift_lc(0u, 1u, max(n, 0)) - 1; }

}  // namespace ringfa3
