// Rows of Q or K in a warp's shared memory: TMA loads them, and they leave it as bytes, or in
// bfloat16.
//
// A box holds `S::Rows` rows of one head: a slab of lines of 128 bytes for each 64 channels, so
// that a line is what one lane transforms. The 16-byte unit n of a line lies at n ^ row % 8, where
// TMA puts it. A warp has two boxes, one of which is loaded while it computes with the other.
#pragma once

#include <cute/tensor.hpp>

#include "hopper/pipeline.cuh"
#include "hopper/tma.cuh"
#include "quantise/rotation.cuh"

namespace ringfa3 {

using namespace cute;

constexpr int kRowStages = 2, kLine = 128;

// In shared memory, of all warps of a CTA.
template <class S, int Warps>
struct RowStorage {
  static constexpr int kBoxBytes = kWarp * kLine;
  static_assert(kBoxBytes == S::Rows * S::D * sizeof(typename S::Element));
  alignas(1024) uint8_t box[Warps][kRowStages][kBoxBytes];
  alignas(16) cutlass::arch::ClusterTransactionBarrier full[Warps][kRowStages];
};

// 16 bytes of shared memory. Two loads of one address stay two.
CUTE_DEVICE uint4 load_unit(uint32_t address) {
  uint4 x;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(address)
               : "memory");
  return x;
}
CUTE_DEVICE void store_unit(uint32_t address, uint4 x) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x.x), "r"(x.y),
               "r"(x.z), "r"(x.w)
               : "memory");
}

// Which box of Q, or tile of K, and which head: pairs in the order of heads, then of rows. Pairs of
// a warp, or a CTA, lie `step` apart.
struct RowStep {
  uint32_t rows, heads;  // of a step
};
struct RowCursor {
  uint32_t rows, head;  // the number of a box or tile

  CUTE_DEVICE RowCursor(uint32_t number, uint32_t heads)
      : rows(number / heads), head(number % heads) {}
  CUTE_DEVICE void advance(RowStep const& step, uint32_t heads) {
    rows += step.rows, head += step.heads;
    if (head >= heads) head -= heads, ++rows;
  }
};

// The boxes of a warp, as one of its lanes accesses them.
template <class S>
class RowStages {
  using Full = cutlass::arch::ClusterTransactionBarrier;
  static constexpr int kBoxBytes = kWarp * kLine;
  static constexpr int kUnits = S::D / 16;            // of a row of bytes
  static constexpr int kStoredRows = kWarp / kUnits;  // that a warp stores at once
  uint8_t* const boxes_;
  Full* const full_;
  int const lane_;
  // Addresses in the first box: unit 0 of the lane's line, of its bytes, and of those that it
  // stores.
  uint32_t const line_, bytes_, leaves_;
  PipelineState<kRowStages> next_, now_;

  // Units of bytes lie so that neither 8 lanes that write one nor 8 that store rows of them meet in
  // a bank.
  static CUTE_DEVICE uint32_t bytes_key(int row, int part) {
    return S::Lanes == 1 ? (row & 1) << 2 | (row >> 1 & 3) : (row ^ part << 2) & 7;
  }
  CUTE_DEVICE uint32_t unit(int row, int part, uint32_t number) const {
    return cast_smem_ptr_to_uint(boxes_) + (part * S::Rows + row) * kLine + (number << 4);
  }
  CUTE_DEVICE uint32_t box() const { return now_.index() * kBoxBytes; }

 public:
  // All lanes of warp `warp` of the CTA, a uniform number.
  template <int Warps>
  CUTE_DEVICE RowStages(RowStorage<S, Warps>& storage, int warp, int lane)
      : boxes_(storage.box[warp][0]),
        full_(storage.full[warp]),
        lane_(lane),
        line_(unit(S::row(lane), S::part(lane), S::row(lane) % 8)),
        bytes_(unit(S::row(lane), S::part(lane), bytes_key(S::row(lane), S::part(lane)))),
        leaves_(unit(lane / kUnits, lane % kUnits / 4,
                     lane % 4 ^ bytes_key(lane / kUnits, lane % kUnits / 4))) {
    if (elect_one_sync()) {
      for (int i = 0; i < kRowStages; ++i) full_[i].init(1);
      cutlass::arch::fence_barrier_init();
    }
    __syncwarp();
  }

  // Starts to load rows [row, row + S::Rows) of a head to the box that was stored last.
  CUTE_DEVICE void load(CUtensorMap const& map, int row, int head) {
    cutlass::arch::fence_view_async_shared();  // the lane's stores to the box
    __syncwarp();
    if (elect_one_sync()) {
      auto* const to = reinterpret_cast<typename S::Element*>(boxes_ + next_.index() * kBoxBytes);
      load_box<S::Rows, S::D>(map, full_[next_.index()], to, row, head);
    }
    __syncwarp();
    next_.advance();
  }

  CUTE_DEVICE void wait() { full_[now_.index()].wait(now_.phase()); }

