// The launch that makes K and V of 8 bits.
#pragma once

#include "hopper/launch.cuh"
#include "quantise/keys.cuh"
#include "quantise/values.cuh"

namespace ringfa3 {

// V's CTAs take the SMs that K's last CTAs leave. They need not wait before they read: all CTAs of
// K have waited for the earlier kernels.
template <class S>
cudaError_t launch_quantise_kv(QuantiseKVArgs const& a, cudaStream_t stream) {
  if (a.int8) return launch_quantise_k<S, Int8>(a, stream);
  cudaError_t const status = launch_quantise_k<S, E4M3>(a, stream);
  if (status != cudaSuccess) return status;
  dim3 const grid(static_cast<unsigned>(a.num_tiles * a.v.heads));
  return launch_early(quantise_v_kernel<S>, grid, kValueThreads, 0, stream, a);
}

}  // namespace ringfa3
