// A consumer warpgroup of the forward: 64 query rows of every tile of its CTA.
//
// S(j) = Q K(j)^T of block j, P(j) = softmax of S(j), O += P(j) V(j). Warpgroups issue products one
// after the other (ping-pong): one computes its softmax during the products of others. With two:
//
//   warpgroup 0 | issue S(j+1), PV(j) | softmax(j+1)        | issue S(j+2), PV(j+1) | softmax(j+2)
//   warpgroup 1 | softmax(j)          | issue S(j+1), PV(j) | softmax(j+1)          | issue ...
//
// Inside a warpgroup the first part of the softmax overlaps its own PV:
//
//   wgmma       | S(j+1)      | PV(j)                       |
//   registers   |   wait for S| mask, exp2 of a first part  | wait for PV | exp2 of the rest, P
//
// Letters in shapes: M rows of a tile, N keys of a block, D head dim of Q and K, DV head dim of V
// and O, S stages.
#pragma once

#include "forward/epilogue.cuh"
#include "forward/mask.cuh"
#include "forward/narrow_span.cuh"
#include "forward/operands.cuh"
#include "forward/partial_output.cuh"
#include "forward/row_scales.cuh"
#include "forward/rescale.cuh"
#include "forward/shapes.cuh"
#include "forward/softmax.cuh"
#include "hopper/pipeline.cuh"
#include "hopper/warpgroup_order.cuh"
#include "hopper/wgmma.cuh"

namespace ringfa3 {

using namespace cute;

// The ablation derives variants from it, which hide methods that are called through `self()`.
template <class Shapes_, class Variant = void>
struct ForwardConsumer {
  using Shapes = Shapes_;
  using ElementPV = typename Shapes::ElementPV;
  using Blocks = typename Shapes::Blocks;
  using Shared = typename Shapes::SharedStorage;
  using Needs = typename OnlineSoftmax<ElementPV>::Needs;
  static constexpr ForwardPolicy kPolicy = Shapes::kPolicy;
  static constexpr int N = Shapes::N, DV = Shapes::DV, Consumers = Shapes::Consumers;
  static constexpr int kSize = N / 2;  // elements of S that a thread holds
  static constexpr int kEarly = kPolicy.early_elements;
  static constexpr bool kTwoQ = Shapes::QStages > 1;
  // Blocks may be masked for a warp: its rows take their maximum in the first that they attend to.
  static constexpr bool kHidesRows =
      (Shapes::M > N || Shapes::Quantised || Shapes::Clips) && !kPolicy.sums_rounded;
  // The accumulator begins with O of earlier hops; that of e4m3 products has too few bits for it.
  static constexpr bool kResumes = !Shapes::QuantisedV, kRescalesRows = Shapes::QuantisedV;

  ForwardParams<Shapes> const& p;
  Shared& smem;
  int const thread, warpgroup, lane, warp;
  int const q_part;  // the part of Q with the warpgroup's rows
  int const row;     // of the tile; the thread holds this one and row + 8

  typename Shapes::MmaS mma_s;
  typename Shapes::MmaO mma_o;
  decltype(q_operand<Shapes>(std::declval<Shared&>(), 0, 0)) fQ;
  decltype(k_operand<Shapes>(std::declval<Shared&>(), 0)) fK;
  decltype(v_operand<Shapes>(std::declval<Shared&>(), 0)) fV;
  using FragmentS = decltype(partition_fragment_C(mma_s, Shape<_64, Int<N>>{}));
  using FragmentO = decltype(partition_fragment_C(mma_o, Shape<_64, Int<DV>>{}));
  using FragmentP = decltype(make_tensor<ElementPV>(
      Shape<Shape<Int<4 / sizeof(ElementPV)>, _2, _2>, _1, Int<N * sizeof(ElementPV) / 32>>{}));
  FragmentS s;                                            // S (64, N)
  decltype(make_tensor<float>(shape(FragmentS{}))) prob;  // P (64, N) in float32
  FragmentO o;                                            // O (64, DV)
  FragmentP fP;                                           // P (64, N), the A operand of P V
  PipelineState<Shapes::Stages> k_stage, v_stage;
  PipelineState<Shapes::QStages> q_stage;
  PipelineState<kWorkDepth> work_stage;
  bool o_empty = true;               // the next P V overwrites O
  float o_scale[2];                  // factors of rows of O
  int valid_rows = N;                // rows of V, of the block of the last P, that are its span's
  bool more_tiles;                   // work_stage holds a tile
  Blocks block;                      // the block of the S that comes next, or is here
  OnlineSoftmax<ElementPV> softmax;  // of this tile
  RowScales<Shapes> row_scales;      // of this tile
  float earlier_lse[2];              // of this tile, from earlier hops
  int unmasked;                      // blocks from this one on that need no mask
  bool more_blocks;                  // of this tile

