// The end of a tile: O and LSE, stored or merged with earlier hops.
#pragma once

#include <cutlass/numeric_conversion.h>

#include "softmax.cuh"
#include "traits.cuh"

namespace ringfa3 {

using namespace cute;

// Stores one row of O, of which a quad of lanes holds columns 8j + 2q, 8j + 2q + 1 for all j, in
// the output dtype. Neighbouring lanes trade halves, so that a quad writes whole 32-byte sectors.
template <class Traits, class Output>
CUTE_DEVICE void store_row(typename Traits::Element* out, Output const& o, int r, int lane,
                           bool stored) {
  cutlass::NumericArrayConverter<typename Traits::Element, float, 2> convert;
  auto pack = [&](int j) {
    cutlass::Array<float, 2> pair;
    pair[0] = o(4 * j + 2 * r), pair[1] = o(4 * j + 2 * r + 1);
    auto const packed = convert(pair);
    return reinterpret_cast<uint32_t const&>(packed);
  };
  bool const odd = lane & 1;
  out += 8 * (lane & 1) + 2 * (lane & 2);
  CUTE_UNROLL
  for (int j = 0; j < Traits::D / 8; j += 2) {
    uint32_t const a = pack(j), b = pack(j + 1);
    uint32_t const got = __shfl_xor_sync(0xffffffff, odd ? a : b, 1);
    uint2 const eight = odd ? make_uint2(got, b) : make_uint2(a, got);
    if (stored) *reinterpret_cast<uint2*>(out + 8 * j) = eight;
  }
}

// Merges a row with what earlier hops left: the weight of the old O, and of ours, whose LSE it is.
CUTE_DEVICE float2 merge(float old, float& lse) {
  float const high = fmaxf(old, lse);
  if (high == -INFINITY) return make_float2(0.f, 0.f);
  float const both = high + __logf(__expf(old - high) + __expf(lse - high));
  float2 const weights = make_float2(__expf(old - both), __expf(lse - both));
  lse = both;
  return weights;
}

// The end of a tile: normalises O, and stores or merges it and the LSE; NaN where keys did not
// arrive. A quad of lanes holds two rows, `row` and `row + 8` of the tile.
template <class Traits, class Output>
CUTE_DEVICE void finish(ForwardParams<Traits> const& p, Work const& work, int row, int lane,
                        RowState const& rows, Output& o) {
  using Element = typename Traits::Element;
  constexpr int D = Traits::D;
  ForwardArgs const& a = p.args;
  Tile const& tile = work.tile;
  int const head = work.head;
  bool const first = tile.flags & kFirst, last = tile.flags & kLast;
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
    if (last) {
      Element* const out =
          static_cast<Element*>(a.out.data) + token * a.out.token_stride + head * a.out.head_stride;
      store_row<Traits>(out, o, r, lane, stored);
    } else if (stored) {
      CUTE_UNROLL
      for (int n = 2 * r; n < D / 2; n += 4) {
        *reinterpret_cast<float2*>(running + 2 * (n - 2 * r)) = make_float2(o(n), o(n + 1));
      }
    }
  }
}

}  // namespace ringfa3
