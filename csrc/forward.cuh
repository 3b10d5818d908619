// FlashAttention-3 forward (Algorithms 1 and 2 of the paper) over the tiles of a plan.
//
// A producer warp streams Q, K and V through shared memory by TMA. Each consumer warpgroup owns 64
// query rows; inside one, S(j+1) = Q K^T is issued before softmax(j) and P(j) V, and between them a
// ring of named barriers lets one warpgroup's softmax run under another's matrix products.
//
// Letters in shapes: M rows of a tile, N keys of a block, D head dim, S stages.
#pragma once

#include <cute/tensor.hpp>
#include <cutlass/arch/barrier.h>
#include <cutlass/arch/reg_reconfig.h>
#include <cutlass/cutlass.h>
#include <cutlass/numeric_conversion.h>
#include <cutlass/numeric_types.h>

#include "params.h"

namespace ringfa3 {

using namespace cute;

constexpr int kWarp = 32;
constexpr int kWarpgroup = 128;
constexpr int kWorkDepth = 3;   // the piece that ends, the next, and one to come
constexpr int kBlocksAhead = 4;  // blocks left to load when the next piece is fetched
constexpr int kVisits = 8;
constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

// What a tile visits of one span: columns [begin, end), of which its row r sees
// [low + r, high + r]. key_row is the span's first key, keys how many it has.
struct Visit {
  int32_t begin, end, low, high, key_row, keys;
  Visit() = default;
  CUTE_DEVICE Visit(Tile const& tile, Span const& s) {
    int const i = tile.row0 - s.q0;
    low = i + s.lo, high = i + s.hi, key_row = s.k0, keys = s.k1 - s.k0;
    begin = max(0, low);
    end = min(keys, tile.rows + high);
  }
};

// A tile for one query head. Heads run in sections whose K/V share the L2 cache; inside a section
// all heads of a tile come side by side, tiles in the order of the plan.
struct Work {
  int32_t head;  // -1: no more
  Tile tile;
  Visit visits[kVisits];  // of the first spans; a tile with more reads the rest from the plan
};

template <class Element_, int HeadDim_, int TileN_, int Consumers_>
struct ForwardTraits {
  using Element = Element_;
  static constexpr int D = HeadDim_;
  static constexpr int N = TileN_;
  static constexpr int Consumers = Consumers_;
  static constexpr int M = 64 * Consumers;
  static constexpr int Stages = 2;
  static constexpr int QStages = D < 256 ? 2 : 1;  // two where they fit: the next tile's Q is there
  static constexpr int Threads = kWarpgroup * (Consumers + 1);
  static constexpr int ConsumerRegisters = Consumers == 2 ? 240 : 160;
  static constexpr int ProducerRegisters = Consumers == 2 ? 24 : 32;

  // One warpgroup's products: S (64, N) = Q (64, D) K^T, O (64, D) += P (64, N) V.
  using MmaS = decltype(make_tiled_mma(
      GMMA::ss_op_selector<Element, Element, float, Shape<_64, Int<N>, Int<D>>,
                           GMMA::Major::K, GMMA::Major::K>()));
  using MmaO = decltype(make_tiled_mma(
      GMMA::rs_op_selector<Element, Element, float, Shape<_64, Int<D>, Int<N>>,
                           GMMA::Major::K, GMMA::Major::MN>()));

  using AtomK = GMMA::Layout_K_SW128_Atom<Element>;
  using AtomMN = GMMA::Layout_MN_SW128_Atom<Element>;
  using SmemQ = decltype(tile_to_shape(AtomK{}, Shape<Int<M>, Int<D>, Int<QStages>>{}));
  using SmemK = decltype(tile_to_shape(AtomK{}, Shape<Int<N>, Int<D>, Int<Stages>>{}));
  // V transposed, (D, N, S): the head dim is contiguous, as the second product's B wants it.
  using SmemV = decltype(
      tile_to_shape(AtomMN{}, Shape<Int<D>, Int<N>, Int<Stages>>{}, Step<_2, _1, _3>{}));

