// 8-bit formats: scales, and rounding to bytes. `ringfa3/quantisation/formats.py` defines them.
#pragma once

#include <cute/tensor.hpp>
#include <cutlass/numeric_conversion.h>

namespace ringfa3 {

using namespace cute;

// The least scale of Q and K: a product of two is a normal float32, so -inf times it is -inf. The
// least scale of V: the least normal float32. E4M3 numbers times it have smaller steps than the
// smallest bfloat16 numbers.
constexpr float kLeastScale = 0x1p-60f, kLeastVScale = 0x1p-126f;

// Four numbers in bfloat16.
CUTE_DEVICE uint2 packed_bfloats(float const (&x)[4]) {
  cutlass::Array<float, 4> four;
  CUTE_UNROLL
  for (int i = 0; i < 4; ++i) four[i] = x[i];
  auto const packed = cutlass::NumericArrayConverter<cutlass::bfloat16_t, float, 4>{}(four);
  return reinterpret_cast<uint2 const&>(packed);
}

// E4M3 has NaN, so a key that is not finite does not change the scale of its tile.
struct E4M3 {
  static constexpr float kLargest = 448.f;
  static constexpr float kLost = NAN;  // a number of a row that is not finite
  static constexpr bool kNanInScale = false;
  static constexpr float kLargestOfRow = kLargest;
  static constexpr int kRowBits = 4;  // of the scale of a row of Q

  // Four numbers times a factor, to the nearest, ties to even; what exceeds the range saturates.
  static CUTE_DEVICE uint32_t pack(float const* x, float factor) {
    cutlass::Array<float, 4> scaled;
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) scaled[i] = x[i] * factor;
    auto const four = cutlass::NumericArrayConverter<cutlass::float_e4m3_t, float, 4>{}(scaled);
    return reinterpret_cast<uint32_t const&>(four);
  }
  static CUTE_DEVICE uint32_t pack_row(float const* x, float factor, float) {
    return pack(x, factor);
  }
  // The four numbers of a word.
  static CUTE_DEVICE void unpack(uint32_t word, float (&x)[4]) {
    using Four = cutlass::Array<cutlass::float_e4m3_t, 4>;
    auto const floats = cutlass::NumericArrayConverter<float, cutlass::float_e4m3_t, 4>{}(
        reinterpret_cast<Four const&>(word));
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) x[i] = floats[i];
  }
};

// int8 has no NaN: a key that is not finite makes the scale of its tile NaN.
struct Int8 {
  static constexpr float kLargest = 127.f;
  static constexpr float kLost = 0.f;
  static constexpr bool kNanInScale = true;
  static constexpr float kLargestOfRow = 126.f;
  static constexpr int kRowBits = 2;  // of the scale of a row of Q

  // As above, for products within +-127.5. The sum with 1.5 * 2^23 has the integer in its low bits.
  static CUTE_DEVICE uint32_t pack(float const* x, float factor) {
    uint32_t bits[4];
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) bits[i] = __float_as_uint(__fmaf_rn(x[i], factor, 0x1.8p23f));
    return low_bytes(bits);
  }

  // As `pack`, for a row of Q: numbers above `even_from` in magnitude are rounded to even numbers,
  // see `Format.round_row`.
  static CUTE_DEVICE uint32_t pack_row(float const* x, float factor, float even_from) {
    uint32_t bits[4];
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) {
      uint32_t const any = __float_as_uint(__fmaf_rn(x[i], factor, 0x1.8p23f));
      uint32_t const half = __float_as_uint(__fmaf_rn(x[i], factor * 0.5f, 0x1.8p23f));
      bits[i] = fabsf(x[i]) > even_from ? half << 1 : any;
    }
    return low_bytes(bits);
  }

  static CUTE_DEVICE void unpack(uint32_t word, float (&x)[4]) {
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) x[i] = static_cast<float>(static_cast<int8_t>(word >> 8 * i));
  }

  // The low bytes of four words.
  static CUTE_DEVICE uint32_t low_bytes(uint32_t const (&bits)[4]) {
    return __byte_perm(__byte_perm(bits[0], bits[1], 0x0040), __byte_perm(bits[2], bits[3], 0x0040),
                       0x5410);
  }
};

// The four numbers that `Format::pack` has packed times `scale`, in bfloat16: exact, see
// `Format.row_bits`.
template <class Format>
CUTE_DEVICE uint2 dequantised(uint32_t bytes, float scale) {
  float x[4];
  Format::unpack(bytes, x);
  CUTE_UNROLL
  for (float& number : x) number *= scale;
  return packed_bfloats(x);
}

// The larger one; NaN if one of the two is NaN.
CUTE_DEVICE float max_or_nan(float a, float b) {
  float larger;
  asm("max.ftz.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
  return larger;
}

// The scale of numbers up to `amax` in magnitude, at least `least`. NaN stays.
template <class Format>
CUTE_DEVICE float scale_of(float amax, float least = kLeastScale) {
  return max_or_nan(__fdiv_rn(amax, Format::kLargest), least);
}

// The scale of a row of Q, see `Format.row_scale`. NaN stays.
template <class Format>
CUTE_DEVICE float row_scale(float amax) {
  constexpr uint32_t kCut = (1u << (24 - Format::kRowBits)) - 1;
  float const scale = max_or_nan(__fdiv_rn(amax, Format::kLargestOfRow), kLeastScale);
  uint32_t const bits = (__float_as_uint(scale) + kCut) & ~kCut;
  return scale != scale ? scale : __uint_as_float(bits);
}

// The factor of a tile of K, 1 over its scale, see `Format.tile_scale`. NaN stays.
template <class Format>
CUTE_DEVICE float tile_factor(float amax) {
  uint32_t const bits = __float_as_uint(__fdiv_rn(Format::kLargest, amax)) & 0xffff0000;
  float factor;
  asm("min.ftz.NaN.f32 %0, %1, %2;"
      : "=f"(factor)
      : "f"(__uint_as_float(bits)), "f"(1 / kLeastScale));
  return factor;
}

}  // namespace ringfa3
