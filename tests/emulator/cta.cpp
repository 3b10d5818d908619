#include <algorithm>

#include "machine.h"

namespace emulator {

Cta& Cluster::at(size_t rank) const {
  if (rank >= ctas.size()) throw std::runtime_error("the cluster has no such CTA");
  if (!ctas[rank]) throw std::runtime_error("the CTA of a shared-memory address has ended");
  return *ctas[rank];
}

int Cluster::running_threads() const {
  int threads = 0;
  for (Cta const* cta : ctas) {
    if (!cta) continue;
    for (auto const& warp : cta->warps) threads += __builtin_popcount(warp->alive());
  }
  return threads;
}

Cta::Cta(Grid& grid, uint32_t const at[3], std::shared_ptr<Cluster> cluster, size_t rank)
    : grid(grid), cluster(std::move(cluster)), rank(rank) {
  std::copy(at, at + 3, index);
  Launch const& launch = grid.launch;
  int const bytes = kSharedBase + launch.kernel->static_shared + launch.dynamic_shared;
  if (bytes > kSharedBytes) {
    throw std::runtime_error(std::to_string(bytes) + " bytes of shared memory, 228 KiB are there");
  }
  shared_.assign(bytes, static_cast<char>(0xff));
  writers_.assign(bytes / kGranule + 1, 0);
  uint32_t const threads = launch.block[0] * launch.block[1] * launch.block[2];
  if (launch.kernel->local_bytes) {
    local.assign(threads, std::vector<char>(launch.kernel->local_bytes, static_cast<char>(0xff)));
  }
  for (uint32_t w = 0; w * kWarp < threads; ++w) {
    warps.push_back(std::make_unique<Warp>(*this, static_cast<int>(w)));
  }
  unfenced_.resize(warps.size());
  clocks_.assign(warps.size(), Clock(warps.size(), 0));
  for (size_t w = 0; w < warps.size(); ++w) clocks_[w][w] = 1;
}

bool Cta::done() const {
  return std::all_of(warps.begin(), warps.end(), [](auto const& w) { return w->done(); });
}

char* Cta::shared(uint64_t offset, size_t bytes) {
  if (offset < kSharedBase || offset + bytes > shared_.size()) {
    throw std::runtime_error("shared memory has no " + std::to_string(bytes) + " bytes at " +
                             hex(offset));
  }
  return shared_.data() + offset;
}

Cta& Cta::owner(uint64_t& offset) {
  uint64_t const of = offset >> kRankBit;
  offset &= (1u << kRankBit) - 1;
  return of ? cluster->at(of - 1) : *this;
}

char* Cta::at(Warp& warp, int lane, uint64_t address, size_t bytes, bool written) {
  if (address % bytes && bytes <= 16) {
    throw std::runtime_error("address " + hex(address) + " is not a multiple of " +
                             std::to_string(bytes));
  }
  if (address < kSharedWindow) {
    grid.memory.check(address, bytes, written ? "write" : "read");
    return reinterpret_cast<char*>(address);
  }
  if (address < kLocalWindow) {
    uint64_t offset = address - kSharedWindow;
    return owner(offset).shared(offset, bytes);
  }
  if (address < kParamWindow) {
    auto& mine = local.at(warp.index * kWarp + lane);
    uint64_t const offset = address - kLocalWindow;
    if (offset + bytes > mine.size()) throw std::runtime_error("beyond local memory");
    return mine.data() + offset;
  }
  uint64_t const offset = address - kParamWindow;
  if (offset + bytes > grid.launch.params.size()) throw std::runtime_error("beyond parameters");
  return const_cast<char*>(grid.launch.params.data()) + offset;
}

void Cta::store(Warp& warp, int lane, uint64_t address, void const* value, size_t bytes) {
  char* const there = at(warp, lane, address, bytes, true);
  if (address >= kSharedWindow && address < kLocalWindow) {
    if (address - kSharedWindow >= 1u << kRankBit) {
      throw std::runtime_error("PTX: a synchronous store to another CTA's shared memory");
    }
    write(warp, address - kSharedWindow, value, bytes);
  } else {
    std::memcpy(there, value, bytes);
  }
}

void Cta::write(Warp const& warp, uint64_t offset, void const* value, size_t bytes) {
  for (size_t done = 0; done < bytes; done += kGranule) {
    uint64_t const granule = (offset + done) / kGranule;
    size_t const part = std::min<size_t>(kGranule, bytes - done);
    char* const there = shared(offset + done, part);
    char const* const from = static_cast<char const*>(value) + done;
    uint32_t& writers = writers_.at(granule);
    bool const same = std::memcmp(there, from, part) == 0;
    if (same && !writers) continue;  // asynchronous reads of this value are legal already
    if (!same) writers = 0;
    writers |= 1u << warp.index;
    unfenced_[warp.index][static_cast<uint32_t>(granule)] = clocks_[warp.index][warp.index];
    std::memcpy(there, from, part);
  }
}

void merge(Clock& into, Clock const& other) {
  if (into.size() < other.size()) into.resize(other.size());
  for (size_t w = 0; w < other.size(); ++w) into[w] = std::max(into[w], other[w]);
}

void Cta::release(Warp const& warp, Releases& barrier) {
  Clock& mine = clocks_[warp.index];
  merge(barrier.pending, mine);
  ++mine[warp.index];
}

void Cta::acquire(Warp const& warp, Releases const& barrier) {
  merge(clocks_[warp.index], barrier.complete);
}

void Cta::fence(Warp const& warp) {
  Clock const& mine = clocks_[warp.index];
  for (size_t w = 0; w < unfenced_.size(); ++w) {
    std::erase_if(unfenced_[w], [&](auto const& written) {
      auto const& [granule, time] = written;
      if (!(writers_[granule] >> w & 1)) return true;  // another warp has overwritten it
      if (time > mine[w]) return false;
      writers_[granule] = 0;
      return true;
    });
  }
}

void Cta::check_fenced(uint64_t offset, size_t bytes, char const* reader) const {
  for (uint64_t g = offset / kGranule; g <= (offset + bytes - 1) / kGranule; ++g) {
    if (g < writers_.size() && writers_[g]) {
      throw std::runtime_error(
          std::string(reader) + " touches shared memory at " + hex(g * kGranule) + " that warp " +
          std::to_string(__builtin_ctz(writers_[g])) + " wrote without fence.proxy.async");
    }
  }
}

}  // namespace emulator
