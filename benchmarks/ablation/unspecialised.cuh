// The forward without warps that only load: the thread that gives a stage back fills it again.
//
// For the benchmark's ablation (Table 2 of the paper). Consumers, their order and their softmax are
// those of forward.cuh. Work is not fetched from the counter: every CTA takes its share of it.
#pragma once

#include "forward/kernel.cuh"

namespace ringfa3 {

using namespace cute;

// Which loads of a CTA come next. One thread's, in shared memory: it has no registers to spare.
template <class Traits>
struct Course {
  static constexpr int kBehind = 2 * Traits::Stages;
  BlockIterator<Traits::N> block;   // whose K was loaded last
  StageState<Traits::Stages> k, v;  // blocks whose K, and whose V, have been loaded
  StageState<Traits::QStages> q;    // tiles whose Q has
  StageState<kWorkDepth> taken;     // pieces of work that have been decoded, the end among them
  uint32_t piece;                   // that `block` is of
  int32_t next;                     // piece of work to take
  uint32_t here;                    // bit n: the keys of word n have arrived
  int2 behind[kBehind];             // (row, KV head) of blocks whose V is to be loaded
  bool over;                        // the last one taken was the end
};

template <class Traits>
struct Unspecialised : Traits {
  static constexpr int Producers = 0;
  static constexpr int Threads = kWarpgroup * Traits::Consumers;
  struct SharedStorage : Traits::SharedStorage {
    Course<Traits> course;
  };
};

// Fills what `attend_tiles` gives back, one call for each stage. A thread of the last warpgroup
// does it: the others' turns came before, so they have given the stage back too, or will whatever
// is loaded later.
template <class Traits>
struct Refill {
  static constexpr int M = Traits::M, N = Traits::N, D = Traits::D;
  static constexpr int kLoader = kWarpgroup * (Traits::Consumers - 1);
  ForwardParams<Traits> const& p;
  typename Traits::SharedStorage& smem;

  // All threads, once: Q of the first tiles, K and V of the first blocks.
  CUTE_DEVICE void begin() const {
    if (threadIdx.x != kLoader) return;
    auto& c = smem.course;
    c.k = c.v = {}, c.q = {}, c.taken = {};
    c.next = blockIdx.x, c.here = 1, c.over = false, c.piece = 0;
    if (!taken(0)) return;
    c.block = BlockIterator<N>(smem.work[0], p.args.spans);
    q();
    for (int i = 0; i < Traits::Stages; ++i) k();
    for (int i = 0; i < Traits::Stages; ++i) v();
    for (int i = 1; i < Traits::QStages; ++i) q();
  }

  CUTE_DEVICE void q() const {
    if (threadIdx.x != kLoader) return;
    auto& state = smem.course.q;
    if (!taken(state.count)) return;
    Work const& work = smem.work[state.count % kWorkDepth];
    int const i = state.index();
    smem.q_empty[i].wait(state.phase() ^ 1);
    load_box<M, D>(p.q, smem.q_full[i], smem.q + i * M * D, work.tile.row0, work.head);
    state.advance();
  }

  CUTE_DEVICE void k() const {
    auto& c = smem.course;
    if (threadIdx.x != kLoader || !next_block()) return;
    Work& work = smem.work[c.piece % kWorkDepth];
    Visit const visit = c.block.visit();
    int row = visit.key_row + c.block.start;
    if (!(c.here >> visit.arrival & 1)) {
      if (wait_for_arrival(p.args.arrivals + visit.arrival)) {
        asm volatile("fence.proxy.async;" ::: "memory");  // before TMA loads what has arrived
        c.here |= 1u << visit.arrival;
      } else {
        row = static_cast<int>(p.args.k.tokens);  // nothing is read past the last row
        work.called_off = true;
      }
    }
    int const i = c.k.index();
    smem.k_empty[i].wait(c.k.phase() ^ 1);
    load_box<N, D>(p.k, smem.k_full[i], smem.k + i * N * D, row, work.kv_head);
    c.behind[c.k.count % c.kBehind] = make_int2(row, work.kv_head);
    c.k.advance();
    c.block.done();
  }

  CUTE_DEVICE void v() const {
    auto& c = smem.course;
    if (threadIdx.x != kLoader || c.v.count == c.k.count) return;
    int2 const at = c.behind[c.v.count % c.kBehind];
    int const i = c.v.index();
    smem.v_empty[i].wait(c.v.phase() ^ 1);
    load_box<N, D>(p.v, smem.v_full[i], smem.v + i * N * D, at.x, at.y);
    c.v.advance();
  }

 private:
  // Goes to the block whose K is loaded next; false if there is none.
  CUTE_DEVICE bool next_block() const {
    auto& c = smem.course;
    if (!taken(c.piece)) return false;
    if (c.block.next()) return true;
    if (!taken(++c.piece)) return false;
    c.block.begin_work(smem.work[c.piece % kWorkDepth]);
    return true;
  }

  // Whether there is an n-th piece of work of this CTA; it is in shared memory then.
  CUTE_DEVICE bool taken(uint32_t n) const {
    auto& c = smem.course;
    while (c.taken.count <= n && !c.over) take();
    return n + c.over < c.taken.count;
  }

  // Decodes the next piece of work for all consumers, or tells them that there is none.
  CUTE_DEVICE void take() const {
    auto& c = smem.course;
    int const i = c.taken.index();
    smem.work_empty[i].wait(c.taken.phase() ^ 1);
    Work& work = smem.work[i];
    work.head = -1;
    for (; work.head < 0 && c.next < p.num_work; c.next += gridDim.x) {
      int head;
      Tile const tile = piece_of(p, c.next, head);
      if (tile.num_spans == 0) {
        for (int lane = 0; lane < kWarp; ++lane) store_nothing<Traits>(p.args, tile, head, lane);
        continue;
      }
      for (int span = 0; span < min(tile.num_spans, kVisits); ++span) {
        work.visits[span] = Visit(tile, p.args.spans[tile.first_span + span]);
      }
      work.tile = tile, work.head = head, work.kv_head = head / p.group, work.called_off = false;
    }
    c.over = work.head < 0;
    smem.work_full[i].arrive();
    c.taken.advance();
  }
};

template <class Traits>
__global__ void __launch_bounds__(Traits::Threads, 1)
    unspecialised_kernel(__grid_constant__ ForwardParams<Traits> const p) {
  extern __shared__ __align__(1024) char raw[];
  auto& smem = *reinterpret_cast<typename Traits::SharedStorage*>(raw);
  if (threadIdx.x == 0) begin_barriers<Traits>(p, smem);
  __syncthreads();
  Refill<Traits> const refill{p, smem};
  refill.begin();
  attend_tiles<Traits>(p, smem, refill);
}

template <class Traits>
cudaError_t launch_unspecialised(ForwardArgs const& a, cudaStream_t stream) {
  using Without = Unspecialised<Traits>;
  return launch_forward<Without>(a, stream, unspecialised_kernel<Without>);
}

}  // namespace ringfa3
