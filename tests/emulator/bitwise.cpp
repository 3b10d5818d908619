// Logic, shifts and bit fields.
#include <algorithm>
#include <bit>

#include "decode.h"
#include "elementwise.h"

namespace emulator {

namespace {

template <class T>
T shifted_left(T a, uint32_t n) {
  return n >= sizeof(T) * 8 ? T{0} : static_cast<T>(static_cast<uint64_t>(a) << n);
}

template <class T>
T shifted_right(T a, uint32_t n) {
  uint32_t const width = sizeof(T) * 8;
  if (n >= width) return a < T{0} ? static_cast<T>(-1) : T{0};
  return static_cast<T>(a >> n);
}

Step logic(Instruction const& i) {
  std::string const op = i.words[0], type = i.words.back();
  if (type == "pred") {
    if (op == "not") return unary<bool>(i, [](bool a) { return !a; });
    if (op == "and") return binary<bool>(i, [](bool a, bool b) { return a && b; });
    if (op == "or") return binary<bool>(i, [](bool a, bool b) { return a || b; });
    return binary<bool>(i, [](bool a, bool b) { return a != b; });
  }
  return with_integer(type, [&](auto t) -> Step {
    using T = decltype(t);
    if (op == "not") return unary<T>(i, [](T a) { return static_cast<T>(~a); });
    if (op == "and") return binary<T>(i, [](T a, T b) { return static_cast<T>(a & b); });
    if (op == "or") return binary<T>(i, [](T a, T b) { return static_cast<T>(a | b); });
    return binary<T>(i, [](T a, T b) { return static_cast<T>(a ^ b); });
  });
}

// lop3: the bits of a, b and c at each position select an entry of the table.
Step lop3(Instruction const& i) {
  int const d = i.slot(0), a = i.slot(1), b = i.slot(2), c = i.slot(3), table = i.slot(4);
  return [=](Warp& w, Lanes lanes) {
    for_each_lane(lanes, [&](int l) {
      auto at = [&](int slot) { return static_cast<uint32_t>(w.reg(slot)[l]); };
      uint32_t const A = at(a), B = at(b), C = at(c), entries = at(table);
      uint32_t result = 0;
      for (int n = 0; n < 8; ++n) {
        if (entries >> n & 1) {
          result |= (n & 4 ? A : ~A) & (n & 2 ? B : ~B) & (n & 1 ? C : ~C);
        }
      }
      w.reg(d)[l] = result;
    });
    return Next::Advance;
  };
}

Step bit_fields(Instruction const& i) {
  std::string const& op = i.words[0];
  if (op == "bfi") {  // d, inserted, base, position, length
    int const d = i.slot(0), a = i.slot(1), b = i.slot(2), c = i.slot(3), n = i.slot(4);
    return [=](Warp& w, Lanes lanes) {
      for_each_lane(lanes, [&](int l) {
        uint64_t const at = w.reg(c)[l] & 255, length = w.reg(n)[l] & 255;
        uint64_t const ones = length >= 64 ? ~0ull : (1ull << length) - 1;
        uint64_t const mask = at >= 64 ? 0 : ones << at;
        w.reg(d)[l] = (w.reg(b)[l] & ~mask) | (w.reg(a)[l] << at & mask);
      });
      return Next::Advance;
    };
  }
  return with_integer(i.words.back(), [&](auto t) -> Step {  // bfe: d, a, position, length
    using T = decltype(t);
    return ternary<T, uint32_t>(i, [](T a, T position, uint32_t length) {
      constexpr uint32_t kLast = sizeof(T) * 8 - 1;
      uint32_t const at = static_cast<uint32_t>(position) & 255, n = length & 255;
      bool const sign = std::is_signed_v<T> && n && (a >> std::min(at + n - 1, kLast) & 1);
      uint64_t out = 0;
      for (uint64_t k = 0; k <= kLast; ++k) {
        bool const bit = k < n && at + k <= kLast ? a >> (at + k) & 1 : sign;
        out |= uint64_t{bit} << k;
      }
      return static_cast<T>(out);
    });
  });
}

// prmt.b32: selects four of the eight bytes of (b, a).
Step prmt(Instruction const& i) {
  if (i.words.size() != 2) throw std::runtime_error("PTX: prmt has no mode here: " + i.text);
  return ternary<uint32_t, uint32_t>(i, [](uint32_t a, uint32_t b, uint32_t selector) {
    uint64_t const all = static_cast<uint64_t>(b) << 32 | a;
    uint32_t out = 0;
    for (int n = 0; n < 4; ++n) {
      uint32_t const pick = selector >> (4 * n) & 15;
      uint32_t byte = all >> (8 * (pick & 7)) & 255;
      if (pick & 8) byte = byte & 128 ? 255 : 0;
      out |= byte << (8 * n);
    }
    return out;
  });
}

// shf.{l,r}.{wrap,clamp}.b32: shifts (b, a) and returns its upper or lower 32 bits.
Step funnel_shift(Instruction const& i) {
  bool const left = i.has("l"), clamp = i.has("clamp");
  return ternary<uint32_t, uint32_t>(i, [=](uint32_t a, uint32_t b, uint32_t n) {
    n = clamp ? std::min(n, 32u) : n & 31;
    uint64_t const all = static_cast<uint64_t>(b) << 32 | a;
    return static_cast<uint32_t>(left ? all << n >> 32 : all >> n);
  });
}

// popc, clz and brev.
Step count_bits(Instruction const& i) {
  std::string const& op = i.words[0];
  return with_integer(i.words.back(), [&](auto t) -> Step {
    using T = std::make_unsigned_t<decltype(t)>;
    if (op == "popc") return unary<T>(i, [](T a) { return std::popcount(a); });
    if (op == "clz") return unary<T>(i, [](T a) { return std::countl_zero(a); });
    return unary<T>(i, [](T a) {  // brev
      T out = 0;
      for (size_t n = 0; n < sizeof(T) * 8; ++n) out |= (a >> n & 1) << (sizeof(T) * 8 - 1 - n);
      return out;
    });
  });
}

Step shift(Instruction const& i) {
  bool const left = i.words[0] == "shl";
  return with_integer(i.words.back(), [&](auto t) -> Step {
    using T = decltype(t);
    int const d = i.slot(0), a = i.slot(1), n = i.slot(2);
    return [=](Warp& w, Lanes lanes) {
      for_each_lane(lanes, [&](int l) {
        T const x = get<T>(w.reg(a)[l]);
        auto const by = static_cast<uint32_t>(w.reg(n)[l]);
        w.reg(d)[l] = bits(left ? shifted_left(x, by) : shifted_right(x, by));
      });
      return Next::Advance;
    };
  });
}

}  // namespace

Step decode_bitwise(Instruction const& i) {
  std::string const& op = i.words[0];
  if (op == "and" || op == "or" || op == "xor" || op == "not") return logic(i);
  if (op == "shl" || op == "shr") return shift(i);
  if (op == "lop3") return lop3(i);
  if (op == "bfi" || op == "bfe") return bit_fields(i);
  if (op == "prmt") return prmt(i);
  if (op == "shf") return funnel_shift(i);
  if (op == "popc" || op == "clz" || op == "brev") return count_bits(i);
  return {};
}

}  // namespace emulator
