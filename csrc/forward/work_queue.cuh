// Which piece of work comes next: one warp takes it from a counter and decodes it.
#pragma once

#include "forward/shapes.cuh"

namespace ringfa3 {

using namespace cute;

// Warp-wide: O = 0 and LSE = -inf for the rows of a tile.
template <class Traits>
CUTE_DEVICE void store_nothing(ForwardArgs const& a, Tile const& tile, int head, int lane) {
  constexpr int kEights = Traits::D / 8;  // of 16 bytes in a row of O
  auto* const out = static_cast<typename Traits::Element*>(a.out.data) + head * a.out.head_stride;
#pragma unroll 1  // few registers
  for (int i = lane; i < tile.rows * kEights; i += kWarp) {
    int64_t const token = tile.row0 + i / kEights;
    auto* const eight = out + token * a.out.token_stride + i % kEights * 8;
    *reinterpret_cast<uint4*>(eight) = make_uint4(0, 0, 0, 0);
  }
#pragma unroll 1
  for (int i = lane; i < tile.rows; i += kWarp) {
    a.lse[head * a.lse_head_stride + tile.row0 + i] = -INFINITY;
  }
}

// The tile of piece of work w, and its query head.
template <class Traits>
CUTE_DEVICE Tile piece_of(ForwardParams<Traits> const& p, int w, int& head) {
  ForwardArgs const& a = p.args;
  int const per_section = a.num_tiles * a.head_section;
  int const section = w / per_section;
  int const rest = w - section * per_section;
  int const width = min(a.head_section, p.heads - section * a.head_section);
  head = section * a.head_section + rest % width;
  return a.tiles[rest / width];
}

// Warp-wide: takes and decodes the next piece of work while the last blocks of this one are on
// their way. Not earlier: whoever is free first should get the next one. Every piece is followed by
// one turn of the counter, and the last of these turns it back to 0 for the next launch.
template <class Traits>
CUTE_DEVICE void fetch_work(ForwardParams<Traits> const& p, typename Traits::SharedStorage& smem) {
  int const lane = threadIdx.x % kWarp;
  ForwardArgs const& a = p.args;
  StageState<kWorkDepth> state;
  uint32_t wanted_phase = 0;
  int w = blockIdx.x;
  while (true) {
    smem.work_empty[state.index()].wait(state.phase() ^ 1);
    Work& work = smem.work[state.index()];
    if (w >= p.num_work) {
      if (lane == 0) work.head = -1;
    } else {
      int head;
      Tile const tile = piece_of(p, w, head);
      if (tile.num_spans == 0) {  // sees nothing at any hop
        store_nothing<Traits>(a, tile, head, lane);
        if (lane == 0) w = gridDim.x + atomicInc(a.counter, p.num_work - 1);
        w = __shfl_sync(0xffffffff, w, 0);
        continue;
      }
      if (lane < min(tile.num_spans, kVisits)) {
        work.visits[lane] = Visit(tile, a.spans[tile.first_span + lane]);
      }
      if (lane == 0) {
        work.tile = tile;
        work.head = head;
        work.kv_head = head / p.group;
        work.called_off = false;
      }
    }
    __syncwarp();
    if (lane == 0) smem.work_full[state.index()].arrive();
    if (w >= p.num_work) return;
    state.advance();
    smem.work_wanted.wait(wanted_phase);
    wanted_phase ^= 1;
    if (lane == 0) w = gridDim.x + atomicInc(a.counter, p.num_work - 1);
    w = __shfl_sync(0xffffffff, w, 0);
  }
}

}  // namespace ringfa3
