// A tensor in global memory as bulk copies address it; stands in for the driver's opaque one.
#pragma once

#include <cstdint>

namespace emulator {

struct TensorMap {
  uint64_t magic;  // kMagic
  uint64_t address;
  uint32_t rank, element_bytes, swizzle, is_float;
  uint32_t box[5];
  uint32_t extent[5];
  uint64_t stride[5];  // bytes; of dimension 0 the element's
  static constexpr uint64_t kMagic = 0x70616d20726f736eull;
};
static_assert(sizeof(TensorMap) <= 128);

// Swizzle modes of 2^n 16-byte units, 0 for none: bits [7, 7 + n) of an address flip [4, 4 + n).
inline uint64_t swizzled(uint64_t address, int mode) {
  return address ^ ((address >> 7 & ((1u << mode) - 1)) << 4);
}

}  // namespace emulator
