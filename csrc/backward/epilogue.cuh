// The end of a work unit: storing dK and dV, or adding them to those of other units.
#pragma once

#include "backward/shapes.cuh"
#include "hopper/store.cuh"

namespace ringfa3 {

using namespace cute;

// Stores the columns that dK or dV has of one warpgroup's (64, Columns): in the dtype of k, or in
// float32, to which a kShared unit adds. A quad of lanes holds the tile's keys `key` and `key + 8`.
template <class Shapes, class Accumulator>
CUTE_DEVICE void store_gradient(BackwardArgs const& a, Tensor3 const& gradient,
                                WorkUnit const& unit, int kv_head, int key, int lane,
                                Accumulator const& x) {
  using Element = typename Shapes::Element;
  constexpr int kColumns = 2 * decltype(size(x))::value;
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) {
    bool const stored = key + 8 * r < unit.rows;
    int64_t const offset =
        (unit.row0 + key + 8 * r) * gradient.token_stride + kv_head * gradient.head_stride;
    if (!a.float32_grads) {
      store_row<Element, kColumns>(static_cast<Element*>(gradient.data) + offset, x, r, lane,
                                   stored, gradient.head_dim);
    } else if (stored) {
      float* const to = static_cast<float*>(gradient.data) + offset + 2 * (lane % 4);
      auto for_each_pair = [&](auto put) {
        CUTE_UNROLL
        for (int n = 2 * r; n < kColumns / 2; n += 4) {
          int const column = 2 * (n - 2 * r);  // the first of the eight of a quad
          if (column < gradient.head_dim) {
            put(reinterpret_cast<float2*>(to + column), make_float2(x(n), x(n + 1)));
          }
        }
      };
      if (unit.flags & kShared) {
        for_each_pair([](float2* at, float2 mine) {
          asm volatile("red.relaxed.gpu.global.add.v2.f32 [%0], {%1, %2};"
                       :
                       : "l"(at), "f"(mine.x), "f"(mine.y)
                       : "memory");
        });
      } else {
        for_each_pair([](float2* at, float2 mine) { *at = mine; });
      }
    }
  }
}

}  // namespace ringfa3
