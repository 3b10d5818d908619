// Rows of an accumulator on their way to global memory.
#pragma once

#include <cute/tensor.hpp>
#include <cutlass/numeric_conversion.h>

namespace ringfa3 {

using namespace cute;

// Columns 8j + 2q, 8j + 2q + 1 of row r of the two that a quad of lanes holds, q its lane.
template <class Element, class Accumulator>
CUTE_DEVICE uint32_t packed(Accumulator const& o, int r, int j) {
  cutlass::Array<float, 2> pair;
  pair[0] = o(4 * j + 2 * r), pair[1] = o(4 * j + 2 * r + 1);
  auto const both = cutlass::NumericArrayConverter<Element, float, 2>{}(pair);
  return reinterpret_cast<uint32_t const&>(both);
}

// Stores a quad's row r of an accumulator (rows, D). Neighbouring lanes trade halves, so that a
// quad writes whole 32-byte sectors. With `Fixed` the address is computed once and held; the
// compiler would compute each store's anew, in a branch of its own.
template <class Element, int D, bool Fixed = false, class Accumulator>
CUTE_DEVICE void store_row(Element* out, Accumulator const& o, int r, int lane, bool stored) {
  bool const odd = lane & 1;
  out += 8 * (lane & 1) + 2 * (lane & 2);
  if constexpr (Fixed) {
    asm volatile("" : "+l"(out));
    __builtin_assume(__isGlobal(out));
  }
  CUTE_UNROLL
  for (int j = 0; j < D / 8; j += 2) {
    uint32_t const a = packed<Element>(o, r, j), b = packed<Element>(o, r, j + 1);
    uint32_t const got = __shfl_xor_sync(0xffffffff, odd ? a : b, 1);
    uint2 const eight = odd ? make_uint2(got, b) : make_uint2(a, got);
    if (stored) *reinterpret_cast<uint2*>(out + 8 * j) = eight;
  }
}

}  // namespace ringfa3
