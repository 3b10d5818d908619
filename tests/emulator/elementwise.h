// Instructions that apply a function of one, two or three operands to each lane.
#pragma once

#include "number_formats.h"

namespace emulator {

template <class T, class F>
Step unary(Instruction const& i, F f) {
  int const d = i.slot(0), a = i.slot(1);
  return [=](Warp& w, Lanes lanes) {
    uint64_t *const D = w.reg(d), *const A = w.reg(a);
    for_each_lane(lanes, [&](int l) { D[l] = bits(f(get<T>(A[l]))); });
    return Next::Advance;
  };
}

template <class T, class F>
Step binary(Instruction const& i, F f) {
  int const d = i.slot(0), a = i.slot(1), b = i.slot(2);
  return [=](Warp& w, Lanes lanes) {
    uint64_t *const D = w.reg(d), *const A = w.reg(a), *const B = w.reg(b);
    for_each_lane(lanes, [&](int l) { D[l] = bits(f(get<T>(A[l]), get<T>(B[l]))); });
    return Next::Advance;
  };
}

template <class T, class C, class F>
Step ternary(Instruction const& i, F f) {
  int const d = i.slot(0), a = i.slot(1), b = i.slot(2), c = i.slot(3);
  return [=](Warp& w, Lanes lanes) {
    uint64_t *const D = w.reg(d), *const A = w.reg(a), *const B = w.reg(b), *const C_ = w.reg(c);
    for_each_lane(lanes, [&](int l) { D[l] = bits(f(get<T>(A[l]), get<T>(B[l]), get<C>(C_[l]))); });
    return Next::Advance;
  };
}

}  // namespace emulator
