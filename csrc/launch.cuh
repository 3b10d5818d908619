// Launches a kernel that may begin before the one ahead of it in the stream has ended.
#pragma once

#include <cuda_runtime.h>

namespace ringfa3 {

// By programmatic dependent launch: the kernel itself waits, see `wait_for_earlier_kernels`.
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