  // Global tensors as TMA sees them: (tokens, D, heads), V as (D, tokens, heads).
  using GmemShape = Shape<int32_t, Int<D>, int32_t>;
  using GmemStride = Stride<int64_t, _1, int64_t>;
  using GmemShapeV = Shape<Int<D>, int32_t, int32_t>;
  using GmemStrideV = Stride<_1, int64_t, int64_t>;
  using TmaQ = decltype(make_tma_copy(
      SM90_TMA_LOAD{},
      make_tensor(make_gmem_ptr(static_cast<Element const*>(nullptr)), GmemShape{}, GmemStride{}),
      take<0, 2>(SmemQ{})));
  using TmaK = decltype(make_tma_copy(
      SM90_TMA_LOAD{},
      make_tensor(make_gmem_ptr(static_cast<Element const*>(nullptr)), GmemShape{}, GmemStride{}),
      take<0, 2>(SmemK{})));
  using TmaV = decltype(make_tma_copy(
      SM90_TMA_LOAD{},
      make_tensor(make_gmem_ptr(static_cast<Element const*>(nullptr)), GmemShapeV{}, GmemStrideV{}),
      take<0, 2>(SmemV{})));

  static constexpr int BytesQ = M * D * sizeof(Element);
  static constexpr int BytesBlock = N * D * sizeof(Element);

  struct SharedStorage {
    alignas(1024) Element q[cosize_v<SmemQ>];
    alignas(1024) Element k[cosize_v<SmemK>];
    alignas(1024) Element v[cosize_v<SmemV>];
    alignas(16) cutlass::arch::ClusterTransactionBarrier q_full[QStages];
    alignas(16) cutlass::arch::ClusterTransactionBarrier k_full[Stages], v_full[Stages];
    alignas(16) cutlass::arch::ClusterBarrier q_empty[QStages], k_empty[Stages], v_empty[Stages];
    alignas(16) cutlass::arch::ClusterBarrier work_full[kWorkDepth], work_empty[kWorkDepth];
    alignas(16) cutlass::arch::ClusterBarrier work_wanted;
    Work work[kWorkDepth];
  };
};

template <class Traits>
struct ForwardParams {
  typename Traits::TmaQ tma_q;
  typename Traits::TmaK tma_k;
  typename Traits::TmaV tma_v;
  ForwardArgs args;
  int32_t heads, group, q_tokens, k_tokens, num_work;
};

// A place in a circular buffer of S stages, and the parity that its barriers have there.
template <int S>
struct StageState {
  int index = 0;
  uint32_t phase = 0;
  CUTE_DEVICE void advance() {
    if (++index == S) {
      index = 0;
      phase ^= 1;
    }
  }
};

// The blocks of a tile, one flat sequence over its spans, each span from its last column down.
// The lowest block of a span starts at its first column and hides what the one above has covered,
// so no block reads beyond a span that has at least N keys.
template <int N>
struct BlockIterator {
  Work const* work;
  Span const* spans;       // of the plan
  int index = -1;          // of the visit
  int end = 0, begin = 0;  // its columns not yet done
  int open = 0, shut = 0;  // columns [open, shut) are seen by every row
  int keys = 0;            // of the span
  int start = 0;           // first column of this block

