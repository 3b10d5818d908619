// K in 8 bits: centred, rotated, with a scale for each tile of 128 keys and head. For the backward
// the kernel writes it in bfloat16, with the factor of the tile.
#pragma once

#include "hopper/launch.cuh"
#include "hopper/sync.cuh"
#include "quantise/row_stages.cuh"

namespace ringfa3 {

using namespace cute;

template <class S>
struct KeyShapes {
  static constexpr int Warps = kKeyTile / S::Rows;  // of a CTA, which has a tile of a head
  static constexpr int Threads = Warps * kWarp;
  static constexpr int Ctas = 512 / Threads;  // of an SM
  struct Storage {
    RowStorage<S, Warps> rows;
    alignas(16) float centres[2][2][S::D];  // of this tile, of the next one
    float warp_amax[2][Warps];
  };
};

struct KeyParams {
  CUtensorMap k;
  QuantiseKVArgs args;
  RowStep step;  // as many tiles of a head as CTAs
};

// A tile stays in registers until its largest magnitude is known.
template <class S, class Format, bool Dequantised>
__global__ void __launch_bounds__(KeyShapes<S>::Threads, KeyShapes<S>::Ctas)
    quantise_k_kernel(__grid_constant__ KeyParams const p) {
  using Shapes = KeyShapes<S>;
  constexpr int D = S::D;
  extern __shared__ __align__(1024) char raw[];
  auto& smem = *reinterpret_cast<typename Shapes::Storage*>(raw);
  QuantiseKVArgs const& a = p.args;
  int const lane = threadIdx.x % kWarp, warp = cutlass::canonical_warp_idx_sync();
  RowStages<S> stages(smem.rows, warp, lane);
  PartSigns<S> const part_signs(lane);
  auto const heads = static_cast<uint32_t>(a.k.heads), tiles = static_cast<uint32_t>(a.num_tiles);
  wait_for_earlier_kernels();
  launch_next_kernel();
  RowCursor now(blockIdx.x, heads), next = now, ahead = now;
  auto load = [&] {
    if (ahead.rows < tiles) {
      stages.load(p.k, a.tiles[ahead.rows].row0 + warp * S::Rows, ahead.head);
    }
    ahead.advance(p.step, heads);
  };
  auto centre = [&](RowCursor const& of, int to) {
    if (int const c = threadIdx.x; c < D && of.rows < tiles) {
      float const mean = a.k_mean[of.head * D + c];
      float const clamped = fminf(fmaxf(mean, -kLargestInput), kLargestInput);
      smem.centres[to][1][c] = clamped, smem.centres[to][0][c] = plain_centre(clamped);
    }
  };
  for (int n = 0; n < kRowStages; ++n) load();
  centre(now, 0);
  __syncthreads();
  for (int parity = 0; now.rows < tiles; now = next, parity ^= 1) {
    uint32_t const head = now.head;
    KeyTile const tile = a.tiles[now.rows];
    int const rows = tile.rows - warp * S::Rows;  // of this warp; may be negative
    next.advance(p.step, heads);
    centre(next, parity ^ 1);
    stages.wait();
    float y[S::Numbers];
    auto const nothing = [](int, float const(&)[8]) {};
    float amax = stages.template rotate_row<Format>(
        y, &smem.centres[parity][0][S::Numbers * S::part(lane)], part_signs, nothing);
    if (S::row(lane) >= rows || (!Format::kNanInScale && amax != amax)) amax = 0.f;
    CUTE_UNROLL
    for (int i = 1; i < S::Rows; i *= 2) {
      amax = max_or_nan(amax, __shfl_xor_sync(0xffffffff, amax, i));
    }
    if (lane == 0) smem.warp_amax[parity][warp] = amax;
    __syncthreads();
    CUTE_UNROLL
    for (int i = 0; i < Shapes::Warps; ++i) amax = max_or_nan(amax, smem.warp_amax[parity][i]);
    float const inverse = tile_factor<Format>(amax * S::kNorm);
    float const factor = amax != amax ? 0.f : S::kNorm * inverse;
    int64_t const token = int64_t{tile.row0} + warp * S::Rows;
    auto const pack = [&](float const* x) { return Format::pack(x, factor); };
    if constexpr (Dequantised) {
      constexpr int kColumns = D + kFactorColumns;
      // `inverse` is a number of [1, 2) over `power`. Int8 numbers of a tile with NaN stay 0.
      uint32_t const exponent = __float_as_uint(inverse) & 0x7f800000;
      float const power = amax != amax ? 0.f : __uint_as_float(0x7f000000 - exponent);
      float const stored_factor = inverse * power;  // exact
      uint2 const four =
          packed_bfloats({stored_factor, stored_factor, stored_factor, stored_factor});
      stages.template store_bfloats<kFactorColumns>(
          y, [&](float const* x) { return dequantised<Format>(pack(x), power); },
          static_cast<cutlass::bfloat16_t*>(a.k_values) + (token * heads + head) * kColumns,
          heads * kColumns, rows, make_uint4(four.x, four.y, four.x, four.y));
    } else {
      stages.store(y, pack, static_cast<uint8_t*>(a.k_values) + (token * heads + head) * D,
                   heads * D, rows);
      if (threadIdx.x == 0) a.k_scale[int64_t{head} * tiles + now.rows] = __frcp_rn(inverse);
    }
    load();
  }
}

template <class S, class Format, bool Dequantised>
cudaError_t launch_quantise_k(QuantiseKVArgs const& a, cudaStream_t stream) {
  using Shapes = KeyShapes<S>;
  int64_t const heads = a.k.heads;
  int64_t const ctas = min(a.num_tiles * heads, int64_t{num_sms()} * Shapes::Ctas);
  KeyParams p{.k = {},
              .args = a,
              .step = {static_cast<uint32_t>(ctas / heads), static_cast<uint32_t>(ctas % heads)}};
  if (!encode<typename S::Element>(p.k, a.k, S::Rows, S::D)) return cudaErrorInvalidValue;
  constexpr int kSmem = sizeof(typename Shapes::Storage);
  constexpr auto kernel = quantise_k_kernel<S, Format, Dequantised>;
  if (cudaError_t const status = allow_shared<kernel>(kSmem); status != cudaSuccess) {
    return status;
  }
  return launch_early(kernel, dim3(static_cast<unsigned>(ctas)), Shapes::Threads, kSmem, stream, p);
}

}  // namespace ringfa3
