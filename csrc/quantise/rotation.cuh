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

constexpr float kLargestInput = 0x1p100f;  // larger finite inputs saturate
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

// Signs of channels [32n, 32n + 32): those of pair i are bits 15 - i and 31 - i, so that a shift
// by i moves them to the sign bits of two packed 16-bit numbers.
constexpr uint32_t sign_pairs(int n) {
  uint32_t pairs = 0;
  for (int i = 0; i < 16; ++i) {
    uint32_t const two = sign_bits(n / 2) >> (32 * (n % 2) + 2 * i) & 3;
    pairs |= (two & 1) << (15 - i) | two >> 1 << (31 - i);
  }
  return pairs;
}

// How lanes share a row: lane l of `Lanes` has vectors l, l + Lanes, ... of 8 channels, so a load
// of all lanes covers whole 32-byte sectors, and so does a store of their bytes.
template <class Element_, int HeadDim_>
struct RowShapes {
  using Element = Element_;
  static constexpr int D = HeadDim_;
  static constexpr int Lanes = D == 256 ? 8 : 4;
  static constexpr int Vectors = D / 8 / Lanes;  // of a lane
  static constexpr int Numbers = 8 * Vectors;
  static constexpr int Rows = kWarp / Lanes;  // of a warp
  static constexpr float kNorm = D == 64 ? 0x1p-3f : D == 128 ? 0x1.6a09e6p-4f : 0x1p-4f;

  static CUTE_DEVICE int channel(int lane, int vector) {
    return 8 * (lane % Lanes + vector * Lanes);
  }
};

// A signed centre, or NaN where a sum could hide an input above `kLargestInput`.
CUTE_DEVICE float plain_centre(float signed_centre) {
  return fabsf(signed_centre) < kLargestPlain / 2 ? signed_centre : NAN;
}

// A lane's vectors of a row of x. The compiler sees no two loads of one address, so it keeps none
// in registers for the next.
template <class S>
CUTE_DEVICE void load_row(uint4 (&out)[S::Vectors], Tensor3 const& x, int64_t token, int64_t head,
                          int lane) {
  auto const* row = static_cast<typename S::Element const*>(x.data) + token * x.token_stride +
                    head * x.head_stride;
  asm volatile("" : "+l"(row));
  CUTE_UNROLL
  for (int j = 0; j < S::Vectors; ++j) {
    out[j] = __ldg(reinterpret_cast<uint4 const*>(row + S::channel(lane, j)));
  }
}

// Stores a lane's numbers of a row, times a factor, as bytes.
template <class S, class Format>
CUTE_DEVICE void store_row_bytes(uint8_t* row, float const (&y)[S::Numbers], float factor,
                                 int lane) {
  CUTE_UNROLL
  for (int j = 0; j < S::Vectors; ++j) {
    *reinterpret_cast<uint2*>(row + S::channel(lane, j)) =
        make_uint2(Format::pack(y + 8 * j, factor), Format::pack(y + 8 * j + 4, factor));
  }
}

// Two numbers that a word packs.
template <class Element>
CUTE_DEVICE float2 unpacked(uint32_t word) {
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
  float amax = 0.f;
  CUTE_UNROLL
  for (int i = 0; i < S::Numbers; ++i) amax = max_or_nan(amax, fabsf(y[i]));
  CUTE_UNROLL
  for (int i = 1; i < S::Lanes; i *= 2) {
    amax = max_or_nan(amax, __shfl_xor_sync(0xffffffff, amax, i));
  }
  return amax;
}