  CUTE_DEVICE ForwardConsumer(ForwardParams<Shapes> const& p, Shared& smem)
      : p(p),
        smem(smem),
        thread(threadIdx.x % kWarpgroup),
        warpgroup(cutlass::canonical_warp_group_idx() - Shapes::Producers),  // uniform
        lane(thread % kWarp),
        warp(cutlass::canonical_warp_idx_sync() - 4 * Shapes::Producers),
        q_part(warpgroup * Shapes::QParts / Consumers),
        row(kWarpRows * warp + lane / 4),
        fQ(q_operand<Shapes>(smem, warpgroup, thread)),
        fK(k_operand<Shapes>(smem, thread)),
        fV(v_operand<Shapes>(smem, thread)) {}

  using Self = std::conditional_t<std::is_void_v<Variant>, ForwardConsumer, Variant>;
  CUTE_DEVICE Self& self() { return static_cast<Self&>(*this); }

  CUTE_DEVICE void run() {
    if (warpgroup == Consumers - 1) order().arrive();
    while (true) {
      auto& work = smem.work[work_stage.index()];
      smem.work_full[work_stage.index()].wait(work_stage.phase());
      if (work.head == kEndOfWork) break;
      if (work.head == kNoWork) {
        release(smem.work_empty[work_stage.index()]);
        work_stage.advance();
        continue;
      }
      block = Blocks(work, p.args.spans);
      block.begin_whole_spans(work);
      first_qk();
      do {
        self().attend_tile();
      } while (more_tiles);
    }
    if (warpgroup == 0) order().wait();  // for the last arrival, which nobody else waits for
    tma_store_wait<0>();                 // until then the stores read shared memory
  }

  // A tile, whose first S is here. Issues the first S of the next tile.
  CUTE_DEVICE void attend_tile() {
    first_softmax();
    next_block();
    while (more_blocks) {
      float sum[2][2] = {};
      // The warpgroup's four warps agree here: they must issue the same wgmma (PTX ISA, wgmma).
      bool const fast = unmasked > kPolicy.unmasked_rest && (Shapes::QuantisedV || valid_rows == N);
      bool const fits = fast ? unmasked_loop(sum) : next_softmax(sum);
      if (!fits) rescale_slow_path(self(), sum);
    }
    finish_tile();
  }

  // Begins the tile of work_stage: its softmax, and the LSE of earlier hops.
  CUTE_DEVICE void begin_tile() {
    WorkItem const& work = smem.work[work_stage.index()];
    softmax = OnlineSoftmax<ElementPV>(work.use_row_max);
    row_scales.begin_tile(p, work, row);
    row_scales.begin_block(smem, k_stage.index());
    unmasked = block.unmasked_blocks();
    o_empty = work.tile.flags & kFirst;
    if constexpr (!kResumes) o_empty = true;
    if (!o_empty) {
      load_lse<Shapes>(p, work, row, earlier_lse);
      row_scales.take_offset(p, work, row, earlier_lse);
    }
  }

  // The softmax of a tile's first block. Continues the partial output of earlier hops.
  CUTE_DEVICE void first_softmax() {
    if (!o_empty) {
      load_partial<Shapes>(p, smem.work[work_stage.index()], o);
      softmax.resume(earlier_lse, lane, o);
    }
    if constexpr (Shapes::kNarrows) {
      if (smem.work[work_stage.index()].narrow) return join_narrow_span(self());
    }
    if (unmasked == 0 && hides_block(block, kWarpRows * warp)) {
      clear(fP);
      return;
    }
    row_scales.to_float(s);
    if (unmasked == 0) apply_mask(scores(), block, row, lane);
    if constexpr (kPolicy.sums_rounded) {
      float sum[2][2] = {};
      softmax.template exponentiate<0, kSize>(scores(), prob, sum, scale());
      to_operand<ElementPV>(prob, fP);
      if (!softmax.accumulate(sum)) rescale_slow_path(self(), sum);
    } else {  // a shift from the maximum makes P exact in a row that attends to one key
      rescale_rows(self(), softmax.begin());
    }
  }

