// What a launch takes of the host.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>

namespace ringfa3 {

// Lets a kernel have `bytes` of dynamic shared memory on the current device. The runtime is asked
// once for each device: bit d of `allowed`, which is the kernel's own, says that it was for d.
template <class Kernel>
cudaError_t allow_shared(Kernel kernel, int bytes, std::atomic<uint64_t>& allowed) {
  int device;
  if (cudaError_t const status = cudaGetDevice(&device); status != cudaSuccess) return status;
  uint64_t const bit = device < 64 ? uint64_t{1} << device : 0;
  if (allowed.load(std::memory_order_relaxed) & bit) return cudaSuccess;
  cudaError_t const status =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (status == cudaSuccess) allowed.fetch_or(bit, std::memory_order_relaxed);
  return status;
}

// Launches a kernel that may begin before the one ahead of it in the stream has ended, by
// programmatic dependent launch: the kernel itself waits, see `wait_for_earlier_kernels`.
template <class Kernel, class Params>
cudaError_t launch_early(Kernel kernel, dim3 grid, int threads, int shared_bytes,
                         cudaStream_t stream, Params const& params) {
  cudaLaunchAttribute early;
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, params);
}

}  // namespace ringfa3
