// The fp8 forward with V in row order, (tokens, KV heads, D) e4m3, which it transposes itself:
// section 3.3 of FlashAttention-3. Two warps of the producer's warpgroup read a block by ldmatrix,
// transposed in pairs of channels, part these pairs by a permutation of bytes, and write what the
// product loads by TMA, keys in the product's order (csrc/quantise/values.cuh). Consumers are the
// product's.
//
// Rows of V after the end of a segment must be finite.
//
// Letters in shapes: N keys of a block, D head dim, S stages.
#pragma once

#include "forward/kernel.cuh"

namespace ringfa3 {

using namespace cute;

constexpr int kTransposers = 2;  // warps

template <class Shapes>
struct Transposing : Shapes {
  static_assert(Shapes::QuantisedV && Shapes::N == 128 && Shapes::D == 128);  // a line is 128 bytes
  static_assert(Shapes::Consumers == 2);
  static constexpr bool VByTile = false;
  struct SharedStorage : Shapes::SharedStorage {
    alignas(1024) uint8_t rows[Shapes::Stages][Shapes::N * Shapes::D];  // V as it is loaded
    alignas(16) cutlass::arch::ClusterTransactionBarrier rows_full[Shapes::Stages];
    alignas(16) cutlass::arch::ClusterBarrier rows_empty[Shapes::Stages];
    uint32_t blocks;  // all that this CTA has, once the loader knows it
  };
};

// The loader's part: V goes to `rows`.
template <class Shapes>
CUTE_DEVICE void load_values(ForwardParams<Transposing<Shapes>> const& p,
                             typename Transposing<Shapes>::SharedStorage& smem,
                             PipelineState<Shapes::Stages> stage, int at, WorkItem const& work) {
  int const i = stage.index();
  smem.rows_empty[i].wait(stage.phase() ^ 1);
  load_box<Shapes::N, Shapes::D>(p.v, smem.rows_full[i], smem.rows[i], at, work.kv_head);
}

// A transposer reads 16 x 16 bytes, keys 16 g and on, channels 16 u and on, as two matrices of 8
// keys and 8 pairs of channels. Its lane 4q + t then has channels 16u + 2q and the next one of keys
// 2t and 2t + 1, and of keys 8 and 9 on: the four keys of positions 4t to 4t + 3.
template <class Shapes>
CUTE_DEVICE void transpose_blocks(typename Shapes::SharedStorage& smem, int transposer, int lane) {
  constexpr int kUnits = 8;  // of 16 bytes, of a line
  uint32_t const rows = cast_smem_ptr_to_uint(smem.rows), v = cast_smem_ptr_to_uint(smem.v);
  // Lanes 8m + r give the addresses of row r of matrix m. Matrices 0 and 1 are of unit u, 2 and 3
  // of unit u + 1; 8 lanes never meet in a bank: a matrix that is written has rows of even channels
  // and of odd ones, so that their lines differ modulo 8.
  int const m = lane / 8, r = lane % 8;
  uint32_t const from = (8 * (m % 2) + r) * 128, from_unit = m / 2 ^ r;
  int const to_channel = 2 * r + (m % 2 != r / 4);
  uint32_t const to = (16 * (m / 2) + to_channel) * 128, to_key = to_channel % 8;
  bool const upper = lane / 4 >= 4;
  uint32_t const first = upper ? 0x7531 : 0x6420, second = upper ? 0x6420 : 0x7531;
  PipelineState<Shapes::Stages> stage;
  while (true) {
    int const i = stage.index();
    smem.rows_full[i].wait(stage.phase());
    if (stage.count == *static_cast<uint32_t volatile*>(&smem.blocks)) return;
    smem.v_empty[i].wait(stage.phase() ^ 1);
#pragma unroll 1
    for (int n = transposer; n < kUnits * kUnits / 2; n += kTransposers) {
      int const g = n % kUnits, u = n / kUnits * 2;
      uint32_t x[4];
      uint32_t const read = rows + i * 128 * 128 + g * 16 * 128 + from + ((u ^ from_unit) << 4);
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                   : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                   : "r"(read)
                   : "memory");
      uint32_t const write = v + i * 128 * 128 + u * 16 * 128 + to + ((g ^ to_key) << 4);
      asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(write),
                   "r"(__byte_perm(x[0], x[1], first)), "r"(__byte_perm(x[0], x[1], second)),
                   "r"(__byte_perm(x[2], x[3], first)), "r"(__byte_perm(x[2], x[3], second))
                   : "memory");
    }
    cutlass::arch::fence_view_async_shared();  // before wgmma reads V
    cutlass::arch::NamedBarrier::sync(kTransposers * kWarp, 2 * Shapes::Consumers);
    if (transposer == 0 && elect_one_sync()) {
      smem.v_full[i].arrive();
      smem.rows_empty[i].arrive();
    }
    stage.advance();
  }
}

// Ends the transposers. `stage` is the one after the last V.
template <class Shapes>
CUTE_DEVICE void end_transposers(typename Shapes::SharedStorage& smem,
                                 PipelineState<Shapes::Stages> stage) {
  smem.rows_empty[stage.index()].wait(stage.phase() ^ 1);
  *static_cast<uint32_t volatile*>(&smem.blocks) = stage.count;
  smem.rows_full[stage.index()].arrive();
}

template <class Shapes>
__global__ void __launch_bounds__(Shapes::Threads, 1)
    transposing_kernel(__grid_constant__ ForwardParams<Shapes> const p) {
  extern __shared__ __align__(1024) char raw[];
  auto& smem = *reinterpret_cast<typename Shapes::SharedStorage*>(raw);
  if (threadIdx.x == 0) {
    smem.blocks = ~0u;
    for (int i = 0; i < Shapes::Stages; ++i) smem.rows_full[i].init(1), smem.rows_empty[i].init(1);
    init_barriers<Shapes>(p, smem);
  }
  __syncthreads();
  if (threadIdx.x < kWarpgroup) {
    cutlass::arch::warpgroup_reg_dealloc<Shapes::kRegisters.producer>();
    int const warp = cutlass::canonical_warp_idx_sync();
    if (warp == 0) {
      if (elect_one_sync()) {
        end_transposers<Shapes>(smem, load_tiles<Shapes>(p, smem));
      }
    } else if (warp == 1) {
      fetch_work<Shapes>(p, smem);
    } else {
      transpose_blocks<Shapes>(smem, warp - 2, threadIdx.x % kWarp);
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<Shapes::kRegisters.consumer>();
    ForwardConsumer<Shapes>(p, smem).run();
  }
}

template <class Shapes>
cudaError_t launch_transposing(typename Shapes::Args const& a, cudaStream_t stream) {
  using With = Transposing<Shapes>;
  return launch_forward<With, transposing_kernel<With>>(a, stream);
}

}  // namespace ringfa3