  // Unmasked blocks, without rare cases. A warp leaves the loop after a block whose sums do not fit
  // and returns to it before the next one. Returns false if `rescale_slow_path` must follow.
  CUTE_DEVICE bool unmasked_loop(float (&sum)[2][2]) {
    int const before = unmasked;
    bool fits;
    do {
      self().start_block();
      early_part(s, sum);
      if constexpr (kPolicy.unmasked_rest == 0) next_block();
      if constexpr (kPolicy.unmasked_rest > 0) --unmasked, wait_for_k();
      warpgroup_wait<0>();
      self().finish_pv();
      late_part(s, sum);
      fits = softmax.accumulate(sum);
    } while (fits && more_blocks && unmasked > kPolicy.unmasked_rest);
    if constexpr (kPolicy.unmasked_rest > 0) block.skip_unmasked_blocks(before - unmasked);
    valid_rows = N;
    if (!fits) row_scales.to_float_again(s);
    return fits;
  }

  // The softmax of any block but the first. Returns false if `rescale_slow_path` must follow.
  CUTE_DEVICE bool next_softmax(float (&sum)[2][2]) {
    zero_tail_of_v();
    self().start_block();
    row_scales.to_float(s);
    if (unmasked == 0) apply_mask(scores(), block, row, lane);
    bool const begins = kHidesRows && softmax.begins();
    if (!begins) early_part(scores(), sum);
    next_block();
    warpgroup_wait<0>();
    self().finish_pv();
    if (begins) return false;
    late_part(scores(), sum);
    return softmax.accumulate(sum);
  }

  // Issues P V of the block before, concurrently with S of this block, and waits for S.
  CUTE_DEVICE void start_block() {
    order().wait();
    self().qk_and_pv();
    order().arrive();
    o_empty = false;
    row_scales.begin_block(smem, k_stage.index());
    self().wait_for_scores();
    self().finish_qk();
  }

  // P of a first part of S. The fence stops the compiler from moving it below the wait for P V.
  CUTE_DEVICE void early_part(auto const& s, float (&sum)[2][2]) {
    sum[0][0] = sum[0][1] = sum[1][0] = sum[1][1] = 0.f;
    softmax.template exponentiate<0, kEarly>(s, prob, sum, scale());
    CUTE_UNROLL
    for (int n = 0; n < kEarly; ++n) warpgroup_fence_operand(prob(n));
  }

  // P of the rest of S, and all of P to fP, which P V has read.
  CUTE_DEVICE void late_part(auto const& s, float (&sum)[2][2]) {
    to_operand<ElementPV, 0, kEarly>(prob, fP);
    softmax.template exponentiate<kEarly, kSize>(s, prob, sum, scale());
    to_operand<ElementPV, kEarly, kSize>(prob, fP);
  }

  // The last P V of a tile, and its epilogue; epilogue.cuh has the timeline.
  CUTE_DEVICE void finish_tile() {
    zero_tail_of_v();
    if constexpr (!kPolicy.releases_q_early) self().release_q();
    if constexpr (!kPolicy.looks_ahead) next_tile();
    WorkItem& work = smem.work[work_stage.previous().index()];
    bool const inside[2] = {row < work.tile.rows, row + 8 < work.tile.rows};
    bool const use_row_max = softmax.use_row_max();
    bool const early_lse = kTwoQ && !use_row_max && (work.tile.flags & kFirst);
    float lse[2];
    row_scales.load_offset(p, work, row);
    if (kTwoQ && more_tiles) {
      wait_for_qk();
      order().wait();
      self().qk_and_pv();
      order().arrive();
      finish_lse(work, lse);
      if (early_lse) store_lse<Shapes>(p, work, row, lane, lse, inside);
      begin_tile();
      self().wait_for_scores();
      self().finish_qk();
      warpgroup_wait<0>();
    } else {
      order().wait();
      pv();
      order().arrive();
      if constexpr (kTwoQ) finish_lse(work, lse);
      if (kTwoQ && early_lse) store_lse<Shapes>(p, work, row, lane, lse, inside);
      warpgroup_wait<0>();
    }
    self().finish_pv();
    // With one stage of Q no registers are left for it during a product.
    if constexpr (!kTwoQ) finish_lse(work, lse);
    store_tile(self(), work, inside, use_row_max, early_lse, lse);
    __syncwarp();
    release(smem.work_empty[work_stage.previous().index()]);
    if (!kTwoQ && more_tiles) first_qk();
  }