  // Vector j of 8 channels of the lane's.
  CUTE_DEVICE uint4 vector(int j) const { return load_unit((line_ ^ j << 4) + box()); }

  // The transform of the lane's row, which is `rotate`'s but for the factor kNorm, and its largest
  // magnitude, NaN for a row that is not finite.
  //
  // An infinity, a NaN or a number above `kLargestInput` makes the largest sum NaN or exceed
  // `kLargestPlain`. So does a centre that could hide such a number: it is NaN in the first row of
  // `centres`, see `plain_centre`, and saturated in the second row, D numbers further. Then the
  // lanes saturate their numbers in the box and transform them again (`careful`). Most warps need
  // no such care. Arguments are those of `transform`, which calls `visit` in both transforms.
  template <class Format, class Centre, class Visit>
  CUTE_DEVICE float rotate_row(float (&y)[S::Numbers], Centre centres,
                               PartSigns<S> const& part_signs, Visit const& visit) {
    bool careful = false, finite = true;
    float amax;
#pragma unroll 1
    while (true) {
      transform<S>(y, [&](int j) { return vector(j); }, centres, part_signs, lane_, visit);
      amax = row_amax<S>(y);
      if (careful || !__any_sync(0xffffffff, !(amax < kLargestPlain))) break;
      careful = true;
      if constexpr (!is_same_v<Centre, NoCentre>) centres += S::D;
#pragma unroll 1
      for (int j = 0; j < S::Vectors; ++j) {
        uint4 x = vector(j);
        for (uint32_t* word : {&x.x, &x.y, &x.z, &x.w}) {
          finite &= saturate<typename S::Element>(*word);
        }
        store_unit((line_ ^ j << 4) + box(), x);
      }
      CUTE_UNROLL
      for (int i = S::Rows; i < kWarp; i *= 2) {
        finite &= bool(__shfl_xor_sync(0xffffffff, int(finite), i));
      }
    }
    if (!careful) return amax;
    CUTE_UNROLL
    for (int i = 0; i < S::Numbers; ++i) y[i] = finite ? y[i] : Format::kLost;
    return finite ? amax : NAN;
  }

  // Stores the lane's numbers as bytes, of which `pack` makes four at a time, to `to`, where rows
  // lie `stride` bytes apart: of rows [0, rows).
  template <class Pack>
  CUTE_DEVICE void store(float const (&y)[S::Numbers], Pack const& pack, uint8_t* to,
                         int64_t stride, int rows) {
    __syncwarp();  // all lanes have read the box
    CUTE_UNROLL
    for (int n = 0; n < 4; ++n) {
      float const* const x = y + 16 * n;
      store_unit((bytes_ ^ n << 4) + box(),
                 make_uint4(pack(x), pack(x + 4), pack(x + 8), pack(x + 12)));
    }
    __syncwarp();
    int const own = lane_ / kUnits;
    to += own * stride + lane_ % kUnits * 16;
    CUTE_UNROLL
    for (int row = 0; row < S::Rows; row += kStoredRows, to += kStoredRows * stride) {
      uint32_t const moved = S::Lanes == 1 ? 0 : row % 8 << 4;
      uint4 const x = load_unit((leaves_ ^ moved) + row * kLine + box());
      if (row + own < rows) *reinterpret_cast<uint4*>(to) = x;
    }
    now_.advance();
  }

  // As `store`, in bfloat16: `convert` makes four numbers. `stride` is in elements. Each row ends
  // with `TailColumns` more, the eight numbers of `tail` repeated.
  template <int TailColumns = 0, class Convert>
  CUTE_DEVICE void store_bfloats(float const (&y)[S::Numbers], Convert const& convert,
                                 cutlass::bfloat16_t* to, int64_t stride, int rows,
                                 uint4 tail = {}) {
    constexpr uint32_t kVectors = S::D / 8, kVectorsOfRow = kVectors + TailColumns / 8;
    __syncwarp();  // all lanes have read the box
    CUTE_UNROLL
    for (int j = 0; j < S::Vectors; ++j) {
      uint2 const low = convert(y + 8 * j), high = convert(y + 8 * j + 4);
      store_unit((line_ ^ j << 4) + box(), make_uint4(low.x, low.y, high.x, high.y));
    }
    __syncwarp();
    rows = min(rows, S::Rows);
    CUTE_UNROLL
    for (uint32_t n = 0; n < S::Rows * kVectorsOfRow; n += kWarp) {
      uint32_t const row = (n + lane_) / kVectorsOfRow, number = (n + lane_) % kVectorsOfRow;
      if (static_cast<int>(row) >= rows) break;
      uint4 x = tail;
      if (TailColumns == 0 || number < kVectors) {
        x = load_unit(unit(row, number / 8, row % 8 ^ number % 8) + box());
      }
      *reinterpret_cast<uint4*>(to + row * stride + 8 * number) = x;
    }
    now_.advance();
  }
};

}  // namespace ringfa3
