// What crosses from Python into a kernel: plain data, mirrored field by field in
// ringfa3/kernels.py.
#pragma once

#include <cstdint>

namespace ringfa3 {

// A rectangle of scores with a band: row r of [q0, q1) sees column c of [k0, k1)
// iff lo <= (c - k0) - (r - q0) <= hi. See ringfa3/plan.py.
struct Span {
  int32_t q0, q1, k0, k1, lo, hi, arrival, grid_q0;
};

// Rows [row0, row0 + rows) and the spans that they visit.
struct Tile {
  int32_t row0, rows, first_span, num_spans, flags, grid_row0;
};

enum TileFlags : int32_t { kFirst = 1, kLast = 2 };

// A (tokens, heads, head_dim) tensor; strides in elements, the last is 1.
struct Tensor3 {
  void* data;
  int64_t tokens, heads;
  int64_t token_stride, head_stride;
};

struct ForwardArgs {
  Tensor3 q, k, v, out;
  float* partial_out;  // (tokens, heads, head_dim) contiguous, O between hops
  float* lse;          // (heads, tokens), natural logarithm
  int64_t lse_head_stride;
  Tile const* tiles;  // in the order in which they are fetched
  Span const* spans;
  int32_t const* arrivals;  // word n, n < 32: > 0 once the keys of spans with that number are here,
                            // < 0 if they never will be; may be null if no span has a number
  uint32_t* counter;        // pieces of work taken; 0 before the launch and after it
  int32_t num_tiles;
  int32_t head_section;  // query heads whose tiles run together, whole groups
  int32_t num_ctas;
  float softmax_scale;
};

// Rows of one block of the row grid: tokens [row0, row0 + rows), the rest is padding.
struct GridBlock {
  int32_t row0, rows;
};

// The padded rows in which LSE, D and the float32 dQ of a backward live through all its hops:
// blocks of M rows, every query segment begins with one. See `Plan.row_grid` in ringfa3/plan.py.
struct RowGrid {
  GridBlock const* blocks;
  float* lse;    // (heads, num_blocks, M), to base 2; +inf in rows that see nothing, and in padding
  float* delta;  // (heads, num_blocks, M), D = rowsum(dO * O) - dLSE
  float* dq;     // (heads, num_blocks, M * D), pieces of (64, 64) as the accumulators hold them
  int64_t num_blocks;
};

// What one CTA does of a key tile: query heads [first_head, first_head + num_heads) of every KV
// head's group, and of the blocks of rows that the tile visits, in order, [skip, skip + blocks), at
// least one.
struct WorkUnit {
  int32_t row0, rows, first_span, flags, first_head, num_heads, skip, blocks;
};

enum WorkUnitFlags : int32_t { kShared = 4 };  // the only one: other work units add to these keys

struct PreprocessArgs {
  Tensor3 out, dout;
  float const* lse;   // (heads, tokens), natural logarithm
  float const* dlse;  // (heads, tokens); null: zeros
  int64_t lse_head_stride, dlse_head_stride;
  RowGrid grid;
};

struct BackwardArgs {
  Tensor3 q, dout, k, v;
  Tensor3 dk, dv;  // float32 where `float32_grads`, else the dtype of k
  RowGrid grid;
  WorkUnit const* work_units;  // in the order in which they are fetched
  Span const* spans;
  int32_t const* earlier;  // per span, see `Tiling.turn`
  int32_t* counter;        // the next piece of work; zero before the launch
  int32_t* turns;          // (heads, num_blocks, pieces) zeros before the launch; null: no turns
  int32_t num_work_units;
  int32_t head_section;  // KV heads whose work units run together
  int32_t num_ctas;
  int32_t float32_grads;
  float softmax_scale;
};

struct PostprocessArgs {
  Tensor3 dq;
  RowGrid grid;
  float softmax_scale;
};

}  // namespace ringfa3
