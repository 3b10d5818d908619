// Before the first hop: a rank's own K/V in the memory of the ring.
#pragma once

#include "ring/rows.cuh"

namespace ringfa3 {

// A warp copies the K and V of a token, 8 numbers a lane at once.
__global__ void __launch_bounds__(kRowThreads, kRowCtas)
    publish_kernel(__grid_constant__ PublishArgs const a) {
  wait_for_earlier_kernels();
  int const lane = threadIdx.x % kWarp;
  int const parts = a.k.head_dim / 8, of_k = a.k.heads * parts;  // of a head, of all heads
  auto* const published = static_cast<uint4*>(a.published);      // (n, 2, hk, d)
  auto* const gathered = static_cast<uint4*>(a.gathered);        // (t, 2, hk, d)
  each_token(a.k.tokens, [&](int64_t token) {
    int const row = published_row(a.rows, token);
    bool const seen = is_published(a.rows, row);
    if (!seen && gathered == nullptr) return;
    auto const* const k = static_cast<uint16_t const*>(a.k.data) + token * a.k.token_stride;
    auto const* const v = static_cast<uint16_t const*>(a.v.data) + token * a.v.token_stride;
#pragma unroll 4
    for (int i = lane; i < 2 * of_k; i += kWarp) {
      bool const is_k = i < of_k;
      int const part = is_k ? i : i - of_k, head = part / parts;
      int64_t const from = head * (is_k ? a.k.head_stride : a.v.head_stride) + part % parts * 8;
      uint4 const eight = *reinterpret_cast<uint4 const*>((is_k ? k : v) + from);
      if (seen) published[int64_t{row} * (2 * of_k) + i] = eight;
      if (gathered != nullptr) gathered[token * (2 * of_k) + i] = eight;
    }
  });
}

inline cudaError_t launch_publish(PublishArgs const& a, cudaStream_t stream) {
  return launch_warps(publish_kernel, a.k.tokens, stream, a);
}

}  // namespace ringfa3
