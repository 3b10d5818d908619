// Q in 8 bits: rotated, with a scale for each row and head.
#pragma once

#include "quantise/rotation.cuh"

namespace ringfa3 {

using namespace cute;

constexpr int kQueryThreads = 256, kQueryCtas = 4;  // CTAs of an SM

// A warp per `S::Rows` tokens and head; heads are next to each other, so that a CTA reads whole
// tokens.
template <class S, class Format>
__global__ void __launch_bounds__(kQueryThreads, kQueryCtas)
    quantise_q_kernel(__grid_constant__ QuantiseQArgs const a) {
  constexpr int D = S::D;
  int const lane = threadIdx.x % kWarp;
  // 32 bits hold the number of a warp: its rows take 1 KiB and more.
  uint32_t const warp = blockIdx.x * (kQueryThreads / kWarp) + threadIdx.x / kWarp;
  auto const heads = static_cast<uint32_t>(a.q.heads);
  uint32_t const head = warp % heads;
  int64_t const token = int64_t{warp / heads} * S::Rows + lane / S::Lanes;
  auto load = [&](auto& x) { load_row<S>(x, a.q, cute::min(token, a.q.tokens - 1), head, lane); };
  uint4 x[S::Vectors];
  load(x);
  float offset = 0.f;
  auto const* const mean = a.k_mean + head / (heads / a.kv_heads) * D;
  CUTE_UNROLL
  for (int j = 0; j < S::Vectors; ++j) {
    auto const* const at = reinterpret_cast<float4 const*>(mean + S::channel(lane, j));
    uint32_t const words[4] = {x[j].x, x[j].y, x[j].z, x[j].w};
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      float4 const m = __ldg(at + i);
      auto const low = unpacked<typename S::Element>(words[2 * i]);
      auto const high = unpacked<typename S::Element>(words[2 * i + 1]);
      offset = __fmaf_rn(low.x, m.x, offset), offset = __fmaf_rn(low.y, m.y, offset);
      offset = __fmaf_rn(high.x, m.z, offset), offset = __fmaf_rn(high.y, m.w, offset);
    }
  }
  CUTE_UNROLL
  for (int i = 1; i < S::Lanes; i *= 2) offset += __shfl_xor_sync(0xffffffff, offset, i);
  float y[S::Numbers];
  float const amax = rotate_row<S, Format>(y, x, nullptr, lane, load);
  float const scale = scale_of<Format>(amax * S::kNorm);
  if (token >= a.q.tokens) return;
  // A lost row has numbers of int8 that are 0: their scale says it.
  float const factor = Format::kSpoils && amax != amax ? 0.f : __fdiv_rn(S::kNorm, scale);
  store_row_bytes<S, Format>(static_cast<uint8_t*>(a.values) + (token * heads + head) * D, y,
                             factor, lane);
  if (lane % S::Lanes == 0) {
    a.scale[head * a.q.tokens + token] = scale;
    a.k_offset[head * a.q.tokens + token] = isnan(scale) ? NAN : offset;
  }
}

template <class S>
cudaError_t launch_quantise_q(QuantiseQArgs const& a, cudaStream_t stream) {
  constexpr int kWarps = kQueryThreads / kWarp;
  int64_t const warps = (a.q.tokens + S::Rows - 1) / S::Rows * a.q.heads;
  auto const ctas = static_cast<unsigned>((warps + kWarps - 1) / kWarps);
  if (a.int8) {
    quantise_q_kernel<S, Int8><<<ctas, kQueryThreads, 0, stream>>>(a);
  } else {
    quantise_q_kernel<S, E4M3><<<ctas, kQueryThreads, 0, stream>>>(a);
  }
  return cudaGetLastError();
}

}  // namespace ringfa3
