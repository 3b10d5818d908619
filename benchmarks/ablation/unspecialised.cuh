// The forward without warp specialisation: a consumer thread that releases a stage refills it.
//
// Consumers, their order and their softmax are the product's. Work items are not fetched from the
// counter: CTA i runs items i, i + CTAs, ...
#pragma once

#include "forward/kernel.cuh"

namespace ringfa3 {

using namespace cute;

// The next loads of a CTA. One thread uses it; it lies in shared memory to save registers.
template <class Shapes>
struct LoadState {
  static constexpr int kPending = 2 * Shapes::Stages;
  BlockIterator<Shapes::N> block;      // whose K was loaded last
  PipelineState<Shapes::Stages> k, v;  // blocks whose K, and whose V, have been loaded
  PipelineState<Shapes::QStages> q;    // tiles whose Q has been loaded
  PipelineState<kWorkDepth> decoded;   // work items, and after the last one an end mark
  uint32_t item;                       // the number of the work item of `block`
  int32_t next;                        // the work item that is decoded next
  uint32_t arrived;                    // bit n: arrival flag n was set
  int2 pending[kPending];              // (row, KV head) of blocks whose V is loaded next
  bool ended;                          // the end mark has been set
};

template <class Shapes>
struct Unspecialised : Shapes {
  static constexpr int Producers = 0;
  static constexpr bool MayOverflow = false;  // no queue issues an item again
  static constexpr int Threads = kWarpgroup * Shapes::Consumers;
  static constexpr bool kNarrows = false;  // the loads are others
  // With the loads, more early elements spill.
  static constexpr ForwardPolicy kPolicy = [] {
    ForwardPolicy policy = Shapes::kPolicy;
    policy.early_elements = 16;
    return policy;
  }();
  struct SharedStorage : Shapes::SharedStorage {
    LoadState<Shapes> load_state;
  };
};

// Refills the stages that a consumer releases, one call for each. A thread of the last warpgroup
// does it: the other warpgroups issue before it, so they have released the stage,
// or will do so without waiting for a later load.
template <class Shapes>
struct Refill {
  static constexpr int M = Shapes::M, N = Shapes::N, D = Shapes::D;
  static constexpr int kLoader = kWarpgroup * (Shapes::Consumers - 1);
  ForwardParams<Shapes> const& p;
  typename Shapes::SharedStorage& smem;

  // All threads, once: loads Q of the first tiles, K and V of the first blocks.
  CUTE_DEVICE void begin() const {
    if (threadIdx.x != kLoader) return;
    auto& c = smem.load_state;
    c.k = c.v = {}, c.q = {}, c.decoded = {};
    c.next = blockIdx.x, c.arrived = 1, c.ended = false, c.item = 0;
    if (!has_item(0)) return;
    c.block = BlockIterator<N>(smem.work[0], p.args.spans);
    q();
    for (int i = 0; i < Shapes::Stages; ++i) k();
    for (int i = 0; i < Shapes::Stages; ++i) v();
    for (int i = 1; i < Shapes::QStages; ++i) q();
  }

  CUTE_DEVICE void q() const {
    if (threadIdx.x != kLoader) return;
    auto& state = smem.load_state.q;
    if (!has_item(state.count)) return;
    WorkItem const& work = smem.work[state.count % kWorkDepth];
    int const i = state.index();
    static_assert(Shapes::QParts == 1);
    smem.q_empty[i][0].wait(state.phase() ^ 1);
    load_box<M, D>(p.q, smem.q_full[i][0], smem.q + i * M * D, work.tile.row0, work.head);
    state.advance();
  }

  CUTE_DEVICE void k() const {
    auto& c = smem.load_state;
    if (threadIdx.x != kLoader || !next_block()) return;
    WorkItem& work = smem.work[c.item % kWorkDepth];
    SpanColumns const columns = c.block.columns();
    int const row = columns.key_row + c.block.start;
    if (!(c.arrived >> columns.arrival & 1)) {
      wait_for_arrival(p.args.arrivals + columns.arrival);
      asm volatile("fence.proxy.async;" ::: "memory");  // before TMA reads these keys
      c.arrived |= 1u << columns.arrival;
    }
    int const i = c.k.index();
    smem.k_empty[i].wait(c.k.phase() ^ 1);
    load_box<N, D>(p.k, smem.k_full[i], smem.k + i * N * D, row, work.kv_head);
    c.pending[c.k.count % c.kPending] = make_int2(row, work.kv_head);
    c.k.advance();
    c.block.complete();
  }

