// The launches that make K and V of 8 bits, or K and V for the backward.
#pragma once

#include "hopper/launch.cuh"
#include "quantise/keys.cuh"
#include "quantise/values.cuh"

namespace ringfa3 {

// V's CTAs take the SMs that K's last CTAs leave. They need not wait before they read: all CTAs of
// K have waited for the earlier kernels.
template <class S, bool Dequantised>
cudaError_t launch_key_values(QuantiseKVArgs const& a, cudaStream_t stream) {
  if (a.int8) return launch_quantise_k<S, Int8, Dequantised>(a, stream);
  cudaError_t const status = launch_quantise_k<S, E4M3, Dequantised>(a, stream);
  if (status != cudaSuccess) return status;
  int64_t const threads = (a.v.tokens + kValueTokens - 1) / kValueTokens * a.v.heads * (S::D / 8);
  int64_t const ctas = Dequantised ? (threads + kValueThreads - 1) / kValueThreads
                                   : int64_t{a.num_tiles} * a.v.heads;
  constexpr auto kernel = Dequantised ? dequantise_v_kernel<S> : quantise_v_kernel<S>;
  return launch_early(kernel, dim3(static_cast<unsigned>(ctas)), kValueThreads, 0, stream, a);
}

template <class S>
cudaError_t launch_quantise_kv(QuantiseKVArgs const& a, cudaStream_t stream) {
  return a.k_scale ? launch_key_values<S, false>(a, stream) : launch_key_values<S, true>(a, stream);
}

}  // namespace ringfa3
