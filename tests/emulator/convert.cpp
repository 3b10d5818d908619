// cvt: conversions between number formats.
#include <limits>

#include "decode.h"
#include "number_formats.h"

namespace emulator {

namespace {

template <class To, class From>
To convert_value(From x, std::string const& rounding, bool saturates) {
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
Step with_float_or_integer(std::string const& name, Function const& f) {
  if (name == "f16") return f(Half{});
  if (name == "bf16") return f(Bfloat{});
  return with_type(name, [&](auto t) -> Step { return f(t); });
}

Step convert(Instruction const& i) {
  std::string const &to = i.words[i.words.size() - 2], &from = i.words.back();
  std::string const rounding = i.words[1];
  bool const saturates = i.has("sat"), to_integer = to[0] == 's' || to[0] == 'u';
  bool const other_rounding =
      rounding[0] == 'r' && rounding != "rn";  // not to the nearest, ties to even
  if (to_integer ? saturates : other_rounding) throw std::runtime_error("PTX: " + i.text);
  if (from == "e4m3x2") {
    if (to != "f16x2") throw std::runtime_error("PTX: " + i.text);
    int const d = i.slot(0), a = i.slot(1);
    return [=](Warp& w, Lanes lanes) {
      uint64_t *const D = w.reg(d), *const A = w.reg(a);
      auto half = [](uint64_t byte) -> uint32_t { return to_half(from_e4m3(byte & 0xff)).bits; };
      for_each_lane(lanes, [&](int l) { D[l] = half(A[l] >> 8) << 16 | half(A[l]); });
      return Next::Advance;
    };
  }
  if (to == "bf16x2" || to == "f16x2") {  // the first source is the upper half
    int const d = i.slot(0), high = i.slot(1), low = i.slot(2);
    bool const is_bf16 = to == "bf16x2", relu = i.has("relu");
    return [=](Warp& w, Lanes lanes) {
      uint64_t *const D = w.reg(d), *const H = w.reg(high), *const L = w.reg(low);
      auto half = [&](uint64_t x) -> uint32_t {
        float const value = relu ? std::fmax(get<float>(x), 0.f) : get<float>(x);
        return is_bf16 ? to_bfloat(value).bits : to_half(value).bits;
      };
      for_each_lane(lanes, [&](int l) { D[l] = half(H[l]) << 16 | half(L[l]); });
      return Next::Advance;
    };
  }
  if (to == "e4m3x2") {
    if (!i.has("satfinite") || i.has("relu") || from != "f32") {
      throw std::runtime_error("PTX: " + i.text);
    }
    int const d = i.slot(0), high = i.slot(1), low = i.slot(2);
    return [=](Warp& w, Lanes lanes) {
      uint64_t *const D = w.reg(d), *const H = w.reg(high), *const L = w.reg(low);
      for_each_lane(
          lanes, [&](int l) { D[l] = to_e4m3(get<float>(H[l])) << 8 | to_e4m3(get<float>(L[l])); });
      return Next::Advance;
    };
  }
  int const d = i.slot(0), a = i.slot(1);
  return with_float_or_integer(to, [&](auto t) -> Step {
    using To = decltype(t);
    return with_float_or_integer(from, [&](auto f) -> Step {
      using From = decltype(f);
      return [=](Warp& w, Lanes lanes) {
        uint64_t *const D = w.reg(d), *const A = w.reg(a);
        for_each_lane(lanes, [&](int l) {
          D[l] = bits(convert_value<To>(get<From>(A[l]), rounding, saturates));
        });
        return Next::Advance;
      };
    });
  });
}

}  // namespace

Step decode_convert(Instruction const& i) { return i.words[0] == "cvt" ? convert(i) : Step{}; }

}  // namespace emulator
