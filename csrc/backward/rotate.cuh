// The inverse of the rotation of Q and K (quantise/rotation.cuh), of gradients in accumulators.
#pragma once

#include "quantise/rotation.cuh"

namespace ringfa3 {

using namespace cute;

// x = x H diag(signs), x (rows, D): without the factor 1 / sqrt(D). Element 4j + 2r + c of a lane
// is in column 8j + 2 (lane % 4) + c, so the lanes of a quad have a row.
template <int D>
CUTE_DEVICE void rotate_back(float (&x)[D / 2], int lane) {
  butterflies<1>(x);             // of neighbouring columns
  lane_butterflies(x, lane, 1);  // of columns 2 and 4 apart
  lane_butterflies(x, lane, 2);
  butterflies<4>(x), butterflies<8>(x), butterflies<16>(x);  // 8, 16, 32
  if constexpr (D > 64) butterflies<32>(x);
  if constexpr (D > 128) butterflies<64>(x);
  CUTE_UNROLL
  for (int n = 0; n < D / 2; n += 32) {  // 64 columns
    uint64_t const signs = sign_bits(n / 32) >> 2 * (lane % 4);
    CUTE_UNROLL
    for (int i = 0; i < 32; ++i) {
      auto const negative = static_cast<uint32_t>(signs >> (i / 4 * 8 + i % 2)) << 31;
      x[n + i] = __uint_as_float(__float_as_uint(x[n + i]) ^ negative);
    }
  }
}

// dQ or dK from sums of dS times K or Q, rows in accumulators: times `scale`, and rotated back if
// the operands are dequantised.
template <class Shapes, class Accumulator>
CUTE_DEVICE void finish_gradient(Accumulator& x, float scale, int lane) {
  constexpr int D = Shapes::D;
  if constexpr (Shapes::Dequantised) scale *= rotation_norm<D>;
  CUTE_UNROLL
  for (int n = 0; n < size(x); ++n) x(n) *= scale;
  if constexpr (Shapes::Dequantised) {
    rotate_back<D>(reinterpret_cast<float (&)[D / 2]>(*raw_pointer_cast(x.data())), lane);
  }
}

}  // namespace ringfa3
