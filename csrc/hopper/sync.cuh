// Words in global memory by which CTAs, and kernels, wait for each other.
#pragma once

#include <cute/tensor.hpp>

namespace ringfa3 {

// Blocks until the kernels before this one have ended and what they wrote is visible; returns at
// once in a kernel that was not launched ahead of their end.
CUTE_DEVICE void wait_for_earlier_kernels() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Lets the next kernel be launched once every CTA of this one has come here or ended.
CUTE_DEVICE void launch_next_kernel() { asm volatile("griddepcontrol.launch_dependents;" :::); }

// One thread: blocks until other CTAs of this GPU have raised the word to `value`.
CUTE_DEVICE void wait_for_turn(int32_t const* word, int32_t value) {
  int32_t now;
  do {
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(now) : "l"(word) : "memory");
  } while (now != value);
}

// One thread: raises the word, after all that it did before.
CUTE_DEVICE void signal_turn(int32_t* word, int32_t value) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

// One thread: blocks until the word is no longer 0; whoever sets it may be another GPU. Returns
// whether something has arrived: the word is negative if it never will.
CUTE_DEVICE bool wait_for_arrival(int32_t const* word) {
  int32_t now;
  while (true) {
    asm volatile("ld.acquire.sys.global.s32 %0, [%1];" : "=r"(now) : "l"(word) : "memory");
    if (now != 0) return now > 0;
    __nanosleep(100);
  }
}

}  // namespace ringfa3
