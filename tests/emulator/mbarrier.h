// The state of an mbarrier in shared memory, and how arrivals and copies change it.
#pragma once

#include "machine.h"

namespace emulator {

struct Mbarrier {
  uint64_t expected : 20, pending : 20;
  int64_t bytes : 23;  // that copies have still to bring
  uint64_t phase : 1;
};
static_assert(sizeof(Mbarrier) == 8);

inline uint32_t shared_offset(Operand const& o, Warp& w, int lane) {
  auto const address = w.reg(o.slot)[lane] + o.offset;
  return static_cast<uint32_t>(address >= kSharedWindow ? address - kSharedWindow : address);
}

// Applies f to the barrier at an address, which may be another CTA's. Flips its phase if it awaits
// no arrival and no bytes.
template <class Function>
void update_mbarrier(Cta& from, uint64_t address, Function const& f) {
  Cta& cta = from.owner(address);
  if (address % 8) throw std::runtime_error("an mbarrier lies on 8 bytes");
  Mbarrier b;
  std::memcpy(&b, cta.shared(address, 8), 8);
  f(b);
  if (b.pending == 0 && b.bytes == 0) {
    b.phase ^= 1;
    b.pending = b.expected;
    merge(cta.mbarrier(address).complete, cta.mbarrier(address).pending);
  }
  std::memcpy(cta.shared(address, 8), &b, 8);
  cta.grid.progress();
}

}  // namespace emulator
