// A tensor map of bulk copies; replaces the driver's opaque CUtensorMap.
#pragma once

#include <cstdint>

namespace emulator {

struct TensorMap {
  uint64_t magic;  // kMagic
  uint64_t address;
  uint32_t rank, element_bytes, swizzle, is_float;
  uint32_t box[5];
  uint32_t extent[5];
  uint64_t stride[5];  // bytes; stride[0] is the element size
  static constexpr uint64_t kMagic = 0x70616d20726f736eull;
};
static_assert(sizeof(TensorMap) <= 128);

// Swizzle mode n permutes 2^n units of 16 bytes, 0 none: XORs address bits [4, 4 + n) with bits
// [7, 7 + n).
inline uint64_t swizzled(uint64_t address, int mode) {
  return address ^ ((address >> 7 & ((1u << mode) - 1)) << 4);
}

}  // namespace emulator