  CUTE_DEVICE BlockIterator(Work const& work, Span const* spans) : work(&work), spans(spans) {}
  // Goes to the first block of another tile.
  CUTE_DEVICE void begin_work(Work const& other) {
    work = &other, index = -1, begin = end = 0;
    next();
  }
  CUTE_DEVICE Visit visit() const {
    return index < kVisits ? work->visits[index]
                           : Visit(work->tile, spans[work->tile.first_span + index]);
  }
  CUTE_DEVICE bool next() {
    while (end <= begin) {
      if (++index >= work->tile.num_spans) return false;
      Visit const v = visit();
      begin = v.begin, end = v.end;
      open = v.low + work->tile.rows - 1, shut = v.high + 1, keys = v.keys;
    }
    start = max(end - N, 0);
    return true;
  }
  CUTE_DEVICE bool masked() const { return start < open || start + N > min(end, shut); }
  // Rows of this block's K and V that belong to the span; those behind are its neighbour's.
  CUTE_DEVICE int owned() const { return min(N, keys - start); }
  // Whether at most `blocks` more follow, this one included.
  CUTE_DEVICE bool nearly_done(int blocks) const {
    return index + 1 >= work->tile.num_spans && end - begin <= blocks * N;
  }
  // Columns from `start` on are done.
  CUTE_DEVICE void done() { end = start; }
};

// Warp-wide: O = 0 and LSE = -inf for the rows of a tile.
template <class Traits>
CUTE_DEVICE void store_nothing(ForwardArgs const& a, Tile const& tile, int head, int lane) {
  auto* const out = static_cast<typename Traits::Element*>(a.out.data) + head * a.out.head_stride;
  for (int i = lane; i < tile.rows * (Traits::D / 8); i += kWarp) {
    int64_t const token = tile.row0 + i / (Traits::D / 8);
    auto* const eight = out + token * a.out.token_stride + i % (Traits::D / 8) * 8;
    *reinterpret_cast<uint4*>(eight) = make_uint4(0, 0, 0, 0);
  }
  for (int i = lane; i < tile.rows; i += kWarp) {
    a.lse[head * a.lse_head_stride + tile.row0 + i] = -INFINITY;
  }
}

// Warp-wide: takes and decodes the next piece of work while the last blocks of this one are on
// their way. Not earlier: whoever is free first should get the next one.
template <class Traits>
CUTE_DEVICE void fetch_work(ForwardParams<Traits> const& p, typename Traits::SharedStorage& smem) {
  int const lane = threadIdx.x % kWarp;
  ForwardArgs const& a = p.args;
  StageState<kWorkDepth> state;
  uint32_t wanted_phase = 0;
  int w = blockIdx.x;
  while (true) {
    smem.work_empty[state.index].wait(state.phase ^ 1);
    Work& work = smem.work[state.index];
    if (w >= p.num_work) {
      if (lane == 0) work.head = -1;
    } else {
      int const per_section = a.num_tiles * a.head_section;
      int const section = w / per_section;
      int const rest = w - section * per_section;
      int const width = min(a.head_section, p.heads - section * a.head_section);
      Tile const tile = a.tiles[rest / width];
      int const head = section * a.head_section + rest % width;
      if (tile.num_spans == 0) {  // sees nothing at any hop
        store_nothing<Traits>(a, tile, head, lane);
        if (lane == 0) w = gridDim.x + atomicAdd(a.counter, 1);
        w = __shfl_sync(0xffffffff, w, 0);
        continue;
      }
      if (lane < min(tile.num_spans, kVisits)) {
        work.visits[lane] = Visit(tile, a.spans[tile.first_span + lane]);
      }
      if (lane == 0) {
        work.tile = tile;
        work.head = head;
      }
    }
    __syncwarp();
    if (lane == 0) smem.work_full[state.index].arrive();
    if (w >= p.num_work) return;
    state.advance();
    smem.work_wanted.wait(wanted_phase);
    wanted_phase ^= 1;
    if (lane == 0) w = gridDim.x + atomicAdd(a.counter, 1);
    w = __shfl_sync(0xffffffff, w, 0);
  }
}

template <class Traits>
CUTE_DEVICE void load_tiles(ForwardParams<Traits> const& p,
                            typename Traits::SharedStorage& smem) {
  constexpr int M = Traits::M, N = Traits::N, D = Traits::D, Stages = Traits::Stages;
  Tensor sQ = make_tensor(make_smem_ptr(smem.q), typename Traits::SmemQ{});  // (M, D, S)
  Tensor sK = make_tensor(make_smem_ptr(smem.k), typename Traits::SmemK{});  // (N, D, S)
  Tensor sV = make_tensor(make_smem_ptr(smem.v), typename Traits::SmemV{});  // (D, N, S)
  Tensor mQ = p.tma_q.get_tma_tensor(make_shape(p.q_tokens, Int<D>{}, p.heads));
  Tensor mK = p.tma_k.get_tma_tensor(make_shape(p.k_tokens, Int<D>{}, p.heads / p.group));
  Tensor mV = p.tma_v.get_tma_tensor(make_shape(Int<D>{}, p.k_tokens, p.heads / p.group));
  auto q_slice = p.tma_q.get_slice(0);
  auto k_slice = p.tma_k.get_slice(0);
  auto v_slice = p.tma_v.get_slice(0);
  Tensor tQ = group_modes<0, 3>(q_slice.partition_D(sQ));
  Tensor tK = group_modes<0, 3>(k_slice.partition_D(sK));  // (TMA, S)
  Tensor tV = group_modes<0, 3>(v_slice.partition_D(sV));

  StageState<Stages> k_state, v_state;
  StageState<Traits::QStages> q_state;
  StageState<kWorkDepth> work_state;
  while (true) {
    smem.work_full[work_state.index].wait(work_state.phase);
    Work const& work = smem.work[work_state.index];
    if (work.head < 0) return;
    BlockIterator<N> block(work, p.args.spans);
    int const kv_head = work.head / p.group;
    bool more = block.next();
    smem.q_empty[q_state.index].wait(q_state.phase ^ 1);
    smem.q_full[q_state.index].arrive_and_expect_tx(Traits::BytesQ);
    Tensor gQ = local_tile(domain_offset(make_coord(work.tile.row0, _0{}, _0{}), mQ),
                           Shape<Int<M>, Int<D>>{}, make_coord(_0{}, _0{}, work.head));
    copy(p.tma_q.with(reinterpret_cast<uint64_t&>(smem.q_full[q_state.index])),
         group_modes<0, 3>(q_slice.partition_S(gQ)), tQ(_, q_state.index));
    q_state.advance();
    auto load_v = [&](int row) {
      smem.v_empty[v_state.index].wait(v_state.phase ^ 1);
      smem.v_full[v_state.index].arrive_and_expect_tx(Traits::BytesBlock);
      Tensor gV = local_tile(domain_offset(make_coord(_0{}, row, _0{}), mV),
                             Shape<Int<D>, Int<N>>{}, make_coord(_0{}, _0{}, kv_head));
      copy(p.tma_v.with(reinterpret_cast<uint64_t&>(smem.v_full[v_state.index])),
           group_modes<0, 3>(v_slice.partition_S(gV)), tV(_, v_state.index));
      v_state.advance();
    };
    int pending_v = -1;  // row of the V block that follows the next K block
    bool asked = false;
    while (more) {
      if (!asked && block.nearly_done(kBlocksAhead)) {
        smem.work_wanted.arrive();
        asked = true;
      }
      int const row = block.visit().key_row + block.start;
      smem.k_empty[k_state.index].wait(k_state.phase ^ 1);
      smem.k_full[k_state.index].arrive_and_expect_tx(Traits::BytesBlock);
      Tensor gK = local_tile(domain_offset(make_coord(row, _0{}, _0{}), mK),
                             Shape<Int<N>, Int<D>>{}, make_coord(_0{}, _0{}, kv_head));
      copy(p.tma_k.with(reinterpret_cast<uint64_t&>(smem.k_full[k_state.index])),
           group_modes<0, 3>(k_slice.partition_S(gK)), tK(_, k_state.index));
      k_state.advance();
      if (pending_v >= 0) load_v(pending_v);
      pending_v = row;
      block.done();
      more = block.next();
    }
    load_v(pending_v);
    smem.work_empty[work_state.index].arrive();
    work_state.advance();
  }
}

// Online softmax of the two rows of S that a thread shares with its quad of lanes.
//
// P = exp2(scale * S - shift). The shift need not be the maximum: it is raised only when a score
// exceeds it by kSlack powers of two, so that O and the sum are rarely rescaled and the lanes of a
// row need not agree on a maximum in between. P stays below 2^kSlack, within bf16 and fp16.
struct RowState {
  static constexpr float kSlack = 8.f;
  float shift[2] = {-INFINITY, -INFINITY};  // log2 units; -inf before the first score
  float total[2] = {0.f, 0.f};              // this lane's part of the running sum of P
  float decay[2];                           // by which O shrinks, where `raise` returns true

