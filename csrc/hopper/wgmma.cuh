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

// The same shared-memory operand, whose descriptors the compiler computes anew instead of holding
// them in registers between two uses.
template <class Operand>
CUTE_DEVICE Operand opaque(Operand a) {
  asm volatile("" : "+l"(a.data().desc_.desc_));
  return a;
}

// Converts integers of an accumulator to float32, in place.
template <class Accumulator>
CUTE_DEVICE void to_float_bits(Accumulator& c) {
  CUTE_UNROLL
  for (int n = 0; n < size(c); ++n) c(n) = __float_as_int(static_cast<float>(c(n)));
}

// The same of integers below 2^22, by other instructions: ptxas would hold the float32 numbers of
// an earlier conversion in registers, as well as the integers.
template <class Accumulator>
CUTE_DEVICE void to_float_bits_by_adding(Accumulator& c) {
  constexpr float kMagic = 0x1.8p23f;
  CUTE_UNROLL
  for (int n = 0; n < size(c); ++n) {
    c(n) = __float_as_int(__int_as_float(c(n) + __float_as_int(kMagic)) - kMagic);
  }
}

// Converts elements [Begin, End) of an accumulator (rows, columns), or all of them, to the A
// operand of another product. The operand's registers hold the accumulator's pairs in the same
// order. With 8 bits a register holds two pairs of a row, 8 columns apart, so the product's columns
// are permuted: csrc/quantise/values.cuh derives the order.
template <class Element, int Begin = 0, int End = -1, class Accumulator, class Operand>
CUTE_DEVICE void to_operand(Accumulator const& c, Operand& a) {
  constexpr int kEnd = End < 0 ? int(decltype(size(c))::value) : End;
  if constexpr (sizeof(Element) == 1) {
    static_assert(Begin % 8 == 0 && kEnd % 8 == 0);
    cutlass::NumericArrayConverter<Element, float, 4> convert;
    auto* out = reinterpret_cast<cutlass::Array<Element, 4>*>(raw_pointer_cast(a.data()));
    CUTE_UNROLL
    for (int n = Begin; n < kEnd; n += 4) {
      int const from = n / 8 * 8 + n / 4 % 2 * 2;  // register n / 4 % 2 of a row of each
      cutlass::Array<float, 4> four;
      four[0] = c(from), four[1] = c(from + 1), four[2] = c(from + 4), four[3] = c(from + 5);
      out[n / 4] = convert(four);
    }
    return;
  }
  cutlass::NumericArrayConverter<Element, float, 2> convert;
  auto* out = reinterpret_cast<cutlass::Array<Element, 2>*>(raw_pointer_cast(a.data()));
  CUTE_UNROLL
  for (int n = Begin; n < kEnd; n += 2) {
    cutlass::Array<float, 2> pair;
    pair[0] = c(n), pair[1] = c(n + 1);
    out[n / 2] = convert(pair);
  }
}

// The same of the elements of row R, to 8 bits.
template <class Element, int R, class Accumulator, class Operand>
CUTE_DEVICE void row_to_operand(Accumulator const& c, Operand& a) {
  cutlass::NumericArrayConverter<Element, float, 4> convert;
  auto* out = reinterpret_cast<cutlass::Array<Element, 4>*>(raw_pointer_cast(a.data()));
  CUTE_UNROLL
  for (int n = 2 * R; n < size(c); n += 8) {
    cutlass::Array<float, 4> four;
    four[0] = c(n), four[1] = c(n + 1), four[2] = c(n + 4), four[3] = c(n + 5);
    out[n / 8 * 2 + R] = convert(four);
  }
}

// Multiplies the two rows of an A operand that `to_operand` has filled.
template <class Element, class Operand>
CUTE_DEVICE void scale_operand(Operand& a, float const (&by)[2]) {
  constexpr int kPairs = decltype(size(a))::value / 2;  // pair 2j + r is of row r
  auto* pairs = reinterpret_cast<uint32_t*>(raw_pointer_cast(a.data()));
  uint32_t factors[2];  // pairs too
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) factors[r] = Element(by[r]).raw() * 0x10001u;
  CUTE_UNROLL
  for (int i = 0; i < kPairs; ++i) {
    if constexpr (cute::is_same_v<Element, cutlass::half_t>) {
      asm("mul.rn.f16x2 %0, %0, %1;" : "+r"(pairs[i]) : "r"(factors[i % 2]));
    } else {
      asm("mul.rn.bf16x2 %0, %0, %1;" : "+r"(pairs[i]) : "r"(factors[i % 2]));
    }
  }
}

}  // namespace ringfa3
