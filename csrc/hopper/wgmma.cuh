// wgmma: issuing the products of a warpgroup, and chaining them through registers.
#pragma once

#include <cute/tensor.hpp>
#include <cutlass/numeric_conversion.h>

namespace ringfa3 {

using namespace cute;

// Issues C = A B, or C += A B if `add`, as one asynchronous wgmma group.
template <class Mma, class A, class B, class C>
CUTE_DEVICE void issue(Mma& mma, A const& a, B const& b, C& c, bool add) {
  mma.accumulate_ = add ? GMMA::ScaleOut::One : GMMA::ScaleOut::Zero;
  warpgroup_fence_operand(c);
  warpgroup_arrive();
  CUTE_UNROLL
  for (int k = 0; k < size<2>(a); ++k) {
    gemm(mma, a(_, _, k), b(_, _, k), c);
    mma.accumulate_ = GMMA::ScaleOut::One;
  }
  warpgroup_commit_batch();
}

// Issues C = A0 B0 + A B as one asynchronous wgmma group. A0 has one block of K.
template <class Mma0, class A0, class B0, class Mma, class A, class B, class C>
CUTE_DEVICE void issue_sum(Mma0& mma0, A0 const& a0, B0 const& b0, Mma& mma, A const& a, B const& b,
                           C& c) {
  mma0.accumulate_ = GMMA::ScaleOut::Zero;
  mma.accumulate_ = GMMA::ScaleOut::One;
  warpgroup_fence_operand(c);
  warpgroup_arrive();
  gemm(mma0, a0(_, _, _0{}), b0(_, _, _0{}), c);
  CUTE_UNROLL
  for (int k = 0; k < size<2>(a); ++k) gemm(mma, a(_, _, k), b(_, _, k), c);
  warpgroup_commit_batch();
}

// The same shared-memory operand, whose descriptors the compiler computes anew: it does not keep
// them in registers between two uses.
template <class Operand>
CUTE_DEVICE Operand opaque(Operand a) {
  asm volatile("" : "+l"(a.data().desc_.desc_));
  return a;
}

// Converts elements [Begin, End) of an accumulator (rows, columns), or all of them, to the A
// operand of another product. The operand's registers hold the accumulator's pairs in the same
// order.
template <class Element, int Begin = 0, int End = -1, class Accumulator, class Operand>
CUTE_DEVICE void to_operand(Accumulator const& c, Operand& a) {
  constexpr int kEnd = End < 0 ? int(decltype(size(c))::value) : End;
  cutlass::NumericArrayConverter<Element, float, 2> convert;
  auto* out = reinterpret_cast<cutlass::Array<Element, 2>*>(raw_pointer_cast(a.data()));
  CUTE_UNROLL
  for (int n = Begin; n < kEnd; n += 2) {
    cutlass::Array<float, 2> pair;
    pair[0] = c(n), pair[1] = c(n + 1);
    out[n / 2] = convert(pair);
  }
}

}  // namespace ringfa3