  // Takes a block's scores in; whether the warp's rows have been raised.
  template <class Scores>
  CUTE_DEVICE bool raise(Scores const& s, float scale_log2) {
    constexpr int kSize = decltype(size(s))::value;  // pairs: index = 4 * j + 2 * r + c
    float peak[2][2] = {{s(0), s(1)}, {s(2), s(3)}};
    CUTE_UNROLL
    for (int n = 4; n < kSize; n += 4) {
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) {
        CUTE_UNROLL
        for (int c = 0; c < 2; ++c) peak[r][c] = fmaxf(peak[r][c], s(n + 2 * r + c));
      }
    }
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) peak[r][0] = fmaxf(peak[r][0], peak[r][1]) * scale_log2;
    bool const over = peak[0][0] > shift[0] + kSlack || peak[1][0] > shift[1] + kSlack;
    if (!__any_sync(0xffffffff, over)) return false;
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      float high = fmaxf(shift[r], peak[r][0]);
      high = fmaxf(high, __shfl_xor_sync(0xffffffff, high, 1));
      high = fmaxf(high, __shfl_xor_sync(0xffffffff, high, 2));
      decay[r] = shift[r] == -INFINITY ? 0.f : exp2f(shift[r] - high);
      total[r] *= decay[r];
      shift[r] = high;
    }
    return true;
  }

  // S to P for elements [Begin, End) of the thread's fragment.
  template <int Begin, int End, class Scores>
  CUTE_DEVICE void exponentiate(Scores& s, float scale_log2) {
    float sum[2][2] = {};
    float const from[2] = {shift[0] == -INFINITY ? 0.f : shift[0],
                           shift[1] == -INFINITY ? 0.f : shift[1]};
    CUTE_UNROLL
    for (int n = Begin; n < End; n += 4) {
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) {
        CUTE_UNROLL
        for (int c = 0; c < 2; ++c) {
          float& x = s(n + 2 * r + c);
          x = exp2f(x * scale_log2 - from[r]);
          sum[r][c] += x;
        }
      }
    }
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) total[r] += sum[r][0] + sum[r][1];
  }
};

