// The end of a tile: storing O and LSE.
#pragma once

#include "hopper/store.cuh"
#include "forward/partial_output.cuh"
#include "forward/softmax.cuh"
#include "forward/shapes.cuh"

namespace ringfa3 {

using namespace cute;

// One warp: stores its 16 rows of O by TMA, from a box (16, D) in shared memory, while it
// continues.
template <class Shapes, class Output>
CUTE_DEVICE void store_box(CUtensorMap const& map, typename Shapes::Element* box, Output const& o,
                           int lane, int token, int head) {
  using Element = typename Shapes::Element;
  constexpr int kLine = kSlab * sizeof(Element);
  tma_store_wait<0>();  // the store of the last tile has read the box
  __syncwarp();
  uint32_t const line = cast_smem_ptr_to_uint(box) + lane % kWarpRows * kLine;
  CUTE_UNROLL
  for (int j = 0; j < Shapes::D / 8; j += 2) {  // lanes 0-15 address column 8j, 16-31 column 8j + 8
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
    for (int column = 0; column < Shapes::D; column += kSlab) {
      SM90_TMA_STORE_3D::copy(&map, box + column * kWarpRows, column, token, head);
    }
    tma_store_arrive();
  }
}

// Stores the LSE of rows whose last block is in P, and computes the factor `weight` that normalises
// O after the last product.
template <class Shapes>
CUTE_DEVICE void store_lse(ForwardParams<Shapes> const& p, WorkItem const& work, int row, int lane,
                           OnlineSoftmax const& rows, float (&weight)[2]) {
  float* const lse_at = PartialRows<Shapes>(p, work, row, lane).lse;
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) {
    float total = rows.total[r];
    total += __shfl_xor_sync(0xffffffff, total, 1);
    total += __shfl_xor_sync(0xffffffff, total, 2);
    weight[r] = total == 0.f ? 0.f : 1.f / total;
    float const lse = total == 0.f ? -INFINITY : (rows.shift[r] + __log2f(total)) * kLn2;
    if (lane % 4 == 0 && row + 8 * r < work.tile.rows) lse_at[8 * r] = lse;
  }
}

// Stores a warp's 16 rows of the normalised O: the output dtype if the tile is kLast, else the
// float32 partial output. `box` is the warp's place in shared memory. A quad of lanes holds two
// rows, 8 apart.
template <class Shapes, class Output>
CUTE_DEVICE void store_output(ForwardParams<Shapes> const& p, WorkItem const& work, int warp,
                              int lane, Output const& o, typename Shapes::Element* box) {
  using Element = typename Shapes::Element;
  ForwardArgs const& a = p.args;
  Tile const& tile = work.tile;
  if (tile.flags & kLast) {
    if constexpr (Shapes::kPolicy.boxed_o) {
      if (kWarpRows * (warp + 1) <= tile.rows) {
        store_box<Shapes>(p.out, box, o, lane, tile.row0 + kWarpRows * warp, work.head);
        return;
      }
    }
  }
  int const row = kWarpRows * warp + lane / 4;
  PartialRows<Shapes> const at(p, work, row, lane);
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) {
    bool const stored = row + 8 * r < tile.rows;
    if (tile.flags & kLast) {
      Element* const out = static_cast<Element*>(a.out.data) +
                           (tile.row0 + row + 8 * r) * a.out.token_stride +
                           work.head * a.out.head_stride;
      store_row<Element, Shapes::D, !Shapes::kPolicy.boxed_o>(out, o, r, lane, stored);
    } else if (stored) {
      at.store(o, r);
    }
  }
}

}  // namespace ringfa3
