// The number formats of PTX and their names.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "machine.h"

namespace emulator {

struct Half {
  uint16_t bits;
};
struct Bfloat {
  uint16_t bits;
};

inline float to_float(Half x) {
  _Float16 value;
  std::memcpy(&value, &x.bits, 2);
  return static_cast<float>(value);
}
inline float to_float(Bfloat x) { return get<float>(static_cast<uint64_t>(x.bits) << 16); }

// Conversions round to the nearest value, ties to even.
inline Half to_half(float x) {
  auto const value = static_cast<_Float16>(x);
  Half result;
  std::memcpy(&result.bits, &value, 2);
  return result;
}
inline Bfloat to_bfloat(float x) {
  if (std::isnan(x)) return {0x7fff};
  auto const b = static_cast<uint32_t>(bits(x));
  return {static_cast<uint16_t>((b + 0x7fff + (b >> 16 & 1)) >> 16)};
}

// E4M3: four bits of exponent, three of mantissa, no infinity. What exceeds 448 saturates; NaN
// stays.
inline uint8_t to_e4m3(float x) {
  uint8_t const sign = std::signbit(x) ? 0x80 : 0;
  if (std::isnan(x)) return sign | 0x7f;
  double const magnitude = std::fmin(std::fabs(static_cast<double>(x)), 448.0);
  int const exponent = magnitude > 0 ? std::max(std::ilogb(magnitude), -6) : -6;
  // In units of the last bit, ties to even. 16 units are the next binade, whose code follows.
  auto const units = static_cast<int>(std::nearbyint(std::scalbn(magnitude, 3 - exponent)));
  return static_cast<uint8_t>(sign | ((exponent + 6) * 8 + units));
}

inline float from_e4m3(uint8_t x) {
  int const exponent = x >> 3 & 15, mantissa = x & 7;
  float const magnitude = (x & 0x7f) == 0x7f ? NAN
                          : exponent         ? std::ldexp(8.f + mantissa, exponent - 10)
                                             : std::ldexp(static_cast<float>(mantissa), -9);
  return x & 0x80 ? -magnitude : magnitude;
}

template <class T>
constexpr bool is_small_float = std::is_same_v<T, Half> || std::is_same_v<T, Bfloat>;

template <class T>
auto value_of(T x) {
  if constexpr (is_small_float<T>)
    return to_float(x);
  else
    return x;
}

// Calls f with a value of the type that `name` denotes.
template <class Function>
auto with_type(std::string const& name, Function const& f) {
  if (name == "s32") return f(int32_t{});
  if (name == "u32" || name == "b32") return f(uint32_t{});
  if (name == "s64") return f(int64_t{});
  if (name == "u64" || name == "b64") return f(uint64_t{});
  if (name == "f32") return f(float{});
  if (name == "f64") return f(double{});
  if (name == "s16") return f(int16_t{});
  if (name == "u16" || name == "b16") return f(uint16_t{});
  if (name == "s8") return f(int8_t{});
  if (name == "u8" || name == "b8") return f(uint8_t{});
  if (name == "pred") return f(bool{});
  throw std::runtime_error("PTX: unknown type " + name);
}

template <class Function>
auto with_integer(std::string const& name, Function const& f) {
  return with_type(name, [&](auto t) -> Step {
    using T = decltype(t);
    if constexpr (std::is_integral_v<T> && !std::is_same_v<T, bool>) {
      return f(t);
    } else {
      throw std::runtime_error("PTX: no such integer type: " + name);
    }
  });
}

inline int bytes_of_type(std::string const& name) {
  if (name == "f16" || name == "bf16") return 2;
  return name == "pred" ? 1 : std::stoi(name.substr(1)) / 8;
}

}  // namespace emulator