  CUTE_DEVICE void finish_lse(WorkItem const& work, float (&lse)[2]) {
    finish_rows<Shapes>(p, work, softmax, o_scale, lse);
    row_scales.finish(lse, o_scale);
  }

  CUTE_DEVICE void first_qk() {
    wait_for_qk();
    order().wait();
    qk(s);
    order().arrive();
    begin_tile();
    warpgroup_wait<0>();
    self().finish_qk();
  }

  __device__ void qk(FragmentS& s) {
    auto const q = fQ(_, _, _, q_stage.index());
    auto const k = fK(_, _, _, k_stage.index());
    if constexpr (kPolicy.opaque_operands) {
      issue(mma_s, opaque(q), opaque(k), s, false);
    } else {
      issue(mma_s, q, k, s, false);
    }
  }

  __device__ void pv() {
    if constexpr (kPolicy.sums_rounded) softmax.add_rounded(fP);
    smem.v_full[v_stage.index()].wait(v_stage.phase());
    issue(mma_o, fP, fV(_, _, _, v_stage.index()), o, !o_empty);
  }

  // Issues S of the next block, then P V of the last one; `wait_for_scores` waits for S.
  __device__ void qk_and_pv() {
    qk(s);
    pv();
  }

  __device__ void wait_for_scores() { warpgroup_wait<1>(); }

  __device__ void finish_qk() {
    warpgroup_fence_operand(s);
    release(smem.k_empty[k_stage.index()]);
    k_stage.advance();
  }

  __device__ void finish_pv() {
    warpgroup_fence_operand(o);
    release(smem.v_empty[v_stage.index()]);
    v_stage.advance();
  }

  // Each warpgroup does it before its own P V, see `zero_tail_rows_of_v`.
  __device__ void zero_tail_of_v() {
    if constexpr (!Shapes::QuantisedV) {  // e4m3 tiles have zeros there
      if (valid_rows == N) return;
      smem.v_full[v_stage.index()].wait(v_stage.phase());
      zero_tail_rows_of_v(v_tile<Shapes>(smem, v_stage.index()), valid_rows, thread);
      order().sync();
    }
  }

  // Steps to the next block and waits for its K. After a tile's last block it takes the steps that
  // the policy puts before that block's softmax.
  __device__ void next_block() {
    valid_rows = block.valid_rows();
    more_blocks = true;
    if (--unmasked > 0) {
      block.next_unmasked_block();
    } else {
      block.complete();
      more_blocks = block.next();
      if (more_blocks) unmasked = block.unmasked_blocks();
    }
    if (more_blocks) {
      wait_for_k();
    } else {
      if constexpr (kPolicy.releases_q_early) self().release_q();
      if constexpr (kPolicy.looks_ahead) next_tile();
    }
  }

  __device__ void next_tile() {
    work_stage.advance();
    smem.work_full[work_stage.index()].wait(work_stage.phase());
    more_tiles = smem.work[work_stage.index()].head >= 0;
    if (more_tiles) block.begin_whole_spans(smem.work[work_stage.index()]);
  }

  // S in float32, after `RowScales::to_float`. Unmasked blocks convert integers one by one.
  CUTE_DEVICE auto scores() { return recast<float>(s); }
  CUTE_DEVICE auto scale() const { return row_scales.of_block(p); }
  __device__ WarpgroupOrder<Consumers, kPolicy.ping_pong> order() const { return {warpgroup}; }
  __device__ void wait_for_k() { smem.k_full[k_stage.index()].wait(k_stage.phase()); }

  CUTE_DEVICE void wait_for_qk() {
    smem.q_full[q_stage.index()][q_part].wait(q_stage.phase());
    wait_for_k();
  }

  // Multiplies row R of O, of the two that a thread holds.
  template <int R>
  CUTE_DEVICE void scale_o(float by) {
    if (!o_empty) scale_row<R>(o, by);
  }

  // After the last S of a tile.
  __device__ void release_q() {
    release(smem.q_empty[q_stage.index()][q_part]);
    q_stage.advance();
  }
};

}  // namespace ringfa3
