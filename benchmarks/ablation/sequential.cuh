// A forward without overlap inside a warpgroup: P V of a block ends before S of the next one.
#pragma once

#include "forward/kernel.cuh"

namespace ringfa3 {

using namespace cute;

template <class Shapes>
struct SequentialConsumer : ForwardConsumer<Shapes, SequentialConsumer<Shapes> > {
  using Base = ForwardConsumer<Shapes, SequentialConsumer>;
  using Base::Base;

  __device__ void qk_and_pv() {
    this->pv();
    warpgroup_wait<0>();
    warpgroup_fence_operand(this->o);
    this->qk(this->s);
  }

  __device__ void wait_for_scores() { warpgroup_wait<0>(); }
};

}  // namespace ringfa3