// Sets S to -inf where the thread's rows `row` and `row + 8` of the tile must not see.
template <int N, class Scores>
CUTE_DEVICE void hide(Scores& s, BlockIterator<N> const& block, int row, int lane) {
  constexpr int kSize = decltype(size(s))::value;
  Visit const v = block.visit();
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) {
    int const offset = block.start + 2 * (lane % 4);
    int const first = v.low + row + 8 * r - offset;
    int const last = min(block.end - 1, v.high + row + 8 * r) - offset;
    CUTE_UNROLL
    for (int n = 0; n < kSize; n += 4) {
      CUTE_UNROLL
      for (int c = 0; c < 2; ++c) {
        int const column = 2 * n + c;  // 8 * (n / 4) + c
        if (column < first || column > last) s(n + 2 * r + c) = -INFINITY;
      }
    }
  }
}

// P in the registers of the second product's A operand: pairs in the order that S has them.
template <class Element, class Scores, class Operand>
CUTE_DEVICE void to_operand(Scores const& s, Operand& p) {
  constexpr int kSize = decltype(size(s))::value;
  cutlass::NumericArrayConverter<Element, float, 2> convert;
  auto* out = reinterpret_cast<cutlass::Array<Element, 2>*>(raw_pointer_cast(p.data()));
  CUTE_UNROLL
  for (int n = 0; n < kSize; n += 2) {
    cutlass::Array<float, 2> pair;
    pair[0] = s(n), pair[1] = s(n + 1);
    out[n / 2] = convert(pair);
  }
}

// C = A B, or C += A B; asynchronous.
template <class Mma, class A, class B, class C>
CUTE_DEVICE void issue(Mma& mma, A const& a, B const& b, C& c, bool add) {
  mma.accumulate_ = add ? GMMA::ScaleOut::One : GMMA::ScaleOut::Zero;
  warpgroup_fence_operand(c);
  warpgroup_arrive();
  CUTE_UNROLL
  for (int k = 0; k < size<2>(a); ++k) {
    gemm(mma, a(_, _, k), b(_, _, k), c);
    mma.accumulate_ = GMMA::ScaleOut::One;
  }
  warpgroup_commit_batch();
}

// Stores one row of O, of which a quad of lanes holds columns 8j + 2q, 8j + 2q + 1 for all j, in
// the output dtype. Neighbouring lanes trade halves, so that a quad writes whole 32-byte sectors.
template <class Traits, class Output>
CUTE_DEVICE void store_row(typename Traits::Element* out, Output const& o, int r, int lane,
                           bool stored) {
  cutlass::NumericArrayConverter<typename Traits::Element, float, 2> convert;
  auto pack = [&](int j) {
    cutlass::Array<float, 2> pair;
    pair[0] = o(4 * j + 2 * r), pair[1] = o(4 * j + 2 * r + 1);
    auto const packed = convert(pair);
    return reinterpret_cast<uint32_t const&>(packed);
  };
  bool const odd = lane & 1;
  out += 8 * (lane & 1) + 2 * (lane & 2);
  CUTE_UNROLL
  for (int j = 0; j < Traits::D / 8; j += 2) {
    uint32_t const a = pack(j), b = pack(j + 1);
    uint32_t const got = __shfl_xor_sync(0xffffffff, odd ? a : b, 1);
    uint2 const eight = odd ? make_uint2(got, b) : make_uint2(a, got);
    if (stored) *reinterpret_cast<uint2*>(out + 8 * j) = eight;
  }
}

// Merges a row with what earlier hops left: the weight of the old O, and of ours, whose LSE it is.
CUTE_DEVICE float2 merge(float old, float& lse) {
  float const high = fmaxf(old, lse);
  if (high == -INFINITY) return make_float2(0.f, 0.f);
  float const both = high + __logf(__expf(old - high) + __expf(lse - high));
  float2 const weights = make_float2(__expf(old - both), __expf(lse - both));
  lse = both;
  return weights;
}

