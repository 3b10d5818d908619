// Before the first hop: LSE and D in padded rows, a dQ of zeros, and counters of 0.
//
// Letters in shapes: M rows of a block of padded rows, D head dim.
#pragma once

#include "backward/shapes.cuh"
#include "hopper/launch.cuh"
#include "hopper/store.cuh"
#include "hopper/sync.cuh"

namespace ringfa3 {

using namespace cute;

constexpr int kPreprocessThreads = 256, kPreprocessCtas = 8;  // that fill an SM

// The dot product of two times eight 16-bit elements.
template <class Element>
CUTE_DEVICE float dot_eight(uint4 const& a, uint4 const& b) {
  auto const* x = reinterpret_cast<Element const*>(&a);
  auto const* y = reinterpret_cast<Element const*>(&b);
  float sum = 0.f;
  CUTE_UNROLL
  for (int i = 0; i < 8; ++i) sum += static_cast<float>(x[i]) * static_cast<float>(y[i]);
  return sum;
}

CUTE_DEVICE SplitStatistic split(float x) {
  SplitStatistic s{};
  CUTE_UNROLL
  for (int i = 0; i < 3; ++i) {  // 8 of the 24 bits each
    cutlass::bfloat16_t const part(x);
    s.parts[i] = part.raw();
    x -= static_cast<float>(part);
  }
  return s;
}

// Stores the LSE (natural logarithm) and D of a row. P becomes 0 in a `fully_masked` row. There the
// split LSE is finite, since the product multiplies it by 0, too.
CUTE_DEVICE void store_statistics(SplitStatistic* lse_at, SplitStatistic* delta_at, float lse,
                                  float delta, bool fully_masked, float softmax_scale) {
  *lse_at = split(fully_masked ? -1e38f : -lse / softmax_scale);
  *delta_at = split(-delta);
}
CUTE_DEVICE void store_statistics(float* lse_at, float* delta_at, float lse, float delta,
                                  bool fully_masked, float) {
  *lse_at = fully_masked ? INFINITY : lse * kLog2e;
  *delta_at = delta;
}

// The sum of x over the threads of a CTA, in one order.
CUTE_DEVICE float sum_of_threads(float x) {
  __shared__ float of_warp[kPreprocessThreads / kWarp];
  CUTE_UNROLL
  for (int i = kWarp / 2; i > 0; i /= 2) x += __shfl_xor_sync(0xffffffff, x, i);
  if (threadIdx.x % kWarp == 0) of_warp[threadIdx.x / kWarp] = x;
  __syncthreads();
  float sum = 0.f;
  CUTE_UNROLL
  for (float const part : of_warp) sum += part;
  return sum;
}

// A CTA per block of padded rows and head. A fully masked row, or padding, gets P = 0 and D = 0,
// whatever its gradients are. With a sink, LSE counts it: then the LSE of a token is -inf only if
// the sink is. Padding has -inf all the same.
template <class Shapes>
__global__ void __launch_bounds__(kPreprocessThreads, kPreprocessCtas)
    preprocess_kernel(__grid_constant__ PreprocessArgs const a) {
  using Element = typename Shapes::Element;
  constexpr int M = Shapes::M, D = Shapes::D;
  constexpr int kLanes = Shapes::DV / 8;  // of a row of O, with 16 bytes each
  launch_next_kernel();
  int64_t const head = blockIdx.y;
  int64_t const target = head * a.padded.num_blocks + blockIdx.x;
  auto* const dq = reinterpret_cast<float4*>(a.padded.dq + target * (M * D));
  for (int i = threadIdx.x; i < M * D / 4; i += kPreprocessThreads) {
    dq[i] = make_float4(0.f, 0.f, 0.f, 0.f);
  }
  int64_t const ctas = int64_t{gridDim.x} * gridDim.y, cta = head * gridDim.x + blockIdx.x;
  for (int64_t i = cta * kPreprocessThreads + threadIdx.x; i < a.num_words;
       i += ctas * kPreprocessThreads) {
    a.words[i] = 0;
  }
  PaddedBlock const block = a.padded.blocks[blockIdx.x];
  int const lane = threadIdx.x % kLanes;
  float const sink = a.sink == nullptr ? -INFINITY : a.sink[head];
  float dsink = 0.f;  // of the thread's rows
  for (int row = threadIdx.x / kLanes; row < M; row += kPreprocessThreads / kLanes) {
    int64_t const token = block.row0 + row;
    float sum = 0.f;
    if (row < block.rows && 8 * lane < a.out.head_dim) {
      auto eight = [&](Tensor3 const& x) {
        auto* const at = static_cast<Element const*>(x.data) + token * x.token_stride;
        return *reinterpret_cast<uint4 const*>(at + head * x.head_stride + 8 * lane);
      };
      sum = dot_eight<Element>(eight(a.out), eight(a.dout));
    }
    CUTE_UNROLL
    for (int i = kLanes / 2; i > 0; i /= 2) sum += __shfl_xor_sync(0xffffffff, sum, i);
    if (lane == 0) {
      float const lse = row < block.rows ? a.lse[head * a.lse_head_stride + token] : -INFINITY;
      bool const fully_masked = lse == -INFINITY;
      float const dlse =
          fully_masked || a.dlse == nullptr ? 0.f : a.dlse[head * a.dlse_head_stride + token];
      float const delta = fully_masked ? 0.f : sum - dlse;
      auto* const statistics =
          static_cast<typename Shapes::Statistic*>(a.padded.statistics) + target * (2 * M) + row;
      store_statistics(statistics, statistics + M, lse, delta, fully_masked, a.softmax_scale);
      if (a.sink != nullptr && !fully_masked) dsink -= exp2f((sink - lse) * kLog2e) * delta;
    }
  }
  if (a.sink == nullptr) return;
  dsink = sum_of_threads(dsink);
  if (threadIdx.x == 0) a.dsink[target] = dsink;
}

template <class Shapes>
cudaError_t launch_preprocess(PreprocessArgs const& a, cudaStream_t stream) {
  dim3 const grid(static_cast<unsigned>(a.padded.num_blocks), static_cast<unsigned>(a.out.heads));
  preprocess_kernel<Shapes><<<grid, kPreprocessThreads, 0, stream>>>(a);
  return cudaGetLastError();
}

}  // namespace ringfa3
