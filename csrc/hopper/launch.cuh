// Host side of a launch.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>

namespace ringfa3 {

// Allows a kernel `bytes` of dynamic shared memory on the current device. The runtime stores this
// for each kernel and device. So does `allowed`, of which each kernel has its own. Bit d is set
// once the runtime has been asked for device d. Two threads may ask at once, for the same.
template <auto kernel>
cudaError_t allow_shared(int bytes) {
  static std::atomic<uint64_t> allowed;
  int device;
  if (cudaError_t const status = cudaGetDevice(&device); status != cudaSuccess) return status;
  uint64_t const bit = device < 64 ? uint64_t{1} << device : 0;
  if (allowed.load(std::memory_order_relaxed) & bit) return cudaSuccess;
  cudaError_t const status =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (status == cudaSuccess) allowed.fetch_or(bit, std::memory_order_relaxed);
  return status;
}

// SMs of the current device, 0 if the runtime fails. Asked once for each device.
inline int num_sms() {
  static std::atomic<int> known[64];
  int device;
  if (cudaGetDevice(&device) != cudaSuccess) return 0;
  int count = device < 64 ? known[device].load(std::memory_order_relaxed) : 0;
  if (count > 0) return count;
  auto const wanted = cudaDevAttrMultiProcessorCount;
  if (cudaDeviceGetAttribute(&count, wanted, device) != cudaSuccess) return 0;
  if (device < 64) known[device].store(count, std::memory_order_relaxed);
  return count;
}

// Programmatic dependent launch: the kernel may begin before the one ahead of it in the stream has
// ended, and calls `wait_for_earlier_kernels` itself. Each `cluster` CTAs in a row are a cluster.
template <class Kernel, class Params>
cudaError_t launch_early(Kernel kernel, dim3 grid, int threads, int shared_bytes,
                         cudaStream_t stream, Params const& params, int cluster = 1) {
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = cluster;
  attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = cluster > 1 ? 2 : 1;
  return cudaLaunchKernelEx(&config, kernel, params);
}

}  // namespace ringfa3