// The end of a tile: normalises O, and stores or merges it and the LSE. A quad of lanes holds two
// rows, `row` and `row + 8` of the tile.
template <class Traits, class Output>
CUTE_DEVICE void finish(ForwardParams<Traits> const& p, Tile const& tile, int head, int row,
                        int lane, RowState const& rows, Output& o) {
  using Element = typename Traits::Element;
  constexpr int D = Traits::D;
  ForwardArgs const& a = p.args;
  bool const first = tile.flags & kFirst, last = tile.flags & kLast;
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) {
    float total = rows.total[r];
    total += __shfl_xor_sync(0xffffffff, total, 1);
    total += __shfl_xor_sync(0xffffffff, total, 2);
    float weight = total == 0.f ? 0.f : 1.f / total;
    float lse = total == 0.f ? -INFINITY
                             : (rows.shift[r] + __log2f(total)) * kLn2;
    bool const stored = row + 8 * r < tile.rows;
    int64_t const token = tile.row0 + row + 8 * r;
    float* const lse_at = a.lse + head * a.lse_head_stride + token;
    float* const running = a.running + (token * p.heads + head) * D + 2 * (lane % 4);
    if (!first) {
      float2 const weights = merge(stored ? *lse_at : -INFINITY, lse);
      weight *= weights.y;
      CUTE_UNROLL
      for (int n = 2 * r; n < D / 2; n += 4) {
        float2 const old = stored ? *reinterpret_cast<float2*>(running + 2 * (n - 2 * r))
                                  : make_float2(0.f, 0.f);
        o(n) = o(n) * weight + weights.x * old.x;
        o(n + 1) = o(n + 1) * weight + weights.x * old.y;
      }
      __syncwarp();  // every lane of a row has read its LSE
    } else {
      CUTE_UNROLL
      for (int n = 2 * r; n < D / 2; n += 4) o(n) *= weight, o(n + 1) *= weight;
    }
    if (stored && lane % 4 == 0) *lse_at = lse;
    if (last) {
      Element* const out = static_cast<Element*>(a.out.data) + token * a.out.token_stride +
                           head * a.out.head_stride;
      store_row<Traits>(out, o, r, lane, stored);
    } else if (stored) {
      CUTE_UNROLL
      for (int n = 2 * r; n < D / 2; n += 4) {
        *reinterpret_cast<float2*>(running + 2 * (n - 2 * r)) = make_float2(o(n), o(n + 1));
      }
    }
  }
}

