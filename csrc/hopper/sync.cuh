// Synchronisation through global memory, between CTAs and between kernels.
#pragma once

#include <cute/tensor.hpp>

namespace ringfa3 {

// Blocks until all kernels launched earlier on the stream have ended and their writes are visible.
// Returns at once in a kernel that was launched without programmatic dependence.
CUTE_DEVICE void wait_for_earlier_kernels() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Allows the launch of the next kernel once every CTA of this one has called it or ended.
CUTE_DEVICE void launch_next_kernel() { asm volatile("griddepcontrol.launch_dependents;" :::); }

// One thread: a semaphore, and all that was written before it was set.
CUTE_DEVICE int32_t read_semaphore(int32_t const* semaphore) {
  int32_t now;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(now) : "l"(semaphore) : "memory");
  return now;
}

// One thread: blocks until other CTAs of this GPU have set a semaphore to `value`.
CUTE_DEVICE void wait_for_semaphore(int32_t const* semaphore, int32_t value) {
  while (read_semaphore(semaphore) != value) {
  }
}

// One thread: sets a semaphore after all its earlier writes.
CUTE_DEVICE void set_semaphore(int32_t* semaphore, int32_t value) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(semaphore), "r"(value) : "memory");
}

// One thread: blocks until an arrival flag is not 0. Another GPU may set it.
CUTE_DEVICE void wait_for_arrival(int32_t const* flag) {
  int32_t now;
  while (true) {
    asm volatile("ld.acquire.sys.global.s32 %0, [%1];" : "=r"(now) : "l"(flag) : "memory");
    if (now != 0) return;
    __nanosleep(100);
  }
}

}  // namespace ringfa3
