// Q, K and V in shared memory, as the products of a warpgroup read them.
//
// Letters in shapes: N keys of a block, D head dim of Q and K, DV head dim of V, S stages.
#pragma once

#include "forward/shapes.cuh"

namespace ringfa3 {

using namespace cute;

// The operands of one warpgroup in shared memory: Q (64, D, S), K (N, D, S), V (DV, N, S).
template <class Shapes>
CUTE_DEVICE auto q_operand(typename Shapes::SharedStorage& smem, int warpgroup, int thread) {
  constexpr int kShare = Shapes::Consumers / Shapes::QParts;  // warpgroups of a part
  Tensor parts = make_tensor(make_smem_ptr(smem.q), typename Shapes::SmemQ{});
  Tensor sQ = local_tile(parts(_, _, warpgroup / kShare, _), Shape<_64, Int<Shapes::D>>{},
                         make_coord(warpgroup % kShare, _0{}, _));
  return typename Shapes::MmaS{}.get_slice(thread).partition_fragment_A(sQ);
}

template <class Shapes>
CUTE_DEVICE auto k_operand(typename Shapes::SharedStorage& smem, int thread) {
  Tensor sK = make_tensor(make_smem_ptr(smem.k), typename Shapes::SmemK{});
  return typename Shapes::MmaS{}.get_slice(thread).partition_fragment_B(sK);
}

template <class Shapes>
CUTE_DEVICE auto v_operand(typename Shapes::SharedStorage& smem, int thread) {
  Tensor sV = make_tensor(make_smem_ptr(smem.v), typename Shapes::SmemV{});
  return typename Shapes::MmaO{}.get_slice(thread).partition_fragment_B(sV);
}

// V of a stage, (DV, N).
template <class Shapes>
CUTE_DEVICE auto v_tile(typename Shapes::SharedStorage& smem, int stage) {
  return make_tensor(make_smem_ptr(smem.v), typename Shapes::SmemV{})(_, _, stage);
}

// A warpgroup: zeroes rows [first, N) of V (DV, N) in shared memory, which belong to the next
// segment. Their P is 0, but 0 * inf is NaN. Products read the zeros after a barrier of the
// warpgroup. Several warpgroups may write one stage, and one may read it already: all write the
// same zeros, and it has written them.
template <class Values>
CUTE_DEVICE void zero_tail_rows_of_v(Values const& v, int first, int thread) {
  constexpr int N = decltype(size<1>(v))::value;
  constexpr int kVectors = decltype(size<0>(v))::value / 8;  // of a row; the head dim is contiguous
#pragma unroll 1
  for (int i = thread; i < (N - first) * kVectors; i += kWarpgroup) {
    auto& vector = v(i % kVectors * 8, first + i / kVectors);
    reinterpret_cast<uint4&>(vector) = uint4{};
  }
  cutlass::arch::fence_view_async_shared();
}

}  // namespace ringfa3
