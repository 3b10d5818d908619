// Arithmetic, logic and comparisons, lane by lane.
#include <bit>

#include "families.h"
#include "numbers.h"

namespace emulator {

namespace {

template <class T, class F>
Step unary(Instruction const& i, F f) {
  int const d = i.slot(0), a = i.slot(1);
  return [=](Warp& w, Lanes lanes) {
    uint64_t *const D = w.reg(d), *const A = w.reg(a);
    each(lanes, [&](int l) { D[l] = bits(f(get<T>(A[l]))); });
    return Next::Go;
  };
}

template <class T, class F>
Step binary(Instruction const& i, F f) {
  int const d = i.slot(0), a = i.slot(1), b = i.slot(2);
  return [=](Warp& w, Lanes lanes) {
    uint64_t *const D = w.reg(d), *const A = w.reg(a), *const B = w.reg(b);
    each(lanes, [&](int l) { D[l] = bits(f(get<T>(A[l]), get<T>(B[l]))); });
    return Next::Go;
  };
}

template <class T, class C, class F>
Step ternary(Instruction const& i, F f) {
  int const d = i.slot(0), a = i.slot(1), b = i.slot(2), c = i.slot(3);
  return [=](Warp& w, Lanes lanes) {
    uint64_t *const D = w.reg(d), *const A = w.reg(a), *const B = w.reg(b), *const C_ = w.reg(c);
    each(lanes, [&](int l) { D[l] = bits(f(get<T>(A[l]), get<T>(B[l]), get<C>(C_[l]))); });
    return Next::Go;
  };
}

template <class T>
T wrapped(uint64_t value) {
  return static_cast<T>(value);
}

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

template <class T>
using Wide =
    std::conditional_t<sizeof(T) == 8,
                       std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>,
                       std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>>;

// Twice as wide as T, as .wide has it.
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

template <class T>
Step multiply_add(Instruction const& i) {
  if constexpr (std::is_floating_point_v<T>) {
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
Step extreme(Instruction const& i, bool larger) {
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
    each(lanes, [&](int l) {
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
    return Next::Go;
  };
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

Step look_up_table(Instruction const& i) {  // lop3: each bit of a, b, c picks one of the table
  int const d = i.slot(0), a = i.slot(1), b = i.slot(2), c = i.slot(3), table = i.slot(4);
  return [=](Warp& w, Lanes lanes) {
    each(lanes, [&](int l) {
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
    return Next::Go;
  };
}

Step bit_fields(Instruction const& i) {
  std::string const& op = i.words[0];
  if (op == "bfi") {  // d, inserted, base, position, length
    int const d = i.slot(0), a = i.slot(1), b = i.slot(2), c = i.slot(3), n = i.slot(4);
    return [=](Warp& w, Lanes lanes) {
      each(lanes, [&](int l) {
        uint64_t const at = w.reg(c)[l] & 255, length = w.reg(n)[l] & 255;
        uint64_t const ones = length >= 64 ? ~0ull : (1ull << length) - 1;
        uint64_t const mask = at >= 64 ? 0 : ones << at;
        w.reg(d)[l] = (w.reg(b)[l] & ~mask) | (w.reg(a)[l] << at & mask);
      });
      return Next::Go;
    };
  }
  return with_integer(i.words.back(), [&](auto t) -> Step {  // bfe: d, a, position, length
    using T = decltype(t);
    return ternary<T, uint32_t>(i, [](T a, T position, uint32_t length) {
      uint32_t const at = static_cast<uint32_t>(position) & 255, n = length & 255;
      T out = 0;
      constexpr uint32_t kWidth = sizeof(T) * 8;
      for (uint32_t k = 0; k < kWidth; ++k) {
        uint32_t from = at + std::min(k, n ? n - 1 : 0);
        bool const filled = k >= n;
        if (filled && (!std::is_signed_v<T> || n == 0)) break;
        from = std::min(from, kWidth - 1);
        out |= static_cast<T>(static_cast<T>(a >> from & 1) << k);
      }
      return out;
    });
  });
}

// prmt.b32: four bytes out of the eight of a and b.
Step permute(Instruction const& i) {
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

// shf.{l,r}.{wrap,clamp}.b32: 32 bits out of (b, a).
Step funnel(Instruction const& i) {
  bool const left = i.has("l"), clamp = i.has("clamp");
  return ternary<uint32_t, uint32_t>(i, [=](uint32_t a, uint32_t b, uint32_t n) {
    n = clamp ? std::min(n, 32u) : n & 31;
    uint64_t const all = static_cast<uint64_t>(b) << 32 | a;
    return static_cast<uint32_t>(left ? all << n >> 32 : all >> n);
  });
}

// mov, also between a vector of registers and a wider one.
Step move(Instruction const& i) {
  if (i.operands[0].kind == Operand::Vector) {
    auto const parts = i.operands[0].parts;
    int const from = i.slot(1);
    int const width = 8 * bytes_of_type(i.words.back()) / static_cast<int>(parts.size());
    return [=](Warp& w, Lanes lanes) {
      uint64_t const mask = (1ull << width) - 1;
      each(lanes, [&](int l) {
        uint64_t const whole = w.reg(from)[l];
        for (size_t n = 0; n < parts.size(); ++n) {
          if (parts[n] >= 0) w.reg(parts[n])[l] = whole >> (width * n) & mask;
        }
      });
      return Next::Go;
    };
  }
  int const d = i.slot(0);
  if (i.operands[1].kind == Operand::Vector) {
    auto const parts = i.operands[1].parts;
    int const width = 8 * bytes_of_type(i.words.back()) / static_cast<int>(parts.size());
    return [=](Warp& w, Lanes lanes) {
      uint64_t const mask = (1ull << width) - 1;
      each(lanes, [&](int l) {
        uint64_t whole = 0;
        for (size_t n = 0; n < parts.size(); ++n) {
          whole |= (w.reg(parts[n])[l] & mask) << (width * n);
        }
        w.reg(d)[l] = whole;
      });
      return Next::Go;
    };
  }
  int const a = i.slot(1);
  return [=](Warp& w, Lanes lanes) {
    uint64_t *const D = w.reg(d), *const A = w.reg(a);
    each(lanes, [&](int l) { D[l] = A[l]; });
    return Next::Go;
  };
}

Step select(Instruction const& i) {
  int const d = i.slot(0), a = i.slot(1), b = i.slot(2), p = i.slot(3);
  return [=](Warp& w, Lanes lanes) {
    uint64_t *const D = w.reg(d), *const A = w.reg(a), *const B = w.reg(b), *const P = w.reg(p);
    each(lanes, [&](int l) { D[l] = P[l] & 1 ? A[l] : B[l]; });
    return Next::Go;
  };
}

Step counted(Instruction const& i) {
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

// The approximate functions; their errors are far below what a gate allows.
Step function(Instruction const& i) {
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

Step arithmetic(Instruction const& i) {
  std::string const &op = i.words[0], &type = i.words.back();
  if (op == "mov") return move(i);
  if (op == "and" || op == "or" || op == "xor" || op == "not") return logic(i);
  if (op == "lop3") return look_up_table(i);
  if (op == "bfi" || op == "bfe") return bit_fields(i);
  if (op == "prmt") return permute(i);
  if (op == "shf") return funnel(i);
  if (op == "selp") return select(i);
  if (op == "popc" || op == "clz" || op == "brev") return counted(i);
  if (op == "ex2" || op == "lg2" || op == "rcp" || op == "sqrt" || op == "rsqrt" || op == "tanh") {
    if (type != "f32") throw std::runtime_error("PTX: only for f32: " + i.text);
    return function(i);
  }
  if (op == "shl" || op == "shr") {
    return with_integer(type, [&](auto t) -> Step {
      using T = decltype(t);
      int const d = i.slot(0), a = i.slot(1), n = i.slot(2);
      bool const left = op == "shl";
      return [=](Warp& w, Lanes lanes) {
        each(lanes, [&](int l) {
          T const x = get<T>(w.reg(a)[l]);
          auto const by = static_cast<uint32_t>(w.reg(n)[l]);
          w.reg(d)[l] = bits(left ? shifted_left(x, by) : shifted_right(x, by));
        });
        return Next::Go;
      };
    });
  }
  bool const known = op == "add" || op == "sub" || op == "mul" || op == "mad" || op == "fma" ||
                     op == "div" || op == "rem" || op == "min" || op == "max" || op == "neg" ||
                     op == "abs" || op == "setp";
  if (!known) return {};
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
      if (op == "min" || op == "max") return extreme<T>(i, op == "max");
      if (op == "neg") return unary<T>(i, [](T a) { return static_cast<T>(-a); });
      if (op == "setp") return set_predicate<T>(i);
      return unary<T>(i, [](T a) { return static_cast<T>(a < T{0} ? -a : a); });
    }
  });
}

}  // namespace emulator
