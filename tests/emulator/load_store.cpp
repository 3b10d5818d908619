// Loads, stores, atomic operations, and conversions of values and addresses.
#include "decode.h"
#include "number_formats.h"

namespace emulator {

namespace {

uint64_t window(Instruction const& i) {
  if (i.has("shared") || i.has("shared::cta") || i.has("shared::cluster")) return kSharedWindow;
  if (i.has("local")) return kLocalWindow;
  return 0;  // global, generic, and parameters, whose symbols are generic already
}

int vector_length(Instruction const& i) {
  for (int n : {2, 4, 8}) {
    if (i.has("v" + std::to_string(n))) return n;
  }
  return 1;
}

// Another thread or copy may write it: a loop around such a load waits for somebody.
bool polls(Instruction const& i) {
  return (i.has("acquire") || i.has("relaxed") || i.has("volatile")) && window(i) == 0;
}

Step load(Instruction const& i) {
  int const count = vector_length(i), bytes = bytes_of_type(i.words.back());
  bool const is_signed = i.words.back()[0] == 's', later = polls(i);
  Operand const& from = i.operands[1];
  std::vector<int> const to =
      count > 1 ? i.operands[0].parts : std::vector<int>{i.operands[0].slot};
  return [=, base = window(i), slot = from.slot, offset = from.offset](Warp& w, Lanes lanes) {
    each(lanes, [&](int l) {
      uint64_t const address =
          (base ? base + static_cast<uint32_t>(w.reg(slot)[l]) : w.reg(slot)[l]) + offset;
      char const* const there = w.cta.at(w, l, address, static_cast<size_t>(count) * bytes, false);
      for (int n = 0; n < count; ++n) {
        uint64_t value = 0;
        std::memcpy(&value, there + n * bytes, bytes);
        if (is_signed && bytes < 8 && value >> (8 * bytes - 1) & 1) value |= ~0ull << (8 * bytes);
        if (to[n] >= 0) w.reg(to[n])[l] = value;
      }
    });
    return later ? Next::GoLater : Next::Go;
  };
}

Step store(Instruction const& i) {
  int const count = vector_length(i), bytes = bytes_of_type(i.words.back());
  Operand const& to = i.operands[0];
  std::vector<int> const from =
      count > 1 ? i.operands[1].parts : std::vector<int>{i.operands[1].slot};
  return [=, base = window(i), slot = to.slot, offset = to.offset](Warp& w, Lanes lanes) {
    each(lanes, [&](int l) {
      uint64_t const address =
          (base ? base + static_cast<uint32_t>(w.reg(slot)[l]) : w.reg(slot)[l]) + offset;
      char value[64];
      for (int n = 0; n < count; ++n) std::memcpy(value + n * bytes, &w.reg(from[n])[l], bytes);
      w.cta.store(w, l, address, value, static_cast<size_t>(count) * bytes);
    });
    w.cta.grid.progress();
    return Next::Go;
  };
}

template <class T>
T combined(std::string const& op, T old, T value, T other) {
  if (op == "exch") return value;
  if (op == "add") return static_cast<T>(old + value);
  if (op == "min") return std::min(old, value);
  if (op == "max") return std::max(old, value);
  if (op == "inc") return old >= value ? T{0} : static_cast<T>(old + 1);
  if (op == "cas") return old == value ? other : old;
  if constexpr (std::is_integral_v<T>) {
    if (op == "and") return old & value;
    if (op == "or") return old | value;
    if (op == "xor") return old ^ value;
  }
  throw std::runtime_error("PTX: unknown atomic operation " + op);
}

// atom and red; the operation is the first word that names one.
Step atomic(Instruction const& i) {
  bool const returns = i.words[0] == "atom";
  std::string op;
  for (auto const* name : {"exch", "add", "min", "max", "inc", "cas", "and", "or", "xor"}) {
    if (i.has(name)) op = name;
  }
  size_t const at = returns ? 1 : 0;
  int const count = vector_length(i);
  std::vector<int> const values =
      count > 1 ? i.operands[at + 1].parts : std::vector<int>{i.slot(at + 1)};
  if (returns && count > 1) throw std::runtime_error("PTX: a vector atom: " + i.text);
  int const other = i.operands.size() > at + 2 ? i.slot(at + 2) : values[0];
  int const result = returns ? i.operands[0].slot : -1;
  Operand const& to = i.operands[at];
  return with_type(i.words.back(), [&](auto t) -> Step {
    using T = decltype(t);
    return [=, base = window(i), slot = to.slot, offset = to.offset](Warp& w, Lanes lanes) {
      each(lanes, [&](int l) {
        uint64_t const address =
            (base ? base + static_cast<uint32_t>(w.reg(slot)[l]) : w.reg(slot)[l]) + offset;
        char* const there = w.cta.at(w, l, address, sizeof(T) * values.size(), true);
        for (size_t n = 0; n < values.size(); ++n) {
          T old;
          std::memcpy(&old, there + n * sizeof(T), sizeof(T));
          T const fresh = combined(op, old, get<T>(w.reg(values[n])[l]), get<T>(w.reg(other)[l]));
          std::memcpy(there + n * sizeof(T), &fresh, sizeof(T));
          if (result >= 0) w.reg(result)[l] = bits(old);
        }
      });
      w.cta.grid.progress();
      return op == "cas" ? Next::GoLater : Next::Go;
    };
  });
}

// Between generic addresses and those of a state space.
Step address(Instruction const& i) {
  uint64_t const base = window(i);
  bool const to = i.has("to");
  int const d = i.slot(0), a = i.slot(1);
  return [=](Warp& w, Lanes lanes) {
    each(lanes, [&](int l) {
      uint64_t const x = w.reg(a)[l];
      w.reg(d)[l] = to ? x - base : x + base;
    });
    return Next::Go;
  };
}

template <class To, class From>
To converted(From x, std::string const& rounding, bool saturates) {
  auto const value = value_of(x);
  if constexpr (std::is_same_v<To, Half>) {
    return to_half(static_cast<float>(value));
  } else if constexpr (std::is_same_v<To, Bfloat>) {
    return to_bfloat(static_cast<float>(value));
  } else if constexpr (std::is_floating_point_v<To>) {
    auto result = static_cast<To>(value);
    if (saturates) result = std::fmin(std::fmax(result, To{0}), To{1});
    return result;
  } else if constexpr (std::is_floating_point_v<decltype(value)>) {
    double v = value;
    if (std::isnan(v)) return To{0};
    v = rounding == "rzi"   ? std::trunc(v)
        : rounding == "rmi" ? std::floor(v)
        : rounding == "rpi" ? std::ceil(v)
                            : std::nearbyint(v);
    auto const low = static_cast<double>(std::numeric_limits<To>::min());
    auto const high = static_cast<double>(std::numeric_limits<To>::max());
    return v <= low    ? std::numeric_limits<To>::min()
           : v >= high ? std::numeric_limits<To>::max()
                       : static_cast<To>(v);
  } else {
    return static_cast<To>(value);
  }
}

template <class Function>
Step with_any(std::string const& name, Function const& f) {
  if (name == "f16") return f(Half{});
  if (name == "bf16") return f(Bfloat{});
  return with_type(name, [&](auto t) -> Step { return f(t); });
}

Step convert(Instruction const& i) {
  std::string const &to = i.words[i.words.size() - 2], &from = i.words.back();
  std::string const rounding = i.words[1];
  bool const saturates = i.has("sat"), to_integer = to[0] == 's' || to[0] == 'u';
  bool const rounds_otherwise = rounding[0] == 'r' && rounding != "rn";  // not to nearest, even
  if (to_integer ? saturates : rounds_otherwise) throw std::runtime_error("PTX: " + i.text);
  if (to == "bf16x2" || to == "f16x2") {  // the first source is the upper half
    int const d = i.slot(0), high = i.slot(1), low = i.slot(2);
    bool const brain = to == "bf16x2", relu = i.has("relu");
    return [=](Warp& w, Lanes lanes) {
      uint64_t *const D = w.reg(d), *const H = w.reg(high), *const L = w.reg(low);
      auto half = [&](uint64_t x) -> uint32_t {
        float const value = relu ? std::fmax(get<float>(x), 0.f) : get<float>(x);
        return brain ? to_bfloat(value).bits : to_half(value).bits;
      };
      each(lanes, [&](int l) { D[l] = half(H[l]) << 16 | half(L[l]); });
      return Next::Go;
    };
  }
  int const d = i.slot(0), a = i.slot(1);
  return with_any(to, [&](auto t) -> Step {
    using To = decltype(t);
    return with_any(from, [&](auto f) -> Step {
      using From = decltype(f);
      return [=](Warp& w, Lanes lanes) {
        uint64_t *const D = w.reg(d), *const A = w.reg(a);
        each(lanes,
             [&](int l) { D[l] = bits(converted<To>(get<From>(A[l]), rounding, saturates)); });
        return Next::Go;
      };
    });
  });
}

}  // namespace

Step memory(Instruction const& i) {
  std::string const& op = i.words[0];
  if (op == "ld" || op == "ldu") return load(i);
  if (op == "st") return store(i);
  if (op == "atom" || op == "red") return atomic(i);
  if (op == "cvta") return address(i);
  if (op == "cvt") return convert(i);
  return {};
}

}  // namespace emulator
