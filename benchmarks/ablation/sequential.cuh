// A forward without overlap inside a warpgroup: P V of a block ends before S of the next one.
#pragma once

#include "forward/kernel.cuh"

namespace ringfa3 {

using namespace cute;

template <class Shapes>
struct SequentialConsumer : ForwardConsumer<Shapes, SequentialConsumer<Shapes> > {
  using Base = ForwardConsumer<Shapes, SequentialConsumer>;
  using Base::Base;

  CUTE_DEVICE void start_block() {
    this->order().wait();
    qk_and_pv();
    this->order().arrive();
    this->o_empty = false;
    this->row_scales.begin_block(this->smem, this->k_stage.index());
    warpgroup_wait<0>();
    this->finish_qk();
  }

  __device__ void qk_and_pv() {
    this->pv();
    warpgroup_wait<0>();
    warpgroup_fence_operand(this->o);
    this->qk(this->s);
  }
};

}  // namespace ringfa3
