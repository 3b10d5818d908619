// Calls of the CUDA driver in a program of a ring call, as ringfa3/symmetric/cuda_driver.py
// prepares them: their functions come as addresses.
#pragma once

#include <array>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace ringfa3::host {

constexpr int64_t kDriverArguments = 4;  // of a function; one with fewer ignores the last ones
using DriverEntry = int (*)(int64_t, int64_t, int64_t, int64_t);

constexpr int64_t kOperationWords = 6;  // of a memory operation

// For each stream of a rank, how many signals its operations wait for in all calls so far.
using Waits = std::array<uint64_t, 3>;

// The driver has refused a call.
struct Refused : std::runtime_error {
  Refused(std::string const& name, int code) : std::runtime_error(name), status(code) {}
  int status;
};

}  // namespace ringfa3::host
