// Calls of the CUDA driver in a program of a ring call, as ringfa3/symmetric/cuda_driver.py
// prepares them: their functions come as addresses.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

namespace ringfa3::host {

// A function with fewer arguments ignores the last ones.
using DriverWords = std::array<uint64_t, 4>;
using DriverEntry = int (*)(uint64_t, uint64_t, uint64_t, uint64_t);

// For each stream of a rank, how many signals its operations wait for in all calls so far.
using Waits = std::array<uint64_t, 3>;

// The driver has refused a call.
struct Refused : std::runtime_error {
  Refused(std::string const& name, int code) : std::runtime_error(name), status(code) {}
  int status;
};

struct DriverCall {
  DriverEntry entry;
  std::string name;
  DriverWords words;

  void run() const {
    if (int const status = entry(words[0], words[1], words[2], words[3])) {
      throw Refused(name, status);
    }
  }
};

// A batch of memory operations of one stream: cuStreamBatchMemOp. The value at byte `at` of a count
// becomes the number of waits of its stream.
struct MemoryOps {
  struct Count {
    int64_t at, stream;
  };

  DriverEntry entry;
  std::string name;
  uint64_t stream, number;
  std::vector<char> operations;
  std::vector<Count> counts;

  void run(Waits& waits) const {
    std::vector<char> issued = operations;
    for (auto const& [at, stream_of] : counts) {
      uint64_t const value = ++waits[stream_of] & 0xffffffff;
      std::memcpy(issued.data() + at, &value, sizeof value);
    }
    auto const begin = reinterpret_cast<uint64_t>(issued.data());
    if (int const status = entry(stream, number, begin, 0)) throw Refused(name, status);
  }
};

}  // namespace ringfa3::host