  CUTE_DEVICE void v() const {
    auto& c = smem.load_state;
    if (threadIdx.x != kLoader || c.v.count == c.k.count) return;
    int2 const at = c.pending[c.v.count % c.kPending];
    int const i = c.v.index();
    smem.v_empty[i].wait(c.v.phase() ^ 1);
    load_box<N, D>(p.v, smem.v_full[i], smem.v + i * N * D, at.x, at.y);
    c.v.advance();
  }

 private:
  // Goes to the block whose K is loaded next; false if there is none.
  CUTE_DEVICE bool next_block() const {
    auto& c = smem.load_state;
    if (!has_item(c.item)) return false;
    if (c.block.next()) return true;
    if (!has_item(++c.item)) return false;
    c.block.begin_tile(smem.work[c.item % kWorkDepth]);
    return true;
  }

  // Whether this CTA has an n-th work item; if so, it is in shared memory afterwards.
  CUTE_DEVICE bool has_item(uint32_t n) const {
    auto& c = smem.load_state;
    while (c.decoded.count <= n && !c.ended) decode();
    return n + c.ended < c.decoded.count;
  }

  // Decodes the next work item for all consumers, or sets the end mark.
  CUTE_DEVICE void decode() const {
    auto& c = smem.load_state;
    int const i = c.decoded.index();
    smem.work_empty[i].wait(c.decoded.phase() ^ 1);
    WorkItem& work = smem.work[i];
    work.head = kEndOfWork;
    for (; work.head < 0 && c.next < p.num_work; c.next += gridDim.x) {
      auto const [number, head] =
          decode_work(c.next, p.args.num_tiles, p.heads, p.args.head_section);
      Tile const tile = p.args.tiles[number];
      if (tile.num_spans == 0) {
        for (int lane = 0; lane < kWarp; ++lane) store_empty_tile<Shapes>(p.args, tile, head, lane);
        continue;
      }
      for (int span = 0; span < min(tile.num_spans, kDecodedSpans); ++span) {
        work.spans[span] = SpanColumns(tile, p.args.spans[tile.first_span + span]);
      }
      work.tile = tile, work.head = head, work.kv_head = head / p.group, work.use_row_max = false;
      work.whole_spans = work.whole_blocks = 0;
    }
    c.ended = work.head < 0;
    smem.work_full[i].arrive();
    c.decoded.advance();
  }
};

template <class Shapes>
struct RefillingConsumer : ForwardConsumer<Shapes, RefillingConsumer<Shapes>> {
  using Base = ForwardConsumer<Shapes, RefillingConsumer>;
  Refill<Shapes> const& refill;

  CUTE_DEVICE RefillingConsumer(ForwardParams<Shapes> const& p, typename Base::Shared& smem,
                                Refill<Shapes> const& refill)
      : Base(p, smem), refill(refill) {}

  __device__ void finish_qk() {
    Base::finish_qk();
    refill.k();
  }
  __device__ void finish_pv() {
    Base::finish_pv();
    refill.v();
  }
  __device__ void release_q() {
    Base::release_q();
    refill.q();
  }
};

template <class Shapes>
__global__ void __launch_bounds__(Shapes::Threads, 1)
    unspecialised_kernel(__grid_constant__ ForwardParams<Shapes> const p) {
  extern __shared__ __align__(1024) char raw[];
  auto& smem = *reinterpret_cast<typename Shapes::SharedStorage*>(raw);
  if (threadIdx.x == 0) init_barriers<Shapes>(p, smem);
  __syncthreads();
  Refill<Shapes> const refill{p, smem};
  refill.begin();
  RefillingConsumer<Shapes>(p, smem, refill).run();
}

template <class Shapes>
cudaError_t launch_unspecialised(ForwardArgs const& a, cudaStream_t stream) {
  using Without = Unspecialised<Shapes>;
  return launch_forward<Without, unspecialised_kernel<Without>>(a, stream);
}

}  // namespace ringfa3
