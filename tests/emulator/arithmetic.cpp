// Arithmetic, comparisons and moves of registers.
#include "decode.h"
#include "elementwise.h"

namespace emulator {

namespace {

template <class T>
T wrapped(uint64_t value) {
  return static_cast<T>(value);
}

template <class T>
using Wide =
    std::conditional_t<sizeof(T) == 8,
                       std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>,
                       std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>>;

// The result type of .wide, twice as wide as T.
template <class T>
using Twice =
    std::conditional_t<sizeof(T) == 2, std::conditional_t<std::is_signed_v<T>, int32_t, uint32_t>,
                       Wide<T>>;

template <class T>
Step multiply(Instruction const& i) {
  if constexpr (std::is_floating_point_v<T>) {
    return binary<T>(i, [](T a, T b) { return a * b; });
  } else if (i.has("wide")) {
    if constexpr (sizeof(T) < 8) {
      return binary<T>(i, [](T a, T b) { return static_cast<Twice<T>>(Twice<T>(a) * b); });
    }
  } else if (i.has("hi")) {
    return binary<T>(i, [](T a, T b) {
      return static_cast<T>((static_cast<Wide<T>>(a) * b) >> (sizeof(T) * 8));
    });
  }
  return binary<T>(
      i, [](T a, T b) { return wrapped<T>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b)); });
}

// mul of pairs of 16-bit numbers. The product of two is exact in float32, but for its range.
template <class Number, Number Round(float)>
Step multiply_pairs(Instruction const& i) {
  return binary<uint32_t>(i, [](uint32_t a, uint32_t b) {
    auto product = [&](int shift) -> uint32_t {
      Number const x{static_cast<uint16_t>(a >> shift)}, y{static_cast<uint16_t>(b >> shift)};
      return Round(to_float(x) * to_float(y)).bits << shift;
    };
    return product(16) | product(0);
  });
}

template <class T>
Step multiply_add(Instruction const& i) {
  if constexpr (std::is_floating_point_v<T>) {
    if (i.has("sat")) {  // to [0, 1]; NaN becomes 0
      return ternary<T, T>(
          i, [](T a, T b, T c) { return std::fmin(std::fmax(std::fma(a, b, c), T{0}), T{1}); });
    }
    return ternary<T, T>(i, [](T a, T b, T c) { return std::fma(a, b, c); });
  } else {
    if (i.has("wide")) {
      if constexpr (sizeof(T) < 8) {
        using W = Twice<T>;
        return ternary<T, W>(i, [](T a, T b, W c) { return static_cast<W>(W(a) * b + c); });
      }
    }
    if (i.has("hi")) {
      return ternary<T, T>(i, [](T a, T b, T c) {
        return static_cast<T>(static_cast<T>((static_cast<Wide<T>>(a) * b) >> (sizeof(T) * 8)) + c);
      });
    }
    return ternary<T, T>(i, [](T a, T b, T c) {
      return wrapped<T>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b) +
                        static_cast<uint64_t>(c));
    });
  }
}

template <class T>
Step divide(Instruction const& i, bool remainder) {
  if constexpr (std::is_floating_point_v<T>) {
    return binary<T>(i, [](T a, T b) { return a / b; });
  } else {
    return binary<T>(i, [remainder](T a, T b) {
      if (b == 0) throw std::runtime_error("division by zero");
      return static_cast<T>(remainder ? a % b : a / b);
    });
  }
}

template <class T>
Step min_max(Instruction const& i, bool larger) {
  if constexpr (std::is_floating_point_v<T>) {
    bool const three = i.operands.size() == 4;
    bool const keeps_nan = i.has("NaN");
    auto pick = [=](T a, T b) {
      if (keeps_nan && (std::isnan(a) || std::isnan(b))) return static_cast<T>(NAN);
      return larger ? std::fmax(a, b) : std::fmin(a, b);
    };
    if (three) return ternary<T, T>(i, [=](T a, T b, T c) { return pick(pick(a, b), c); });
    return binary<T>(i, pick);
  } else {
    return binary<T>(i, [=](T a, T b) { return larger ? std::max(a, b) : std::min(a, b); });
  }
}

template <class T>
bool compare(std::string const& how, T a, T b) {
  if constexpr (std::is_floating_point_v<T>) {
    bool const nan = std::isnan(a) || std::isnan(b);
    if (how == "num") return !nan;
    if (how == "nan") return nan;
    if (how.size() == 3) return nan || compare(how.substr(0, 2), a, b);  // equ, neu, ...
    if (nan) return false;
  }
  if (how == "eq") return a == b;
  if (how == "ne") return a != b;
  if (how == "lt" || how == "lo") return a < b;
  if (how == "le" || how == "ls") return a <= b;
  if (how == "gt" || how == "hi") return a > b;
  if (how == "ge" || how == "hs") return a >= b;
  throw std::runtime_error("PTX: unknown comparison " + how);
}

// setp.cmp[.bool].type p[|q], a, b[, c]
template <class T>
Step set_predicate(Instruction const& i) {
  std::string const how = i.words[1], with = i.words[2];
  bool const combined = with == "and" || with == "or" || with == "xor";
  bool const second = i.operands.size() == (combined ? 5u : 4u);
  int const p = i.slot(0), q = second ? i.operands[1].slot : -1;
  int const a = i.slot(second ? 2 : 1), b = i.slot(second ? 3 : 2);
  int const c = combined ? i.slot(i.operands.size() - 1) : -1;
  return [=](Warp& w, Lanes lanes) {
    uint64_t *const A = w.reg(a), *const B = w.reg(b);
    for_each_lane(lanes, [&](int l) {
      bool const found = compare(how, get<T>(A[l]), get<T>(B[l]));
      bool const other = c >= 0 && (w.reg(c)[l] & 1);
      auto join = [&](bool x) {
        return with == "and"   ? x && other
               : with == "or"  ? x || other
               : with == "xor" ? x != other
                               : x;
      };
      if (q >= 0) w.reg(q)[l] = join(!found);
      w.reg(p)[l] = join(found);
    });
    return Next::Advance;
  };
}

