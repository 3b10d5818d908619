// The end of a tile: O and LSE, stored or merged with earlier hops.
#pragma once

#include "rows.cuh"
#include "softmax.cuh"
#include "traits.cuh"

namespace ringfa3 {

using namespace cute;

// Merges a row with what earlier hops left: the weight of the old O, and of ours, whose LSE it is.
CUTE_DEVICE float2 merge(float old, float& lse) {
  float const high = fmaxf(old, lse);
  if (high == -INFINITY) return make_float2(0.f, 0.f);
  float const both = high + __logf(__expf(old - high) + __expf(lse - high));
  float2 const weights = make_float2(__expf(old - both), __expf(lse - both));
  lse = both;
  return weights;
}

// The end of a tile: normalises O, and stores or merges it and the LSE. A quad of lanes holds two
// rows, `row` and `row + 8` of the tile.
template <class Traits, class Output>
CUTE_DEVICE void finish(ForwardParams<Traits> const& p, Tile const& tile, int head, int row,
                        int lane, RowState const& rows, Output& o) {
  using Element = typename Traits::Element;
  constexpr int D = Traits::D;
  ForwardArgs const& a = p.args;
  bool const first = tile.flags & kFirst, last = tile.flags & kLast;
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) {
    float total = rows.total[r];
    total += __shfl_xor_sync(0xffffffff, total, 1);
    total += __shfl_xor_sync(0xffffffff, total, 2);
    float weight = total == 0.f ? 0.f : 1.f / total;
    float lse = total == 0.f ? -INFINITY : (rows.shift[r] + __log2f(total)) * kLn2;
    bool const stored = row + 8 * r < tile.rows;
    int64_t const token = tile.row0 + row + 8 * r;
    float* const lse_at = a.lse + head * a.lse_head_stride + token;
    float* const running = a.running + (token * p.heads + head) * D + 2 * (lane % 4);
    if (!first) {
      float2 const weights = merge(stored ? *lse_at : -INFINITY, lse);
      weight *= weights.y;
      CUTE_UNROLL
      for (int n = 2 * r; n < D / 2; n += 4) {
        float2 const old =
            stored ? *reinterpret_cast<float2*>(running + 2 * (n - 2 * r)) : make_float2(0.f, 0.f);
        o(n) = o(n) * weight + weights.x * old.x;
        o(n + 1) = o(n + 1) * weight + weights.x * old.y;
      }
      __syncwarp();  // every lane of a row has read its LSE
    } else {
      CUTE_UNROLL
      for (int n = 2 * r; n < D / 2; n += 4) o(n) *= weight, o(n + 1) *= weight;
    }
    if (stored && lane % 4 == 0) *lse_at = lse;
    if (last) {
      Element* const out =
          static_cast<Element*>(a.out.data) + token * a.out.token_stride + head * a.out.head_stride;
      store_row<Element, D>(out, o, r, lane, stored);
    } else if (stored) {
      CUTE_UNROLL
      for (int n = 2 * r; n < D / 2; n += 4) {
        *reinterpret_cast<float2*>(running + 2 * (n - 2 * r)) = make_float2(o(n), o(n + 1));
      }
    }
  }
}

}  // namespace ringfa3
