// V in e4m3 for the forward, and these numbers in bfloat16 for the backward.
//
// For the forward it is centred, with a scale for each channel, transposed in tiles (head_dim, 128
// keys).
//
// The order of keys makes an accumulator of S the A operand of P V. Let t be a lane's number in its
// quad. In a row of S (64, N) the lane holds columns 8j + 2t + e, e = 0, 1, of each group of 8
// columns j. In a row of 8-bit A (64, 32) it holds columns 16h + 4t + i, i = 0 to 3, h = 0, 1, with
// one register for each h. With i = 2 (j % 2) + e and h = j / 2 the lane's own numbers of four
// groups of 8 are its A operand. So position p = 16h + 4t + i of 32 holds key
// 8 (2h + i / 2) + 2t + i % 2.
#pragma once

#include "hopper/sync.cuh"
#include "quantise/rotation.cuh"

namespace ringfa3 {

using namespace cute;

constexpr int kValueThreads = 256;

// (x - mean) / scale, from `inverse` = 1 / scale and `shift` = -mean * inverse.
CUTE_DEVICE float centred_value(float x, float inverse, float shift) {
  return __fmaf_rn(x, 0.f, __fmaf_rn(x, inverse, shift));  // 0 times an infinity is NaN
}

// A CTA per tile and head. A thread packs four keys of eight channels, a word for each channel.
// Positions past the tile's rows are 0.
template <class S>
__global__ void __launch_bounds__(kValueThreads)
    quantise_v_kernel(__grid_constant__ QuantiseKVArgs const a) {
  using Element = typename S::Element;
  constexpr int D = S::D;
  constexpr int kWords = kKeyTile / 4;  // of a channel
  __shared__ alignas(16) float inverse[D], shift[D];
  // The 16-byte chunk n of channel c lies at n ^ 2 (c / 8 % 4): no two lanes of a warp that stores
  // 8 words of each of 4 channels, and no two of 8 that read a channel, meet in a bank.
  __shared__ alignas(16) uint32_t transposed[D][kWords];
  auto const heads = static_cast<uint32_t>(a.v.heads);
  uint32_t const head = blockIdx.x % heads, number = blockIdx.x / heads;
  KeyTile const tile = a.tiles[number];
  for (int c = threadIdx.x; c < D; c += kValueThreads) {
    inverse[c] = __frcp_rn(a.v_scale[head * D + c]);
    shift[c] = -a.v_mean[head * D + c] * inverse[c];
  }
  __syncthreads();
  auto const* const from = static_cast<Element const*>(a.v.data) +
                           int64_t{tile.row0} * a.v.token_stride + head * a.v.head_stride;
  CUTE_UNROLL
  for (int n = 0; n < kWords * D / 8 / kValueThreads; ++n) {
    int const unit = threadIdx.x + n * kValueThreads;
    int const channel = 8 * (unit % 4 + unit / 128 * 4);
    int const word = unit / 4 % 8 + unit / 32 % 4 * 8;  // of 4 positions
    int const key = word / 4 * 16 + word % 4 * 2;       // and key + 1, key + 8, key + 9
    uint4 x[4];
    uint32_t kept = 0;  // bytes of keys that are here
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) {
      int const row = key + i / 2 * 8 + i % 2;
      x[i] = make_uint4(0, 0, 0, 0);
      if (row < tile.rows) {
        auto const* const at = from + row * a.v.token_stride + channel;
        x[i] = __ldg(reinterpret_cast<uint4 const*>(at));
        kept |= 0xffu << 8 * i;
      }
    }
    CUTE_UNROLL
    for (int pair = 0; pair < 4; ++pair) {  // of channels
      float2 v[4];
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) {
        uint32_t const words[4] = {x[i].x, x[i].y, x[i].z, x[i].w};
        v[i] = unpacked<Element>(words[pair]);
      }
      CUTE_UNROLL
      for (int e = 0; e < 2; ++e) {
        int const c = channel + 2 * pair + e;
        float z[4];
        CUTE_UNROLL
        for (int i = 0; i < 4; ++i) {
          z[i] = centred_value(e == 0 ? v[i].x : v[i].y, inverse[c], shift[c]);
        }
        transposed[c][word ^ unit % 4 * 8] = E4M3::pack(z, 1.f) & kept;
      }
    }
  }
  __syncthreads();
  auto* const to = static_cast<uint4*>(a.v_values) + (int64_t{number} * heads + head) * (D * 8);
  CUTE_UNROLL
  for (int n = 0; n < D * 8 / kValueThreads; ++n) {
    int const chunk = threadIdx.x + n * kValueThreads;
    int const c = chunk / 8, at = chunk % 8 ^ c / 8 % 4 * 2;
    to[chunk] = *reinterpret_cast<uint4 const*>(&transposed[c][4 * at]);
  }
  // The next kernel of the stream may begin once this one has ended: K's must have ended, too.
  wait_for_earlier_kernels();
}

constexpr int kValueTokens = 8;  // of a thread of `dequantise_v_kernel`

// The numbers of `quantise_v_kernel` times their scale, plus their mean, in bfloat16: (tokens,
// heads, D). A thread has eight channels of a head.
template <class S>
__global__ void __launch_bounds__(kValueThreads)
    dequantise_v_kernel(__grid_constant__ QuantiseKVArgs const a) {
  using Element = typename S::Element;
  int64_t const number = int64_t{blockIdx.x} * kValueThreads + threadIdx.x;
  int const vectors = a.v.heads * (S::D / 8);  // of a token
  int const vector = static_cast<int>(number % vectors);
  int const head = vector / (S::D / 8), channel = vector % (S::D / 8) * 8;
  int64_t const begin = number / vectors * kValueTokens;
  int64_t const end = cute::min(begin + kValueTokens, a.v.tokens);
  float scale[8], mean[8], inverse[8], shift[8];
  if (begin < end) {
    CUTE_UNROLL
    for (int i = 0; i < 8; ++i) {
      scale[i] = a.v_scale[8 * vector + i], mean[i] = a.v_mean[8 * vector + i];
      inverse[i] = __frcp_rn(scale[i]), shift[i] = -mean[i] * inverse[i];
    }
  }
  auto const* from = static_cast<Element const*>(a.v.data) + begin * a.v.token_stride +
                     head * a.v.head_stride + channel;
  auto* to = static_cast<uint4*>(a.v_values) + begin * vectors + vector;
#pragma unroll 4
  for (int64_t token = begin; token < end; ++token, from += a.v.token_stride, to += vectors) {
    uint4 const x = __ldg(reinterpret_cast<uint4 const*>(from));
    uint32_t const words[4] = {x.x, x.y, x.z, x.w};
    uint2 halves[2];
    CUTE_UNROLL
    for (int n = 0; n < 8; n += 4) {
      float2 const low = unpacked<Element>(words[n / 2]),
                   high = unpacked<Element>(words[n / 2 + 1]);
      float y[4] = {low.x, low.y, high.x, high.y};
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) y[i] = centred_value(y[i], inverse[n + i], shift[n + i]);
      E4M3::unpack(E4M3::pack(y, 1.f), y);
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) y[i] = __fmaf_rn(y[i], scale[n + i], mean[n + i]);
      halves[n / 4] = packed_bfloats(y);
    }
    *to = make_uint4(halves[0].x, halves[0].y, halves[1].x, halves[1].y);
  }
  wait_for_earlier_kernels();  // as above
}

}  // namespace ringfa3
