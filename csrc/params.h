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
  float* running;  // (tokens, heads, head_dim) contiguous, O between hops
  float* lse;      // (heads, tokens), natural logarithm
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

}  // namespace ringfa3
