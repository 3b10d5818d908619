// K in 8 bits: centred, rotated, with a scale for each tile of 128 keys and head.
#pragma once

#include "hopper/cluster.cuh"
#include "hopper/sync.cuh"
#include "quantise/rotation.cuh"

namespace ringfa3 {

using namespace cute;

template <class S>
struct KeyShapes {
  static constexpr int Threads = 512, Warps = Threads / kWarp;
  static constexpr int Ctas = kKeyTile * S::Lanes / Threads;  // of a cluster, which shares a tile
  static constexpr int Rows = kKeyTile / Ctas;                // of a CTA
};

// A cluster, of one CTA or two, per tile and head; heads are next to each other. The tile stays in
// registers until its largest magnitude is known.
template <class S, class Format>
__global__ void __launch_bounds__(KeyShapes<S>::Threads, 2)
    quantise_k_kernel(__grid_constant__ QuantiseKVArgs const a) {
  using Shapes = KeyShapes<S>;
  constexpr int D = S::D;
  __shared__ alignas(16) float centres[2][D];
  __shared__ float warp_amax[Shapes::Warps], cta_amax;
  wait_for_earlier_kernels();
  launch_next_kernel();
  auto const heads = static_cast<uint32_t>(a.k.heads);
  uint32_t const part = blockIdx.x % Shapes::Ctas, cluster = blockIdx.x / Shapes::Ctas;
  uint32_t const head = cluster % heads, number = cluster / heads;
  KeyTile const tile = a.tiles[number];
  int const lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  int const row = part * Shapes::Rows + threadIdx.x / S::Lanes;
  bool const here = row < tile.rows;
  int64_t const token = int64_t{tile.row0} + cute::min(row, tile.rows - 1);
  auto load = [&](auto& x) { load_row<S>(x, a.k, token, head, lane); };
  uint4 x[S::Vectors];
  load(x);
  if (int const c = threadIdx.x; c < D) {
    uint64_t signs = sign_bits(0);
    CUTE_UNROLL
    for (int n = 1; n < D / 64; ++n) signs = c / 64 == n ? sign_bits(n) : signs;
    float const mean = a.k_mean[head * D + c];
    float const centre = fminf(fmaxf(mean, -kLargestInput), kLargestInput);
    centres[1][c] = signs >> c % 64 & 1 ? -centre : centre;
    centres[0][c] = plain_centre(centres[1][c]);
  }
  __syncthreads();
  float y[S::Numbers];
  float amax = rotate_row<S, Format>(y, x, centres[0], lane, load);
  if (!here || (!Format::kSpoils && amax != amax)) amax = 0.f;
  CUTE_UNROLL
  for (int i = S::Lanes; i < kWarp; i *= 2) {
    amax = max_or_nan(amax, __shfl_xor_sync(0xffffffff, amax, i));
  }
  if (lane == 0) warp_amax[warp] = amax;
  __syncthreads();
  CUTE_UNROLL
  for (int i = 0; i < Shapes::Warps; ++i) amax = max_or_nan(amax, warp_amax[i]);
  if constexpr (Shapes::Ctas > 1) {
    static_assert(Shapes::Ctas == 2);
    if (threadIdx.x == 0) cta_amax = amax;
    sync_cluster();
    amax = max_or_nan(amax, load_from_cta(1 - part, &cta_amax));
  }
  float const scale = scale_of<Format>(amax * S::kNorm);
  float const factor = amax != amax ? 0.f : __fdiv_rn(S::kNorm, scale);
  if (here) {
    auto* const to = static_cast<uint8_t*>(a.k_values) + (token * heads + head) * D;
    store_row_bytes<S, Format>(to, y, factor, lane);
  }
  if (threadIdx.x == 0 && part == 0) a.k_scale[int64_t{head} * a.num_tiles + number] = scale;
  if constexpr (Shapes::Ctas > 1) sync_cluster();  // the peer has read cta_amax
}

}  // namespace ringfa3
