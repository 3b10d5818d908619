// The launch that makes K and V of 8 bits.
#pragma once

#include "hopper/launch.cuh"
#include "quantise/keys.cuh"
#include "quantise/values.cuh"

namespace ringfa3 {

// V's CTAs take the SMs that K's last ones leave. They have nothing to wait for before they read:
// all of K's have waited for the earlier kernels.
template <class S>
cudaError_t launch_quantise_kv(QuantiseKVArgs const& a, cudaStream_t stream) {
  using Shapes = KeyShapes<S>;
  dim3 const grid(static_cast<unsigned>(a.num_tiles * a.k.heads));
  dim3 const k_grid(grid.x * Shapes::Ctas);
  if (a.int8) {
    return launch_early(quantise_k_kernel<S, Int8>, k_grid, Shapes::Threads, 0, stream, a,
                        Shapes::Ctas);
  }
  cudaError_t const status =
      launch_early(quantise_k_kernel<S, E4M3>, k_grid, Shapes::Threads, 0, stream, a, Shapes::Ctas);
  if (status != cudaSuccess) return status;
  return launch_early(quantise_v_kernel<S>, grid, kValueThreads, 0, stream, a);
}

}  // namespace ringfa3