template <class Traits>
CUTE_DEVICE void attend_tiles(ForwardParams<Traits> const& p,
                              typename Traits::SharedStorage& smem) {
  using Element = typename Traits::Element;
  constexpr int N = Traits::N, D = Traits::D, Stages = Traits::Stages;
  constexpr int Consumers = Traits::Consumers;
  int const thread = threadIdx.x % kWarpgroup;
  int const warpgroup = cutlass::canonical_warp_group_idx() - 1;  // known to be uniform
  int const lane = thread % kWarp;
  int const row = 64 * warpgroup + thread / kWarp * 16 + lane / 4;  // and row + 8
  float const scale_log2 = p.args.softmax_scale * kLog2e;

  typename Traits::MmaS mma_s;
  typename Traits::MmaO mma_o;
  Tensor sQ = local_tile(make_tensor(make_smem_ptr(smem.q), typename Traits::SmemQ{}),
                         Shape<_64, Int<D>>{}, make_coord(warpgroup, _0{}, _));  // (64, D, S)
  Tensor sK = make_tensor(make_smem_ptr(smem.k), typename Traits::SmemK{});       // (N, D, S)
  Tensor sV = make_tensor(make_smem_ptr(smem.v), typename Traits::SmemV{});       // (D, N, S)
  auto thread_s = mma_s.get_slice(thread);
  auto thread_o = mma_o.get_slice(thread);
  Tensor fQ = thread_s.partition_fragment_A(sQ);
  Tensor fK = thread_s.partition_fragment_B(sK);
  Tensor fV = thread_o.partition_fragment_B(sV);
  Tensor s = partition_fragment_C(mma_s, Shape<_64, Int<N>>{});
  Tensor o = partition_fragment_C(mma_o, Shape<_64, Int<D>>{});
  Tensor fP = make_tensor<Element>(Shape<Shape<_2, _2, _2>, _1, Int<N / 16>>{});

  // Warpgroups issue their products one after the other: named barrier w is the turn of w.
  auto my_turn = [&] { cutlass::arch::NamedBarrier::sync(2 * kWarpgroup, warpgroup); };
  auto next_turn = [&] {
    cutlass::arch::NamedBarrier::arrive(2 * kWarpgroup, (warpgroup + 1) % Consumers);
  };
  if (warpgroup == Consumers - 1) next_turn();

  StageState<Stages> k_state, v_state;
  StageState<Traits::QStages> q_state;
  StageState<kWorkDepth> work_state;
  bool fresh = true;  // O holds nothing of this tile yet
  auto issue_scores = [&] {
    issue(mma_s, fQ(_, _, _, q_state.index), fK(_, _, _, k_state.index), s, false);
  };
  auto issue_output = [&] {
    smem.v_full[v_state.index].wait(v_state.phase);
    issue(mma_o, fP, fV(_, _, _, v_state.index), o, !fresh);
  };
  // P is 0 where V is not the span's, but 0 x inf would be NaN. Every warpgroup clears for itself.
  int owned = N;
  auto clear_foreign_v = [&] {
    if (owned == N) return;
    smem.v_full[v_state.index].wait(v_state.phase);
    for (int i = thread; i < (N - owned) * D; i += kWarpgroup) {
      sV(i % D, owned + i / D, v_state.index) = Element(0);
    }
    cutlass::arch::fence_view_async_shared();
    cutlass::arch::NamedBarrier::sync(kWarpgroup, Consumers + warpgroup);
  };
  auto scores_done = [&] {
    warpgroup_fence_operand(s);
    if (thread == 0) smem.k_empty[k_state.index].arrive();
    k_state.advance();
  };

  constexpr int kSize = N / 2;           // of a thread's part of S
  constexpr int kHalf = kSize / 8 * 4;
  smem.work_full[0].wait(0);
  bool another = smem.work[0].head >= 0;
  if (!another) return;
  BlockIterator<N> block(smem.work[0], p.args.spans);
  block.next();
  smem.q_full[0].wait(0);
  smem.k_full[0].wait(0);
  my_turn();
  issue_scores();
  next_turn();
  warpgroup_wait<0>();
  scores_done();
  while (another) {
    // The scores of the first block are here.
    Work const& work = smem.work[work_state.index];
    RowState rows;
    if (block.masked()) hide(s, block, row, lane);
    rows.raise(s, scale_log2);
    rows.template exponentiate<0, kSize>(s, scale_log2);
    to_operand<Element>(s, fP);
    fresh = true;
    owned = block.owned();
    block.done();
    bool more = block.next();
    if (more) smem.k_full[k_state.index].wait(k_state.phase);
    while (more) {
      // P V of the last block runs beside the scores of this one, and beside their softmax.
      clear_foreign_v();
      my_turn();
      issue_scores();
      issue_output();
      next_turn();
      fresh = false;
      warpgroup_wait<1>();
      scores_done();
      if (block.masked()) hide(s, block, row, lane);
      bool const raised = rows.raise(s, scale_log2);
      rows.template exponentiate<0, kHalf>(s, scale_log2);
      owned = block.owned();
      block.done();
      more = block.next();  // branches, and so keeps the exponentials above the wait
      if (more) smem.k_full[k_state.index].wait(k_state.phase);
      warpgroup_wait<0>();
      warpgroup_fence_operand(o);
      if (thread == 0) smem.v_empty[v_state.index].arrive();
      v_state.advance();
      rows.template exponentiate<kHalf, kSize>(s, scale_log2);
      if (raised) {
        CUTE_UNROLL
        for (int n = 0; n < D / 2; n += 4) {
          o(n) *= rows.decay[0], o(n + 1) *= rows.decay[0];
          o(n + 2) *= rows.decay[1], o(n + 3) *= rows.decay[1];
        }
      }
      to_operand<Element>(s, fP);
    }

    // The tile ends. The first scores of the next one come before its last P V, if Q can be there.
    clear_foreign_v();
    if (thread == 0) smem.q_empty[q_state.index].arrive();
    q_state.advance();
    work_state.advance();
    smem.work_full[work_state.index].wait(work_state.phase);
    another = smem.work[work_state.index].head >= 0;
    if (another) block.begin_work(smem.work[work_state.index]);
    if (Traits::QStages > 1 && another) {
      smem.q_full[q_state.index].wait(q_state.phase);
      smem.k_full[k_state.index].wait(k_state.phase);
      my_turn();
      issue_scores();
      issue_output();
      next_turn();
      warpgroup_wait<0>();
      scores_done();
    } else {
      my_turn();
      issue_output();
      next_turn();
      warpgroup_wait<0>();
    }
    warpgroup_fence_operand(o);
    if (thread == 0) smem.v_empty[v_state.index].arrive();
    v_state.advance();
    finish<Traits>(p, work.tile, work.head, row, lane, rows, o);
    __syncwarp();
    if (lane == 0) smem.work_empty[(work_state.index + kWorkDepth - 1) % kWorkDepth].arrive();
    if (Traits::QStages == 1 && another) {
      smem.q_full[q_state.index].wait(q_state.phase);
      smem.k_full[k_state.index].wait(k_state.phase);
      my_turn();
      issue_scores();
      next_turn();
      warpgroup_wait<0>();
      scores_done();
    }
  }
  if (warpgroup == 0) my_turn();  // the turn that nobody takes
}

