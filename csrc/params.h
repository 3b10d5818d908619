// Plain data that crosses from Python into the kernels. ringfa3/planning/{tiling,work_split}.py and
// ringfa3/kernels/{launch,forward,backward,local_kv,quantise}.py mirror it field by field.
#pragma once

#include <cstdint>

namespace ringfa3 {

// A rectangle of scores with a diagonal band: row r of [q0, q1) attends to column c of [k0, k1)
// iff lo <= (c - k0) - (r - q0) <= hi.
struct Span {
  int32_t q0, q1, k0, k1, lo, hi;
  int32_t arrival;    // the number of the arrival flag of these keys; 0: they are here
  int32_t padded_q0;  // q0 in padded rows, see PaddedRows
};

// The spans of `Plan.clipped`: a tile that visits one need not lie inside of it. `padded_q0` may
// lie inside a block of padded rows.
struct ClippedSpan : Span {
  int32_t q_end, k_end;  // the ends of the query and of the key segment
};

// What a forward tile needs of a clipped span that it visits, see `SpanColumns` and `SpanRows`.
struct SpanVisit {
  int32_t begin, end, low, high, key_row, keys, arrival;
  int32_t first_row, end_row;
};

// Rows [row0, row0 + rows), which visit spans [first_span, first_span + num_spans).
struct Tile {
  int32_t row0, rows, first_span, num_spans;
  int32_t flags;        // TileFlags
  int32_t padded_row0;  // row0 in padded rows
};

// The rows of a tile over all hops. kFirst: there is no partial output to merge with. kLast: store
// the output dtype.
enum TileFlags : int32_t { kFirst = 1, kLast = 2 };

// A (tokens, heads, head_dim) tensor; strides in elements, the last one is 1. Attention kernels
// take a multiple of 8 up to D, the head dim that they are compiled for, or of V and O up to DV:
// columns beyond `head_dim` read as zeros and are not stored.
struct Tensor3 {
  void* data;
  int64_t tokens;
  int32_t heads, head_dim;
  int64_t token_stride, head_stride;
};

struct ForwardArgs {
  Tensor3 q, k, v, out;
  float* partial_out;  // (padded rows, heads, DV), O between hops, see partial_output.cuh
  float* lse;          // (heads, tokens), natural logarithm
  int64_t lse_head_stride;
  float const* sink;  // (heads,), natural logarithm, in the softmax of kLast tiles; null: none
  Tile const* tiles;  // in the order in which they are fetched
  Span const* spans;  // or SpanVisit, see `ForwardShapes`
  int32_t const* arrivals;  // arrival flags: flag n, n < 32, is not 0 once the keys of spans with
                            // that number are here; null if no span has a number
  uint32_t* counter;        // work items fetched; 0 before and after the launch
  int32_t num_tiles;
  int32_t head_section;  // query heads that run together, whole groups
  int32_t num_ctas;
  float softmax_scale;
};

// The scales of 8-bit operands, as the quantisation makes them. A key tile is a `KeyTile`.
struct OperandScales {
  float const* q_scale;       // (heads, tokens)
  float const* k_offset;      // (heads, tokens), q times the mean of K
  float const* k_scale;       // (kv_heads, key_tiles)
  float const* v_mean;        // (kv_heads, head_dim); e4m3
  float const* v_scale;       // (kv_heads, head_dim); e4m3
  int32_t const* first_tile;  // (spans,), the number of the key tile with which each span begins
  int32_t key_tiles;
};

// The forward with 8-bit Q and K. E4M3 V is (tiles, kv_heads, head_dim, 128) bytes, see values.cuh:
// its Tensor3 has head_dim rows of 128 columns, and a head for each tile and KV head.
struct QuantisedForwardArgs {
  ForwardArgs forward;
  OperandScales scales;
};

// A block of padded rows: tokens [row0, row0 + rows), then padding up to M rows.
struct PaddedBlock {
  int32_t row0, rows;
};

// -LSE / softmax_scale or -D of a row as three bfloat16 numbers, whose sum has all bits of a
// float32. A product with ones adds it to S or dP.
struct alignas(16) SplitStatistic {
  uint16_t parts[3], zero[5];
};

// The padded rows of a backward: all hops share their statistics and the float32 dQ. Every query
// segment begins with a new block of M rows, see `Plan.padded_rows`.
struct PaddedRows {
  PaddedBlock const* blocks;
  void* statistics;  // (heads, num_blocks, 2, M), LSE and D = rowsum(dO * O) - dLSE, as
                     // `BackwardShapes::Statistic`; P = 0 in fully masked rows, and in padding
  float* dq;         // (heads, num_blocks, M * D), dQ tiles of (64, 64) in the accumulators' order
  int64_t num_blocks;
};

// A key tile, or a part of one: query heads [first_head, first_head + num_heads) of a KV head's
// group, and blocks [skip, skip + blocks) of the row blocks that the tile visits.
struct WorkUnit {
  int32_t row0, rows, first_span;
  int32_t flags;  // WorkUnitFlags
  int32_t first_head, num_heads;
  int32_t skip, blocks;  // blocks >= 1
};

// kShared: other work units add to the same keys.
enum WorkUnitFlags : int32_t { kShared = 4 };

struct PreprocessArgs {
  Tensor3 out, dout;
  float const* lse;   // (heads, tokens), natural logarithm
  float const* dlse;  // (heads, tokens); null: zeros
  int64_t lse_head_stride, dlse_head_stride;
  float const* sink;  // (heads,), natural logarithm; null: none, or it needs no gradient
  float* dsink;       // (heads, num_blocks), of the rows of each block
  PaddedRows padded;
  int32_t* words;  // counters and dQ semaphores of all launches of the pass
  int64_t num_words;
  float softmax_scale;
};

struct BackwardArgs {
  Tensor3 q, dout, k, v;
  Tensor3 dk, dv;  // float32 if `float32_grads`, else the dtype of k
  PaddedRows padded;
  WorkUnit const* work_units;  // in the order in which they are fetched
  Span const* spans;           // or ClippedSpan, see `BackwardShapes`
  int32_t const* earlier;      // (spans,), see `Tiling.earlier`
  int32_t* counter;            // work items fetched; 0 before the launch
  int32_t* dq_semaphore;  // (heads, num_blocks, dQ tiles), zeros before the launch; a CTA of a pair
                          // has two tiles, and uses the first's; null: dQ in any order
  int32_t num_work_units;
  int32_t head_section;  // KV heads that run together
  int32_t num_ctas;
  int32_t float32_grads;
  float softmax_scale;
};

struct PostprocessArgs {
  Tensor3 dq;
  PaddedRows padded;
  float softmax_scale;
};

// The tokens of a rank that it publishes to its peers. Token t is published row position[t] or,
// without a table, t - first. A number outside [0, count) is no row.
struct PublishedRows {
  int32_t const* position;  // (tokens,); null: tokens from `first` on
  int32_t first, count;
};

// Runs [begin[i], end[i]) of published rows, which are disjoint.
constexpr int kMaxRuns = 16;
struct RowRuns {
  int32_t count;
  int32_t begin[kMaxRuns];
  int32_t end[kMaxRuns];
};

// 16-bit K and V of equal shapes; head_dim is a multiple of 8, and rows begin at whole 16 bytes.
struct PublishArgs {
  Tensor3 k, v;
  PublishedRows rows;
  void* published;  // (rows.count, 2, heads, head_dim)
  void* gathered;   // (tokens, 2, heads, head_dim), all tokens; null: none
};

// Adds the runs of `returned` to those of `sum`: (rows, row_floats) each, a multiple of 16 floats.
struct AddReturnsArgs {
  float* sum;
  float const* returned;
  RowRuns runs;
  int32_t row_floats;
};

// A rank's dK and dV, (tokens, heads, head_dim) each, contiguous, from sums with row_floats =
// 2 * heads * head_dim floats a row.
struct RoundGradientsArgs {
  float const* own;       // (tokens, row_floats), of its own queries
  float const* sum;       // (rows.count, row_floats), of its peers' queries; null: there are none
  float const* returned;  // (rows.count, row_floats), to be added in the runs
  PublishedRows rows;
  RowRuns runs;
  void *dk, *dv;
  int64_t tokens;
  int32_t row_floats;
};

// Combines statistics of K and V per channel, in order: see `ChannelStatistics`, `KVCentres`.
struct CentresArgs {
  float const* parts;  // (parts, 4, heads, head_dim): the sum of K; the sum, maximum, minimum of V
  float* statistics;   // (4, heads, head_dim), of all parts
  float* centres;      // (3, heads, head_dim): the mean of K; the mean and scale of V
  int64_t tokens;      // of all parts
  int32_t num_parts, heads;
  int32_t int8;  // V has the mean 0 and the scale 1
};

// Statistics of splits of K and V, which are the parts that it then combines.
struct StatisticsArgs {
  Tensor3 k, v;
  float* splits;  // (num_parts, 4, heads, head_dim), of tokens [n * rows, (n + 1) * rows)
  CentresArgs centres;
  int32_t rows;
};

// Rows [row0, row0 + rows) of K/V, which share a scale of K; at most kKeyTile.
constexpr int kKeyTile = 128;
struct KeyTile {
  int32_t row0, rows;
};

// The operands of the forward or, with `lse`, those of the backward, see `DequantisedInputs`.
struct QuantiseQArgs {
  Tensor3 q;
  float const* k_mean;  // (kv_heads, head_dim)
  void* values;         // (tokens, heads, head_dim) bytes, or bfloat16 for the backward
  float* scale;         // forward: (heads, tokens)
  float* k_offset;      // forward: (heads, tokens), q times the mean of K
  float const* lse;     // backward: (heads, tokens), natural logarithm; null: forward
  float* centred_lse;   // backward: (heads, tokens), LSE without the offset
  int32_t kv_heads;
  int32_t int8;         // 0: e4m3
  float softmax_scale;  // backward
};

// As above; for the backward without `k_scale`. There K is in bfloat16, and its columns after
// head_dim hold the factor of its tile.
constexpr int kFactorColumns = 16;
struct QuantiseKVArgs {
  Tensor3 k, v;
  KeyTile const* tiles;
  float const *k_mean, *v_mean, *v_scale;  // (heads, head_dim)
  void* k_values;  // (tokens, heads, head_dim) bytes; backward: with kFactorColumns more columns
  float* k_scale;  // forward: (heads, tiles); null: backward
  void* v_values;  // (tiles, heads, head_dim, 128) bytes, see values.cuh; backward: (tokens, heads,
                   // head_dim) in bfloat16
  int32_t num_tiles;
  int32_t int8;  // V is left alone; 0: e4m3
};

}  // namespace ringfa3
