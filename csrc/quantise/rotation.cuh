// Random signs and the Hadamard transform of rows in registers, in the order of
// `ringfa3/quantisation/rotation.py`: sums are equal to its bit by bit.
//
// Letters in shapes: D head dim.
#pragma once

#include <cute/tensor.hpp>

#include "hopper/warp.cuh"
#include "params.h"
#include "quantise/formats.cuh"

namespace ringfa3 {

using namespace cute;

// Larger finite inputs saturate: 256 differences of two sum to less than 2^128.
constexpr float kLargestInput = 0x1p118f;
// Sums of the transform below this come from inputs below `kLargestInput`, if the centre is plain.
constexpr float kLargestPlain = 0x1p60f;

// 64 signs, those of channels [64n, 64n + 64), from SplitMix64; a set bit is a negative one.
constexpr uint64_t sign_bits(int n) {
  constexpr uint64_t kSeed = 0x9E3779B97F4A7C15;
  uint64_t z = kSeed * (n + 2);
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9;
  z = (z ^ z >> 27) * 0x94D049BB133111EB;
  return z ^ z >> 31;
}

template <int D>  // 1 / sqrt(D)
constexpr float rotation_norm = D == 64    ? 0x1p-3f
                                : D == 128 ? 0x1.6a09e6p-4f
                                           : 0x1p-4f;

// How lanes share a row: a lane has one of `Lanes` parts of 64 channels, so most butterflies lie
// within a lane. A row of the warp has the number lane % Rows.
template <class Element_, int HeadDim_>
struct RowShapes {
  using Element = Element_;
  static constexpr int D = HeadDim_;
  static constexpr int Numbers = 64;  // of a lane
  static constexpr int Lanes = D / Numbers;
  static constexpr int Rows = kWarp / Lanes;  // of a warp
  static constexpr int Vectors = Numbers / 8;
  static constexpr float kNorm = rotation_norm<D>;

  static CUTE_DEVICE int part(int lane) { return lane / Rows; }
  static CUTE_DEVICE int row(int lane) { return lane % Rows; }
};

// Which of a row's later parts have another sign than the first one in channel c of a part: bit
// p - 1 for part p.
template <class S>
constexpr int sign_changes(int c) {
  int changes = 0;
  for (int p = 1; p < S::Lanes; ++p) changes |= ((sign_bits(p) ^ sign_bits(0)) >> c & 1) << (p - 1);
  return changes;
}

// Gives numbers of a lane's part the signs that the first part does not have. A set of parts needs
// one instruction: XOR has three inputs.
template <class S>
struct PartSigns {
  uint32_t of[S::Lanes];  // the sign bit, in lanes of part p; of[0]: in lanes of any but the first

  explicit CUTE_DEVICE PartSigns(int lane) {
    CUTE_UNROLL
    for (int p = 0; p < S::Lanes; ++p) {
      of[p] = (p == 0 ? S::part(lane) != 0 : S::part(lane) == p) ? 0x80000000 : 0;
    }
  }
  // x is number c of the part.
  CUTE_DEVICE float apply(float x, int c) const {
    int const changes = sign_changes<S>(c);
    uint32_t bits = __float_as_uint(x);
    if (S::Lanes > 1 && changes == (1 << (S::Lanes - 1)) - 1) return __uint_as_float(bits ^ of[0]);
    CUTE_UNROLL
    for (int p = 1; p < S::Lanes; ++p) bits ^= changes >> (p - 1) & 1 ? of[p] : 0;
    return __uint_as_float(bits);
  }
};

// A signed centre, or NaN where a sum could hide an input above `kLargestInput`.
CUTE_DEVICE float plain_centre(float signed_centre) {
  return fabsf(signed_centre) < kLargestPlain / 2 ? signed_centre : NAN;
}

// Two numbers that a word packs.
template <class Element>
CUTE_DEVICE float2 unpacked(uint32_t word) {
  if constexpr (is_same_v<Element, cutlass::bfloat16_t>) {  // two instructions, not three or four
    return make_float2(__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000));
  }
  auto const* const two = reinterpret_cast<Element const*>(&word);
  return make_float2(static_cast<float>(two[0]), static_cast<float>(two[1]));
}