template <class Traits>
__global__ void __launch_bounds__(Traits::Threads, 1)
    forward_kernel(__grid_constant__ ForwardParams<Traits> const p) {
  extern __shared__ __align__(1024) char raw[];
  auto& smem = *reinterpret_cast<typename Traits::SharedStorage*>(raw);
  if (threadIdx.x == 0) {
    prefetch_tma_descriptor(p.tma_q.get_tma_descriptor());
    prefetch_tma_descriptor(p.tma_k.get_tma_descriptor());
    prefetch_tma_descriptor(p.tma_v.get_tma_descriptor());
    for (int i = 0; i < Traits::QStages; ++i) {
      smem.q_full[i].init(1), smem.q_empty[i].init(Traits::Consumers);
    }
    smem.work_wanted.init(1);
    for (int i = 0; i < Traits::Stages; ++i) {
      smem.k_full[i].init(1), smem.v_full[i].init(1);
      smem.k_empty[i].init(Traits::Consumers), smem.v_empty[i].init(Traits::Consumers);
    }
    for (int i = 0; i < kWorkDepth; ++i) {
      smem.work_full[i].init(1), smem.work_empty[i].init(4 * Traits::Consumers + 1);
    }
    cutlass::arch::fence_barrier_init();
  }
  __syncthreads();
  if (threadIdx.x < kWarpgroup) {
    cutlass::arch::warpgroup_reg_dealloc<Traits::ProducerRegisters>();
    int const warp = cutlass::canonical_warp_idx_sync();
    if (warp == 0 && elect_one_sync()) load_tiles<Traits>(p, smem);
    if (warp == 1) fetch_work<Traits>(p, smem);
  } else {
    cutlass::arch::warpgroup_reg_alloc<Traits::ConsumerRegisters>();
    attend_tiles<Traits>(p, smem);
  }
}

template <class Traits>
cudaError_t launch_forward(ForwardArgs const& a, cudaStream_t stream) {
  using Element = typename Traits::Element;
  constexpr int D = Traits::D;
  auto tensor = [](Tensor3 const& x) {
    return make_tensor(
        make_gmem_ptr(static_cast<Element const*>(x.data)),
        make_shape(static_cast<int32_t>(x.tokens), Int<D>{}, static_cast<int32_t>(x.heads)),
        make_stride(x.token_stride, _1{}, x.head_stride));
  };
  auto transposed = make_tensor(
      make_gmem_ptr(static_cast<Element const*>(a.v.data)),
      make_shape(Int<D>{}, static_cast<int32_t>(a.v.tokens), static_cast<int32_t>(a.v.heads)),
      make_stride(_1{}, a.v.token_stride, a.v.head_stride));
  int const heads = static_cast<int>(a.q.heads);
  ForwardParams<Traits> const p{
      make_tma_copy(SM90_TMA_LOAD{}, tensor(a.q), take<0, 2>(typename Traits::SmemQ{})),
      make_tma_copy(SM90_TMA_LOAD{}, tensor(a.k), take<0, 2>(typename Traits::SmemK{})),
      make_tma_copy(SM90_TMA_LOAD{}, transposed, take<0, 2>(typename Traits::SmemV{})),
      a,
      heads,
      heads / static_cast<int>(a.k.heads),
      static_cast<int32_t>(a.q.tokens),
      static_cast<int32_t>(a.k.tokens),
      a.num_tiles * heads};
  constexpr int kSmem = sizeof(typename Traits::SharedStorage);
  auto kernel = forward_kernel<Traits>;
  cudaError_t status =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmem);
  if (status != cudaSuccess) return status;
  int const grid = min(a.num_ctas, p.num_work);
  kernel<<<grid, Traits::Threads, kSmem, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace ringfa3
