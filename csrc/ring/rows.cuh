// A rank's own tokens and the rows of them that it publishes to its peers.
//
// Letters in shapes: t tokens, n published rows; hk KV heads, d head dim.
#pragma once

#include <algorithm>

#include "hopper/launch.cuh"
#include "hopper/sync.cuh"
#include "hopper/warp.cuh"
#include "params.h"

namespace ringfa3 {

constexpr int kRowThreads = 256, kRowCtas = 8;  // that fill an SM
constexpr int kRowWarps = kRowThreads / kWarp;  // of a CTA

// The published row of a token; a number outside [0, count) is no row.
CUTE_DEVICE int published_row(PublishedRows const& rows, int64_t token) {
  return rows.position == nullptr ? static_cast<int>(token) - rows.first : rows.position[token];
}

CUTE_DEVICE bool is_published(PublishedRows const& rows, int row) {
  return 0 <= row && row < rows.count;
}

CUTE_DEVICE bool holds(RowRuns const& runs, int row) {
  bool inside = false;
  for (int i = 0; i < runs.count; ++i) inside |= runs.begin[i] <= row && row < runs.end[i];
  return inside;
}

// Calls visit(token), in each warp for every kRowWarps * gridDim.x-th token.
template <class Visit>
CUTE_DEVICE void each_token(int64_t tokens, Visit const& visit) {
  int64_t const first = int64_t{blockIdx.x} * kRowWarps + threadIdx.x / kWarp;
  for (int64_t token = first; token < tokens; token += int64_t{gridDim.x} * kRowWarps) visit(token);
}

// Launches a kernel with a warp for each of `warps` items, or as many as run at once.
template <class Kernel, class Args>
cudaError_t launch_warps(Kernel kernel, int64_t warps, cudaStream_t stream, Args const& args) {
  if (warps <= 0) return cudaSuccess;
  int64_t const ctas = std::min((warps + kRowWarps - 1) / kRowWarps, int64_t{num_sms()} * kRowCtas);
  return launch_early(kernel, dim3(static_cast<unsigned>(ctas)), kRowThreads, 0, stream, args);
}

}  // namespace ringfa3
