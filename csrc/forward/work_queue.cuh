// The forward's work queue: one warp fetches work items from a counter and decodes them.
#pragma once

#include "forward/shapes.cuh"
#include "hopper/pipeline.cuh"

namespace ringfa3 {

using namespace cute;

// Warp-wide: stores O = 0 and LSE = -inf for the rows of a tile that sees nothing.
template <class Shapes>
CUTE_DEVICE void store_empty_tile(ForwardArgs const& a, Tile const& tile, int head, int lane) {
  constexpr int kEights = Shapes::D / 8;  // of a row of O, 16 bytes each
  auto* const out = static_cast<typename Shapes::Element*>(a.out.data) + head * a.out.head_stride;
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

// Warp-wide: fetches and decodes the next work item while the last blocks of this one are loaded.
// Not earlier, so that the CTA that is free first gets it. One increment of the counter follows
// each item, so the last increment of a launch wraps it to 0 for the next launch.
template <class Shapes>
CUTE_DEVICE void fetch_work(ForwardParams<Shapes> const& p, typename Shapes::SharedStorage& smem) {
  int const lane = threadIdx.x % kWarp;
  ForwardArgs const& a = p.args;
  Pipeline<kWorkDepth> stage;
  uint32_t wanted_phase = 0;
  int w = blockIdx.x;
  while (true) {
    smem.work_empty[stage.index()].wait(stage.phase() ^ 1);
    WorkItem& work = smem.work[stage.index()];
    if (w >= p.num_work) {
      if (lane == 0) work.head = -1;
    } else {
      auto const [number, head] = decode_work(w, a.num_tiles, p.heads, a.head_section);
      Tile const tile = a.tiles[number];
      if (tile.num_spans == 0) {  // at any hop
        store_empty_tile<Shapes>(a, tile, head, lane);
        if (lane == 0) w = gridDim.x + atomicInc(a.counter, p.num_work - 1);
        w = __shfl_sync(0xffffffff, w, 0);
        continue;
      }
      if (lane < min(tile.num_spans, kDecodedSpans)) {
        work.spans[lane] = SpanColumns(tile, a.spans[tile.first_span + lane]);
      }
      if (lane == 0) {
        work.tile = tile;
        work.head = head;
        work.kv_head = head / p.group;
      }
    }
    __syncwarp();
    if (lane == 0) smem.work_full[stage.index()].arrive();
    if (w >= p.num_work) return;
    stage.advance();
    smem.work_wanted.wait(wanted_phase);
    wanted_phase ^= 1;
    if (lane == 0) w = gridDim.x + atomicInc(a.counter, p.num_work - 1);
    w = __shfl_sync(0xffffffff, w, 0);
  }
}

}  // namespace ringfa3
