// The end of a tile: O and LSE, stored.
#pragma once

#include "hopper/store.cuh"
#include "forward/partial_output.cuh"
#include "forward/softmax.cuh"
#include "forward/shapes.cuh"

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

// Rows whose last block is in P: stores their LSE, and says by what O is to be normalised once the
// last product is there. NaN where keys did not arrive.
template <class Traits>
CUTE_DEVICE void finish_rows(ForwardParams<Traits> const& p, Work const& work, int row, int lane,
                             RowState const& rows, float (&weight)[2]) {
  float* const lse_at = PartialRows<Traits>(p, work, row, lane).lse;
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) {
    float total = rows.total[r];
    total += __shfl_xor_sync(0xffffffff, total, 1);
    total += __shfl_xor_sync(0xffffffff, total, 2);
    if (work.called_off) total = NAN;
    weight[r] = total == 0.f ? 0.f : 1.f / total;
    float const lse = total == 0.f ? -INFINITY : (rows.shift[r] + __log2f(total)) * kLn2;
    if (lane % 4 == 0 && row + 8 * r < work.tile.rows) lse_at[8 * r] = lse;
  }
}

// Stores the O of a tile, normalised before. A warp holds 16 rows, a quad of its lanes two, 8
// apart; box is its place in shared memory.
template <class Traits, class Output>
CUTE_DEVICE void store_output(ForwardParams<Traits> const& p, Work const& work, int warp, int lane,
                              Output const& o, typename Traits::Element* box) {
  using Element = typename Traits::Element;
  ForwardArgs const& a = p.args;
  Tile const& tile = work.tile;
  if (tile.flags & kLast) {
    if constexpr (Traits::kBoxedO) {
      if (kWarpRows * (warp + 1) <= tile.rows) {
        store_box<Traits>(p.out, box, o, lane, tile.row0 + kWarpRows * warp, work.head);
        return;
      }
    }
  }
  int const row = kWarpRows * warp + lane / 4;
  PartialRows<Traits> const at(p, work, row, lane);
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) {
    bool const stored = row + 8 * r < tile.rows;
    if (tile.flags & kLast) {
      Element* const out = static_cast<Element*>(a.out.data) +
                           (tile.row0 + row + 8 * r) * a.out.token_stride +
                           work.head * a.out.head_stride;
      store_row<Element, Traits::D, !Traits::kBoxedO>(out, o, r, lane, stored);
    } else if (stored) {
      at.store(o, r);
    }
  }
}

}  // namespace ringfa3
