// What the host library asks of CUDA. Its functions come as addresses, so no header of CUDA meets
// one of PyTorch.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>

namespace ringfa3::host {

struct Stream {
  void* handle;
  uint64_t id;  // the driver's, unique for the life of the process, unlike the handle
};

// Each function returns 0 for success.
struct Driver {
  int (*current_stream)(int32_t device, void** stream);  // aoti_torch_get_current_cuda_stream
  int (*current_context)(void** context);                // cuCtxGetCurrent
  int (*is_capturing)(void* stream, int* status);        // cuStreamIsCapturing
  int (*stream_id)(void* stream, uint64_t* id);          // cuStreamGetId

  // The current stream of a device, which is the current device. None if a CUDA graph captures it,
  // if CUDA refuses to answer, or if the thread has no context yet: a new thread of autograd.
  std::optional<Stream> stream(int32_t device) const {
    Stream found{};
    void* context = nullptr;
    int status = 0;
    if (current_context(&context) || !context || current_stream(device, &found.handle) ||
        is_capturing(found.handle, &status) || status || stream_id(found.handle, &found.id)) {
      return std::nullopt;
    }
    return found;
  }
};

// Calls of a program of a ring call, as ringfa3/symmetric/cuda_driver.py prepares them: their
// functions come as addresses.

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