// Butterflies between numbers of a lane.
template <int Distance, int N>
CUTE_DEVICE void butterflies(float (&y)[N]) {
  CUTE_UNROLL
  for (int i = 0; i < N; ++i) {
    if (i & Distance) continue;
    float const a = y[i], b = y[i + Distance];
    y[i] = __fadd_rn(a, b), y[i + Distance] = __fsub_rn(a, b);
  }
}

// Butterflies between lanes: the lower one gets the sum, the upper one the difference.
template <int N>
CUTE_DEVICE void lane_butterflies(float (&y)[N], int lane, int distance) {
  float const sign = lane & distance ? -1.f : 1.f;
  CUTE_UNROLL
  for (int i = 0; i < N; ++i) {
    y[i] = __fmaf_rn(sign, y[i], __shfl_xor_sync(0xffffffff, y[i], distance));
  }
}

// The largest magnitude of a row, whose lanes have y; NaN if a number is NaN.
template <class S>
CUTE_DEVICE float row_amax(float const (&y)[S::Numbers]) {
  float amax[2] = {};
  CUTE_UNROLL
  for (int i = 0; i < S::Numbers; ++i) amax[i % 2] = max_or_nan(amax[i % 2], fabsf(y[i]));
  float whole = max_or_nan(amax[0], amax[1]);
  CUTE_UNROLL
  for (int i = S::Rows; i < kWarp; i *= 2) {
    whole = max_or_nan(whole, __shfl_xor_sync(0xffffffff, whole, i));
  }
  return whole;
}

// Subtracts nothing.
struct NoCentre {};

// y = (x - centre) diag(signs) H. `x(j)` is vector j of 8 channels of the lane's, and `centre` the
// lane's part of it. `visit(j, v)` gets the numbers v of vector j.
template <class S, class Vector, class Centre, class Visit>
CUTE_DEVICE void transform(float (&y)[S::Numbers], Vector const& x, Centre const& centre,
                           PartSigns<S> const& part_signs, int lane, Visit const& visit) {
  CUTE_UNROLL
  for (int j = 0; j < S::Vectors; ++j) {
    uint4 const vector = x(j);
    uint32_t const words[4] = {vector.x, vector.y, vector.z, vector.w};
    float v[8];
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) {
      float2 const two = unpacked<typename S::Element>(words[i]);
      v[2 * i] = two.x, v[2 * i + 1] = two.y;
    }
    visit(j, v);
    if constexpr (!is_same_v<Centre, NoCentre>) {
      CUTE_UNROLL
      for (int i = 0; i < 8; i += 4) {
        float4 const by = *reinterpret_cast<float4 const*>(centre + 8 * j + i);
        v[i] -= by.x, v[i + 1] -= by.y, v[i + 2] -= by.z, v[i + 3] -= by.w;
      }
    }
    CUTE_UNROLL
    for (int i = 0; i < 8; ++i) {  // after `part_signs`, an operand's modifier negates for free
      float const number = part_signs.apply(v[i], 8 * j + i);
      y[8 * j + i] = sign_bits(0) >> (8 * j + i) & 1 ? -number : number;
    }
  }
  butterflies<1>(y), butterflies<2>(y), butterflies<4>(y);
  butterflies<8>(y), butterflies<16>(y), butterflies<32>(y);
  CUTE_UNROLL
  for (int distance = S::Rows; distance < kWarp; distance *= 2) lane_butterflies(y, lane, distance);
}

// Saturates the numbers that a word packs, and makes those 0 that are not finite. Returns whether
// all were finite.
template <class Element>
CUTE_DEVICE bool saturate(uint32_t& word) {
  float2 const two = unpacked<Element>(word);
  bool finite = true;
  uint32_t bits[2];
  CUTE_UNROLL
  for (int i = 0; i < 2; ++i) {
    float const x = i == 0 ? two.x : two.y;
    bool const here = fabsf(x) < INFINITY;
    float const within = fminf(fmaxf(x, -kLargestInput), kLargestInput);
    finite &= here;
    bits[i] = Element(here ? within : 0.f).raw();  // exact
  }
  word = bits[1] << 16 | bits[0];
  return finite;
}

}  // namespace ringfa3
