// What the host library keeps, and how many calls it has served.
#pragma once

#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKeySet.h>

#include <atomic>
#include <cstdint>
#include <vector>

#include "host/driver.h"
#include "host/observer.h"
#include "host/programs.h"
#include "host/ring_calls.h"

namespace ringfa3::host {

// Counts calls of the kernels of this library, and replays of rings.
struct Counts {
  std::atomic<int64_t> replayed{0};  // by a program
  std::atomic<int64_t> built{0};     // by Python, which makes a program, or cannot
  std::atomic<int64_t> python{0};    // by Python: a capture, a graph, 8 bits, ...
};

struct Host {
  Programs programs;
  Counts counts;
  Observer observer;
  Driver driver{};
  at::DeviceType device = at::kCUDA;
  c10::DispatchKeySet plain;     // keys that a tensor which is nothing but strided may have
  bool lengths_by_value = true;  // cumulative lengths on the CPU, which change without a version
  std::atomic<bool> enabled{true};
  RingCalls ring_calls;
  ForwardCalls forward_calls;
  // Calls of a plan on which ranks have agreed, that call first; none: the op in Python must run
  // it.
  std::vector<PreparedCall> (*prepared_calls)(FirstCall const& call) = nullptr;
  at::Tensor (*keep_plan)(int64_t handle) = nullptr;  // gives a tensor with which a plan lives
};

// As `is_deterministic` of ringfa3/validation.py: programs are of one answer each.
inline bool is_deterministic(bool given) {
  return given || at::globalContext().deterministicAlgorithms();
}

// Never destroyed: at exit its tensors would be freed after CUDA has ended.
inline Host& host() {
  static auto* const made = new Host;
  return *made;
}

}  // namespace ringfa3::host
