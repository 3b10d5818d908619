// wgmma, whose 64 rows are split into 16 for each warp of a warpgroup; stmatrix and ldmatrix.
#include "decode.h"
#include "number_formats.h"
#include "tensor_map.h"

#include <array>

namespace emulator {

namespace {

// A matrix in shared memory, decoded from its 64-bit descriptor. Offsets are in bytes.
struct Matrix {
  uint64_t start, leading, stride;
  int swizzle;  // n: the swizzle permutes 2^n units of 16 bytes
  explicit Matrix(uint64_t d)
      : start((d & 0x3fff) << 4),
        leading((d >> 16 & 0x3fff) << 4),
        stride((d >> 32 & 0x3fff) << 4),
        swizzle(static_cast<int>((4 - (d >> 62)) & 3)) {
    if (d >> 49 & 7) throw std::runtime_error("descriptors with a base offset are not known");
  }

  // Shared offset of element (row, k). An atom is 8 rows (k contiguous) or 8 k's (rows contiguous,
  // elements of 2 bytes) of 16 << swizzle bytes. Canonical layouts: CUTLASS, mma_sm90_desc.hpp.
  uint64_t address(int row, int k, bool rows_contiguous, int bytes) const {
    uint64_t const wide = 8u << swizzle;  // elements of 2 bytes of an atom's line
    uint64_t at = start;
    if (!rows_contiguous) {
      int const column = k * bytes;
      at += row / 8 * stride + row % 8 * wide * 2;
      at += swizzle ? static_cast<uint64_t>(column) : column / 16 * leading + column % 16;
    } else if (swizzle) {
      at += row / wide * leading + row % wide * 2;
      at += k / 8 * stride + k % 8 * wide * 2;
    } else {
      at += row / 8 * stride + row % 8 * 2 + k / 8 * leading + k % 8 * 16;
    }
    return swizzled(at, swizzle);
  }
};

// An element type of A and B: of 2 bytes with a k of 16, or of 1 byte with a k of 32.
struct Format {
  int bytes;
  float (*to_float)(uint16_t);
  int k() const { return 32 / bytes; }
};

Format format_of(std::string const& type) {
  if (type == "bf16") return {2, [](uint16_t x) { return to_float(Bfloat{x}); }};
  if (type == "f16") return {2, [](uint16_t x) { return to_float(Half{x}); }};
  if (type == "e4m3") {
    static auto const values = [] {
      std::array<float, 256> all;
      for (int x = 0; x < 256; ++x) all[x] = from_e4m3(static_cast<uint8_t>(x));
      return all;
    }();
    return {1, [](uint16_t x) { return values[x & 0xff]; }};
  }
  if (type == "s8")
    return {1, [](uint16_t x) { return static_cast<float>(static_cast<int8_t>(x)); }};
  throw std::runtime_error("PTX: products of " + type + " are not known");
}

void load_matrix(Cta& cta, Matrix const& m, int first_row, int rows, bool rows_contiguous,
                 Format const& format,
                 float* out) {  // out (k, rows)
  for (int k = 0; k < format.k(); ++k) {
    for (int r = 0; r < rows; ++r) {
      uint64_t const at = m.address(first_row + r, k, rows_contiguous, format.bytes);
      cta.check_fenced(at, format.bytes, "a matrix product");
      uint16_t x = 0;
      std::memcpy(&x, cta.shared(at, format.bytes), format.bytes);
      out[k * rows + r] = format.to_float(x);
    }
  }
}

// wgmma.mma_async.sync.aligned.m64nNk16.f32.T.T d, a, b, scale_d, scale_a, scale_b[, tA], tB,
// the same with k32 and e4m3, where rows are not contiguous, and m64nNk32.s32.s8.s8 d, a, b,
// scale_d. Sums of s8 are exact in float32 up to 2^24: a block of 32 k's and then as integers.
Step multiply(Instruction& i) {
  i.converged = true;
  std::string const& shape = i.words[4];
  int const n = std::stoi(shape.substr(shape.find('n') + 1));
  Format const format = format_of(i.words[6]);
  bool const integers = i.words[6] == "s8";
  bool const known =
      shape.starts_with("m64n") && shape.ends_with("k" + std::to_string(format.k())) &&
      i.words[5] == (integers ? "s32" : "f32") && i.words[7] == i.words[6] && i.words.size() == 8;
  if (!known) throw std::runtime_error("PTX: this product is not known: " + i.text);
  auto const d = i.operands[0].parts;
  bool const a_in_registers = i.operands[1].kind == Operand::Vector;
  auto const a = a_in_registers ? i.operands[1].parts : std::vector<int>{i.slot(1)};
  int const b = i.slot(2), scale_d = i.slot(3);
  int const scale_a = integers ? -1 : i.slot(4), scale_b = integers ? -1 : i.slot(5);
  bool const transposes = format.bytes == 2;
  int const transpose_a = a_in_registers || !transposes ? -1 : i.slot(6);
  int const transpose_b = transposes ? i.slot(a_in_registers ? 6 : 7) : -1;
  std::vector<int> slots = d;
  if (a_in_registers) slots.insert(slots.end(), a.begin(), a.end());
  return [=](Warp& w, Lanes) {
    Matrix const matrix_b(w.reg(b)[0]);
    bool const adds = w.reg(scale_d)[0] & 1;
    float const sign = integers ? 1.f
                                : static_cast<int32_t>(w.reg(scale_a)[0]) *
                                      static_cast<int32_t>(w.reg(scale_b)[0]);
    bool const b_transposed = transpose_b >= 0 && (w.reg(transpose_b)[0] & 1);
    uint64_t const a_word = a_in_registers ? 0 : w.reg(a[0])[0];
    bool const a_transposed = transpose_a >= 0 && (w.reg(transpose_a)[0] & 1);
    w.issue(
        {w.pc,
         [=, &w] {
           int const ks = format.k();
           std::vector<float> left(ks * 16), right(ks * n), sum(16 * n, 0.f);  // A (k, row)
           if (a_in_registers) {
             int const each = 4 / format.bytes;  // elements of a register
             for (int l = 0; l < kWarp; ++l) {
               for (int e = 0; e < 4 * each; ++e) {
                 int const word = e / each, row = l / 4 + word % 2 * 8;
                 int const k = l % 4 * each + e % each + word / 2 * 4 * each;
                 auto const x =
                     static_cast<uint32_t>(w.reg(a[word])[l]) >> (8 * format.bytes * (e % each));
                 left[k * 16 + row] = format.to_float(static_cast<uint16_t>(x));
               }
             }
           } else {
             load_matrix(w.cta, Matrix(a_word), w.index % 4 * 16, 16, a_transposed, format,
                         left.data());
           }
           load_matrix(w.cta, matrix_b, 0, n, b_transposed, format, right.data());
           for (int k = 0; k < ks; ++k) {
             for (int r = 0; r < 16; ++r) {
               float const x = left[k * 16 + r];
               for (int c = 0; c < n; ++c) sum[r * n + c] += x * right[k * n + c];
             }
           }
           for (int l = 0; l < kWarp; ++l) {
             for (size_t e = 0; e < d.size(); ++e) {
               size_t const row = l / 4 + e / 2 % 2 * 8, c = e / 4 * 8 + l % 4 * 2 + e % 2;
               uint64_t& to = w.reg(d[e])[l];
               if (integers) {
                 to = bits((adds ? get<int32_t>(to) : 0) + static_cast<int32_t>(sum[row * n + c]));
               } else {
                 to = bits((adds ? get<float>(to) : 0.f) + sign * sum[row * n + c]);
               }
             }
           }
         },
         slots});
    return Next::Advance;
  };
}

// stmatrix and ldmatrix .sync.aligned.m8n8.x{1,2,4}[.trans].shared.b16: lane 8m + r has the
// address of row r of matrix m; lane l holds elements 2 (l % 4), + 1 of row l / 4.
Step matrix_move(Instruction& i, bool stores) {
  i.converged = true;
  int const count = i.has("x4") ? 4 : i.has("x2") ? 2 : 1;
  bool const transposed = i.has("trans");
  Operand const at = i.operands[stores ? 0 : 1], held = i.operands[stores ? 1 : 0];
  std::vector<int> const parts =
      held.kind == Operand::Vector ? held.parts : std::vector<int>{held.slot};
  return [=](Warp& w, Lanes) {
    for (int m = 0; m < count; ++m) {
      for (int l = 0; l < kWarp; ++l) {
        uint32_t word = 0;
        for (int e = 0; e < 2; ++e) {
          int row = l / 4, column = l % 4 * 2 + e;
          if (transposed) std::swap(row, column);
          auto const base = static_cast<uint32_t>(w.reg(at.slot)[8 * m + row] + at.offset);
          if (base % 16) throw std::runtime_error("rows of a matrix lie on 16 bytes");
          uint32_t const place = base + column * 2;
          uint16_t x = 0;
          if (stores) {
            x = static_cast<uint16_t>(w.reg(parts[m])[l] >> (16 * e));
            w.cta.write(w, place, &x, 2);
          } else {
            std::memcpy(&x, w.cta.shared(place, 2), 2);
          }
          word |= static_cast<uint32_t>(x) << (16 * e);
        }
        if (!stores) w.reg(parts[m])[l] = word;
      }
    }
    return Next::Advance;
  };
}

}  // namespace

Step decode_wgmma(Instruction& i) {
  if (i.words[0] == "stmatrix") return matrix_move(i, true);
  if (i.words[0] == "ldmatrix") return matrix_move(i, false);
  if (i.words[0] != "wgmma") return {};
  if (i.words[1] == "mma_async") return multiply(i);
  i.converged = true;
  if (i.words[1] == "commit_group") {
    return [](Warp& w, Lanes) {
      w.commit();
      return Next::Advance;
    };
  }
  if (i.words[1] == "wait_group") {
    int const left = i.slot(0);
    return [=](Warp& w, Lanes) {
      return w.complete_wgmmas(static_cast<int>(w.reg(left)[0])) ? Next::Advance : Next::Retry;
    };
  }
  return [](Warp&, Lanes) { return Next::Advance; };  // wgmma.fence
}

}  // namespace emulator
