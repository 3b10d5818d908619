// Stores of accumulator rows to global memory.
#pragma once

#include <cute/tensor.hpp>
#include <cutlass/numeric_conversion.h>

namespace ringfa3 {

using namespace cute;

// Two neighbouring columns of an accumulator, converted: 8j + 2q and 8j + 2q + 1, where q is the
// lane in its quad, of row r = 0 or 1 of the two rows that a quad holds.
template <class Element, class Accumulator>
CUTE_DEVICE uint32_t packed(Accumulator const& o, int r, int j) {
  cutlass::Array<float, 2> pair;
  pair[0] = o(4 * j + 2 * r), pair[1] = o(4 * j + 2 * r + 1);
  auto const both = cutlass::NumericArrayConverter<Element, float, 2>{}(pair);
  return reinterpret_cast<uint32_t const&>(both);
}

// Stores the first `columns`, a multiple of 8, of row r of the two rows (D columns) that a quad
// holds, if `stored`. Neighbouring lanes exchange pairs, so that a quad writes whole 32-byte
// sectors. `Fixed` computes the address once and keeps it; otherwise the compiler computes it for
// every store, inside the branch.
template <class Element, int D, bool Fixed = false, class Accumulator>
CUTE_DEVICE void store_row(Element* out, Accumulator const& o, int r, int lane, bool stored,
                           int columns) {
  bool const odd = lane & 1;
  out += 8 * (lane & 1) + 2 * (lane & 2);
  if constexpr (Fixed) {
    asm volatile("" : "+l"(out));
    __builtin_assume(__isGlobal(out));
  }
  CUTE_UNROLL
  for (int j = 0; j < D / 8; j += 2) {
    uint32_t const a = packed<Element>(o, r, j), b = packed<Element>(o, r, j + 1);
    uint32_t const other = __shfl_xor_sync(0xffffffff, odd ? a : b, 1);
    uint2 const eight = odd ? make_uint2(other, b) : make_uint2(a, other);
    // A lane's number against a uniform one: an end of its own would hold a register meanwhile.
    if (stored && 8 * (lane & 1) < columns - 8 * j) *reinterpret_cast<uint2*>(out + 8 * j) = eight;
  }
}

}  // namespace ringfa3
