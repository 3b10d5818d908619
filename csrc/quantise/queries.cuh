// Q in 8 bits: rotated, with a scale for each row and head. For the backward the kernel writes
// these numbers times their scales, in bfloat16.
#pragma once

#include "hopper/launch.cuh"
#include "quantise/row_stages.cuh"

namespace ringfa3 {

using namespace cute;

constexpr int kQueryThreads = 128, kQueryWarps = kQueryThreads / kWarp;
constexpr int kQueryCtas = 4;  // of an SM

template <class S>
using QueryStorage = RowStorage<S, kQueryWarps>;

struct QueryParams {
  CUtensorMap q;
  QuantiseQArgs args;
  uint32_t boxes;  // of `S::Rows` tokens, for each head
  uint32_t warps;  // that share them
  RowStep step;    // `warps` boxes
};

// Consecutive warps have consecutive heads, so that warps which run together read whole tokens.
template <class S, class Format, bool Dequantised>
__global__ void __launch_bounds__(kQueryThreads, kQueryCtas)
    quantise_q_kernel(__grid_constant__ QueryParams const p) {
  constexpr int D = S::D;
  extern __shared__ __align__(1024) char raw[];
  QuantiseQArgs const& a = p.args;
  int const lane = threadIdx.x % kWarp, in_cta = cutlass::canonical_warp_idx_sync();
  uint32_t const warp = blockIdx.x * kQueryWarps + in_cta;
  if (warp >= p.warps) return;
  RowStages<S> stages(*reinterpret_cast<QueryStorage<S>*>(raw), in_cta, lane);
  PartSigns<S> const part_signs(lane);
  auto const heads = static_cast<uint32_t>(a.q.heads), group = heads / a.kv_heads;
  RowCursor now(warp, heads), ahead = now;
  auto load = [&] {
    if (ahead.rows < p.boxes) stages.load(p.q, ahead.rows * S::Rows, ahead.head);
    ahead.advance(p.step, heads);
  };
  for (int n = 0; n < kRowStages; ++n) load();
  for (; now.rows < p.boxes; now.advance(p.step, heads)) {
    uint32_t const head = now.head;
    int64_t const first = int64_t{now.rows} * S::Rows, token = first + S::row(lane);
    auto const* const mean = a.k_mean + head / group * D + S::Numbers * S::part(lane);
    float offsets[4], offset;
    bool visited = false;
    auto add = [&](int j, float const(&v)[8]) {
      if (j == 0) offsets[0] = offsets[1] = offsets[2] = offsets[3] = 0.f;
      CUTE_UNROLL
      for (int i = 0; i < 8; i += 4) {
        float4 const m = __ldg(reinterpret_cast<float4 const*>(mean + 8 * j + i));
        offsets[0] = __fmaf_rn(v[i], m.x, offsets[0]);
        offsets[1] = __fmaf_rn(v[i + 1], m.y, offsets[1]);
        offsets[2] = __fmaf_rn(v[i + 2], m.z, offsets[2]);
        offsets[3] = __fmaf_rn(v[i + 3], m.w, offsets[3]);
      }
      if (j == S::Vectors - 1 && !visited) {  // of Q as it is, not saturated
        offset = (offsets[0] + offsets[1]) + (offsets[2] + offsets[3]);
        visited = true;
      }
    };
    stages.wait();
    float y[S::Numbers];
    float const amax = stages.template rotate_row<Format>(y, NoCentre{}, part_signs, add);
    CUTE_UNROLL
    for (int i = S::Rows; i < kWarp; i *= 2) offset += __shfl_xor_sync(0xffffffff, offset, i);
    float const scale = row_scale<Format>(amax * S::kNorm);
    // Int8 numbers of a row that is not finite are 0; its scale is NaN.
    float const factor = Format::kNanInScale && amax != amax ? 0.f : __fdiv_rn(S::kNorm, scale);
    // 3 times a power of two: 3 times an odd number above 85 has 9 bits.
    bool const threefold = __float_as_uint(scale) & 0x7fffff;
    float const even_from = threefold ? __fdiv_rn(85.5f, factor) : INFINITY;
    auto const pack = [&](float const* x) { return Format::pack_row(x, factor, even_from); };
    int64_t const at = (first * heads + head) * D, of_row = head * a.q.tokens + token;
    int const rows = static_cast<int>(a.q.tokens - first);
    if constexpr (Dequantised) {
      stages.store_bfloats(
          y, [&](float const* x) { return dequantised<Format>(pack(x), scale); },
          static_cast<cutlass::bfloat16_t*>(a.values) + at, heads * D, rows);
    } else {
      stages.store(y, pack, static_cast<uint8_t*>(a.values) + at, heads * D, rows);
    }
    load();
    if (S::part(lane) == 0 && token < a.q.tokens) {
      if (isnan(scale)) offset = NAN;
      if constexpr (Dequantised) {
        float const lse = a.lse[of_row];
        a.centred_lse[of_row] = lse == -INFINITY ? lse : lse - a.softmax_scale * offset;
      } else {
        a.scale[of_row] = scale;
        a.k_offset[of_row] = offset;
      }
    }
  }
}

template <class S>
cudaError_t launch_quantise_q(QuantiseQArgs const& a, cudaStream_t stream) {
  int64_t const boxes = (a.q.tokens + S::Rows - 1) / S::Rows, heads = a.q.heads;
  int64_t warps = min(boxes * heads, int64_t{num_sms()} * kQueryCtas * kQueryWarps);
  // A warp whose boxes have one head reads one mean of K.
  if (int64_t const rest = warps % heads; rest <= warps / 16) warps -= rest;
  QueryParams p{
      .q = {},
      .args = a,
      .boxes = static_cast<uint32_t>(boxes),
      .warps = static_cast<uint32_t>(warps),
      .step = {static_cast<uint32_t>(warps / heads), static_cast<uint32_t>(warps % heads)}};
  if (!encode<typename S::Element>(p.q, a.q, S::Rows, S::D)) return cudaErrorInvalidValue;
  constexpr int kSmem = sizeof(QueryStorage<S>);
  static_assert(kSmem <= 48 * 1024, "more needs `allow_shared`");
  auto const ctas = static_cast<unsigned>((warps + kQueryWarps - 1) / kQueryWarps);
  constexpr decltype(&quantise_q_kernel<S, E4M3, false>) kKernels[2][2] = {
      {quantise_q_kernel<S, E4M3, false>, quantise_q_kernel<S, Int8, false>},
      {quantise_q_kernel<S, E4M3, true>, quantise_q_kernel<S, Int8, true>}};
  kKernels[a.lse != nullptr][a.int8 != 0]<<<ctas, kQueryThreads, kSmem, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace ringfa3
