// The end of a tile: O and LSE, stored or merged with earlier hops.
#pragma once

#include "rows.cuh"
#include "softmax.cuh"
#include "traits.cuh"

namespace ringfa3 {

using namespace cute;

// One warp: its 16 rows of O to shared memory, (16, D), from where they are stored while it goes
// on.
template <class Traits, class Output>
CUTE_DEVICE void store_box(CUtensorMap const& map, typename Traits::Element* box, Output const& o,
                           int lane, int token, int head) {
  using Element = typename Traits::Element;
  constexpr int kLine = kSlab * sizeof(Element);
  tma_store_wait<0>();  // what the warp's last tile left there has been read
  __syncwarp();
  uint32_t const line = cast_smem_ptr_to_uint(box) + lane % kWarpRows * kLine;
  CUTE_UNROLL
  for (int j = 0; j < Traits::D / 8; j += 2) {  // lanes 0-15 have the rows' column 8j, 16-31 8j + 8
    int const unit = (j + lane / 16) % 8 ^ lane % 8;
    uint32_t const at = line + j / 8 * kWarpRows * kLine + unit * 16;
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at),
                 "r"(packed<Element>(o, 0, j)), "r"(packed<Element>(o, 1, j)),
                 "r"(packed<Element>(o, 0, j + 1)), "r"(packed<Element>(o, 1, j + 1))
                 : "memory");
  }
  tma_store_fence();
  __syncwarp();
  if (lane == 0) {
    CUTE_UNROLL
    for (int column = 0; column < Traits::D; column += kSlab) {
      SM90_TMA_STORE_3D::copy(&map, box + column * kWarpRows, column, token, head);
    }
    tma_store_arrive();
  }
}

// Merges a row with what earlier hops left: the weight of the old O, and of ours, whose LSE it is.
CUTE_DEVICE float2 merge(float old, float& lse) {
  if (old == -INFINITY && lse == -INFINITY) return make_float2(0.f, 0.f);
  float const high = fmaxf(old, lse);
  float const both = high + __logf(__expf(old - high) + __expf(lse - high));
  float2 const weights = make_float2(__expf(old - both), __expf(lse - both));
  lse = both;
  return weights;
}

// The end of a tile: normalises O, and stores or merges it and the LSE; NaN where keys did not
// arrive. A warp holds 16 rows, a quad of its lanes two, 8 apart; box is its place in shared
// memory.
template <class Traits, class Output>
CUTE_DEVICE void finish(ForwardParams<Traits> const& p, Work const& work, int warp, int lane,
                        RowState const& rows, Output& o, typename Traits::Element* box) {
  using Element = typename Traits::Element;
  constexpr int D = Traits::D;
  ForwardArgs const& a = p.args;
  Tile const& tile = work.tile;
  int const head = work.head;
  bool const first = tile.flags & kFirst, last = tile.flags & kLast;
  bool const boxed = Traits::kBoxedO && last && kWarpRows * (warp + 1) <= tile.rows;
  int const row = kWarpRows * warp + lane / 4;
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) {
    float total = rows.total[r];
    total += __shfl_xor_sync(0xffffffff, total, 1);
    total += __shfl_xor_sync(0xffffffff, total, 2);
    if (work.called_off) total = NAN;
    float weight = total == 0.f ? 0.f : 1.f / total;
    float lse = total == 0.f ? -INFINITY : (rows.shift[r] + __log2f(total)) * kLn2;
    bool const stored = row + 8 * r < tile.rows;
    int64_t const token = tile.row0 + row + 8 * r;
    float* const lse_at = a.lse + head * a.lse_head_stride + token;
    float* const running = a.running + (token * p.heads + head) * D + 2 * (lane % 4);
    float old_weight = 0.f;
    if (!first) {
      float2 const weights = merge(stored ? *lse_at : -INFINITY, lse);
      old_weight = weights.x, weight *= weights.y;
      __syncwarp();  // every lane of a row has read its LSE
    }
    CUTE_UNROLL
    for (int n = 2 * r; n < D / 2; n += 4) o(n) *= weight, o(n + 1) *= weight;
    if (!first && stored) {
      CUTE_UNROLL
      for (int n = 2 * r; n < D / 2; n += 4) {
        float2 const old = *reinterpret_cast<float2*>(running + 2 * (n - 2 * r));
        o(n) += old_weight * old.x, o(n + 1) += old_weight * old.y;
      }
    }
    if (stored && lane % 4 == 0) *lse_at = lse;
    if (last && !boxed) {
      Element* const out =
          static_cast<Element*>(a.out.data) + token * a.out.token_stride + head * a.out.head_stride;
      store_row<Element, D>(out, o, r, lane, stored);
    } else if (!last && stored) {
      CUTE_UNROLL
      for (int n = 2 * r; n < D / 2; n += 4) {
        *reinterpret_cast<float2*>(running + 2 * (n - 2 * r)) = make_float2(o(n), o(n + 1));
      }
    }
  }
  if constexpr (Traits::kBoxedO) {
    if (boxed) store_box<Traits>(p.out, box, o, lane, tile.row0 + kWarpRows * warp, head);
  }
}

}  // namespace ringfa3