// mov, including packing registers into a wider one and unpacking it.
Step move(Instruction const& i) {
  if (i.operands[0].kind == Operand::Vector) {
    auto const parts = i.operands[0].parts;
    int const from = i.slot(1);
    int const width = 8 * bytes_of_type(i.words.back()) / static_cast<int>(parts.size());
    return [=](Warp& w, Lanes lanes) {
      uint64_t const mask = (1ull << width) - 1;
      for_each_lane(lanes, [&](int l) {
        uint64_t const whole = w.reg(from)[l];
        for (size_t n = 0; n < parts.size(); ++n) {
          if (parts[n] >= 0) w.reg(parts[n])[l] = whole >> (width * n) & mask;
        }
      });
      return Next::Advance;
    };
  }
  int const d = i.slot(0);
  if (i.operands[1].kind == Operand::Vector) {
    auto const parts = i.operands[1].parts;
    int const width = 8 * bytes_of_type(i.words.back()) / static_cast<int>(parts.size());
    return [=](Warp& w, Lanes lanes) {
      uint64_t const mask = (1ull << width) - 1;
      for_each_lane(lanes, [&](int l) {
        uint64_t whole = 0;
        for (size_t n = 0; n < parts.size(); ++n) {
          whole |= (w.reg(parts[n])[l] & mask) << (width * n);
        }
        w.reg(d)[l] = whole;
      });
      return Next::Advance;
    };
  }
  int const a = i.slot(1);
  return [=](Warp& w, Lanes lanes) {
    uint64_t *const D = w.reg(d), *const A = w.reg(a);
    for_each_lane(lanes, [&](int l) { D[l] = A[l]; });
    return Next::Advance;
  };
}

Step select(Instruction const& i) {
  int const d = i.slot(0), a = i.slot(1), b = i.slot(2), p = i.slot(3);
  return [=](Warp& w, Lanes lanes) {
    uint64_t *const D = w.reg(d), *const A = w.reg(a), *const B = w.reg(b), *const P = w.reg(p);
    for_each_lane(lanes, [&](int l) { D[l] = P[l] & 1 ? A[l] : B[l]; });
    return Next::Advance;
  };
}

// ex2, lg2, rcp, ... as exact functions. The hardware's errors are far below the tests' tolerances.
Step approximate(Instruction const& i) {
  std::string const& op = i.words[0];
  auto flushed = [](float x) { return std::fpclassify(x) == FP_SUBNORMAL ? 0.f : x; };
  if (op == "ex2") return unary<float>(i, [=](float x) { return flushed(std::exp2(x)); });
  if (op == "lg2") return unary<float>(i, [=](float x) { return std::log2(flushed(x)); });
  if (op == "rcp") return unary<float>(i, [](float x) { return 1.f / x; });
  if (op == "sqrt") return unary<float>(i, [](float x) { return std::sqrt(x); });
  if (op == "rsqrt") return unary<float>(i, [](float x) { return 1.f / std::sqrt(x); });
  return unary<float>(i, [](float x) { return std::tanh(x); });
}

}  // namespace

Step decode_arithmetic(Instruction const& i) {
  std::string const &op = i.words[0], &type = i.words.back();
  if (op == "mov") return move(i);
  if (op == "selp") return select(i);
  if (op == "ex2" || op == "lg2" || op == "rcp" || op == "sqrt" || op == "rsqrt" || op == "tanh") {
    if (type != "f32") throw std::runtime_error("PTX: only for f32: " + i.text);
    return approximate(i);
  }
  bool const known = op == "add" || op == "sub" || op == "mul" || op == "mad" || op == "fma" ||
                     op == "div" || op == "rem" || op == "min" || op == "max" || op == "neg" ||
                     op == "abs" || op == "setp";
  if (!known) return {};
  if (i.has("sat") && op != "fma") throw std::runtime_error("PTX: " + i.text);
  if (op == "mul" && type == "f16x2") return multiply_pairs<Half, to_half>(i);
  if (op == "mul" && type == "bf16x2") return multiply_pairs<Bfloat, to_bfloat>(i);
  return with_type(type, [&](auto t) -> Step {
    using T = decltype(t);
    if constexpr (std::is_same_v<T, bool>) {
      throw std::runtime_error("PTX: not for predicates: " + i.text);
    } else {
      if (op == "add") return binary<T>(i, [](T a, T b) { return static_cast<T>(a + b); });
      if (op == "sub") return binary<T>(i, [](T a, T b) { return static_cast<T>(a - b); });
      if (op == "mul") return multiply<T>(i);
      if (op == "mad" || op == "fma") return multiply_add<T>(i);
      if (op == "div" || op == "rem") return divide<T>(i, op == "rem");
      if (op == "min" || op == "max") return min_max<T>(i, op == "max");
      if (op == "neg") return unary<T>(i, [](T a) { return static_cast<T>(-a); });
      if (op == "setp") return set_predicate<T>(i);
      return unary<T>(i, [](T a) { return static_cast<T>(a < T{0} ? -a : a); });
    }
  });
}

}  // namespace emulator
