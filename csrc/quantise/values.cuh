// V in e4m3: centred, with a scale for each channel, transposed in tiles (head_dim, 128 keys).
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
          float const number = e == 0 ? v[i].x : v[i].y;
          // 0 times an infinity is NaN
          z[i] = __fmaf_rn(number, 0.f, __fmaf_rn(number, inverse[c], shift[c]));
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

}  // namespace ringfa3
