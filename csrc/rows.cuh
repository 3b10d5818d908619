// Rows of an accumulator on their way to global memory.
#pragma once

#include <cute/tensor.hpp>
#include <cutlass/numeric_conversion.h>

namespace ringfa3 {

using namespace cute;

// Stores one row of an accumulator (rows, D), of which a quad of lanes holds columns 8j + 2q, 8j +
// 2q + 1 for all j, in the output dtype. Neighbouring lanes trade halves, so that a quad writes
// whole 32-byte sectors.
template <class Element, int D, class Accumulator>
CUTE_DEVICE void store_row(Element* out, Accumulator const& o, int r, int lane, bool stored) {
  cutlass::NumericArrayConverter<Element, float, 2> convert;
  auto pack = [&](int j) {
    cutlass::Array<float, 2> pair;
    pair[0] = o(4 * j + 2 * r), pair[1] = o(4 * j + 2 * r + 1);
    auto const packed = convert(pair);
    return reinterpret_cast<uint32_t const&>(packed);
  };
  bool const odd = lane & 1;
  out += 8 * (lane & 1) + 2 * (lane & 2);
  CUTE_UNROLL
  for (int j = 0; j < D / 8; j += 2) {
    uint32_t const a = pack(j), b = pack(j + 1);
    uint32_t const got = __shfl_xor_sync(0xffffffff, odd ? a : b, 1);
    uint2 const eight = odd ? make_uint2(got, b) : make_uint2(a, got);
    if (stored) *reinterpret_cast<uint2*>(out + 8 * j) = eight;
  }
}

}  // namespace ringfa3
