// The forward with the three-stage pipeline of FlashAttention-3's Appendix B.3: S is computed one
// block ahead, so that a block's softmax runs concurrently with two products of its warpgroup.
//
//   wgmma       | P V(j-1)                      | S(j+1)             |
//   registers   | mask, exp2 of a first part    | exp2 of the rest, P(j) | rescale, if rows need it
//
// A warpgroup needs the registers of one more S. S(j+1) is copied to those of S(j): a loop over two
// blocks, in which the two alternate, spills more. The warpgroups' order, loads and epilogue are
// the product's.
#pragma once

#include "forward/kernel.cuh"

namespace ringfa3 {

using namespace cute;

template <class Shapes>
struct ThreeStageConsumer : ForwardConsumer<Shapes, ThreeStageConsumer<Shapes> > {
  using Base = ForwardConsumer<Shapes, ThreeStageConsumer>;
  using Base::Base, Base::block, Base::s, Base::prob, Base::fP, Base::softmax;
  using typename Base::ElementPV;
  typename Base::FragmentS ahead;  // S (64, N) of the block after `block`

  // A tile, whose first S is here. Issues the first S of the next tile.
  CUTE_DEVICE void attend_tile() {
    this->first_softmax();
    bool const alone = is_last_block();
    this->next_block();
    if (!alone) {
      this->order().wait();
      this->qk(s);
      this->order().arrive();
      warpgroup_wait<0>();
      this->finish_qk();
      while (!is_last_block()) attend_block<true>();
      attend_block<false>();
    }
    this->finish_tile();
  }

 private:
  // Elements of S that become P before the wait for P V; 32 at 96 keys spill.
  static constexpr int kEarly = 16;

  // A later block, whose S is here: issues P V of the block before, and S of the next one if there
  // `IsNext`. Its softmax runs concurrently with both.
  template <bool IsNext>
  CUTE_DEVICE void attend_block() {
    if constexpr (IsNext) this->wait_for_k();
    this->zero_tail_of_v();
    this->order().wait();
    this->pv();
    if constexpr (IsNext) this->qk(ahead);
    this->order().arrive();
    this->o_empty = false;
    if (this->unmasked == 0) apply_mask(s, block, this->row, this->lane);
    float sum[2][2] = {};
    softmax.template exponentiate<0, kEarly>(s, prob, sum, this->p.scale_log2);
    this->next_block();
    warpgroup_wait<IsNext ? 1 : 0>();
    this->finish_pv();
    to_operand<ElementPV, 0, kEarly>(prob, fP);
    softmax.template exponentiate<kEarly, Base::kSize>(s, prob, sum, this->p.scale_log2);
    to_operand<ElementPV, kEarly, Base::kSize>(prob, fP);
    // Branches that change O or P during a product would make ptxas serialise every wgmma.
    warpgroup_wait<0>();
    if (!softmax.accumulate(sum)) rescale_slow_path(*this, sum);
    if constexpr (IsNext) {
      warpgroup_fence_operand(ahead);
      copy(ahead, s);
      this->finish_qk();
    }
  }

  CUTE_DEVICE bool is_last_block() const {
    bool const last_span = block.index + 1 >= block.work->tile.num_spans;
    return this->unmasked <= 1 && last_span && block.end - block.begin <= Base::N;
  }
};

}  // namespace ringfa3
