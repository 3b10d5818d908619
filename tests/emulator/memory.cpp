#include <algorithm>

#include "machine.h"

namespace emulator {

std::string hex(uint64_t value) {
  char text[32];
  std::snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(value));
  return text;
}

void Memory::allow(uint64_t begin, uint64_t bytes) {
  if (!bytes) return;
  uint64_t end = begin + bytes;
  auto i = ranges_.upper_bound(begin);
  if (i != ranges_.begin() && std::prev(i)->second >= begin) --i;
  while (i != ranges_.end() && i->first <= end) {
    begin = std::min(begin, i->first), end = std::max(end, i->second);
    i = ranges_.erase(i);
  }
  ranges_[begin] = end;
}

void Memory::check(uint64_t address, uint64_t bytes, char const* what) const {
  auto const i = ranges_.upper_bound(address);
  if (i == ranges_.begin() || address + bytes > std::prev(i)->second) {
    throw std::runtime_error(std::string(what) + " of " + std::to_string(bytes) + " bytes at " +
                             hex(address) + ", which is no tensor's");
  }
}

}  // namespace emulator