// y = (x - centre) diag(signs) H. `signed_centre` (D,) has the signs already, null: zeros.
// `Careful` saturates x.
template <class S, bool Careful>
CUTE_DEVICE void transform(float (&y)[S::Numbers], uint4 const (&x)[S::Vectors],
                           float const* signed_centre, int lane) {
  CUTE_UNROLL
  for (int j = 0; j < S::Vectors; ++j) {
    constexpr int kWords = S::Lanes / 4;  // of signs, of the lanes' vectors number j
    uint32_t signs = sign_pairs(kWords * j);
    if constexpr (kWords == 2) {
      uint32_t const upper = sign_pairs(2 * j + 1);
      signs = lane & 4 ? upper : signs;
    }
    signs <<= 4 * (lane & 3);
    uint32_t const words[4] = {x[j].x, x[j].y, x[j].z, x[j].w};
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) {
      auto const two = unpacked<typename S::Element>(words[i] ^ (signs << i & 0x80008000));
      y[8 * j + 2 * i] = two.x, y[8 * j + 2 * i + 1] = two.y;
    }
    if constexpr (Careful) {
      CUTE_UNROLL
      for (int i = 8 * j; i < 8 * j + 8; ++i) {
        y[i] = fminf(fmaxf(y[i], -kLargestInput), kLargestInput);
      }
    }
    if (signed_centre != nullptr) {
      auto const* const at = reinterpret_cast<float4 const*>(signed_centre + S::channel(lane, j));
      CUTE_UNROLL
      for (int i = 0; i < 2; ++i) {
        float4 const c = at[i];
        y[8 * j + 4 * i] -= c.x, y[8 * j + 4 * i + 1] -= c.y;
        y[8 * j + 4 * i + 2] -= c.z, y[8 * j + 4 * i + 3] -= c.w;
      }
    }
  }
  butterflies<1>(y), butterflies<2>(y), butterflies<4>(y);
  CUTE_UNROLL
  for (int distance = 1; distance < S::Lanes; distance *= 2) lane_butterflies(y, lane, distance);
  if constexpr (S::Vectors > 1) butterflies<8>(y);
  if constexpr (S::Vectors > 2) butterflies<16>(y);
}

// The transform of the row x, which is `rotate`'s but for the factor kNorm, and its largest
// magnitude, NaN for a row that is not finite. Most warps need no care: an infinity, a NaN or a
// number above `kLargestInput` makes the largest sum NaN or exceed `kLargestPlain`. So does a
// centre that could hide one: it is NaN in the first row of `centres` (2, D), see `plain_centre`.
// After care |y| fits the largest scale. Care reads the row again by `load(x)`, so that x needs no
// registers meanwhile.
template <class S, class Format, class Load>
CUTE_DEVICE float rotate_row(float (&y)[S::Numbers], uint4 const (&x)[S::Vectors],
                             float const* centres, int lane, Load const& load) {
  transform<S, false>(y, x, centres, lane);
  float amax = row_amax<S>(y);
  if (!__any_sync(0xffffffff, !(amax < kLargestPlain))) return amax;
  uint4 again[S::Vectors];
  load(again);
  bool finite = true;
  CUTE_UNROLL
  for (int j = 0; j < S::Vectors; ++j) {
    for (uint32_t const word : {again[j].x, again[j].y, again[j].z, again[j].w}) {
      auto const two = unpacked<typename S::Element>(word);
      finite &= fabsf(two.x) < INFINITY && fabsf(two.y) < INFINITY;
    }
  }
  constexpr uint32_t kRow = (1u << S::Lanes) - 1;
  uint32_t const finite_lanes = __ballot_sync(0xffffffff, finite) >> lane / S::Lanes * S::Lanes;
  finite = (finite_lanes & kRow) == kRow;
  transform<S, true>(y, again, centres == nullptr ? nullptr : centres + S::D, lane);
  amax = row_amax<S>(y);
  constexpr float kMost = kLargestScale * Format::kLargest / S::kNorm;
  CUTE_UNROLL
  for (int i = 0; i < S::Numbers; ++i) {
    y[i] = finite ? fminf(fmaxf(y[i], -kMost), kMost) : Format::kLost;
  }
  return finite ? amax : NAN;
}

}  // namespace ringfa3
