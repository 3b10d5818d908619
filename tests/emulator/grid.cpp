#include "warp.h"

#include <algorithm>

namespace emulator {

namespace {

constexpr uint64_t kPoison = 0x7ff4dead7fa4deadull;  // NaN as a float and as a double

std::string hex(uint64_t value) {
  char text[32];
  std::snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(value));
  return text;
}

uint64_t special(std::string const& name, Cta const& cta, int thread) {
  Launch const& launch = cta.grid.launch;
  auto pick = [&](uint32_t const* xyz) { return xyz[name.back() - 'x']; };
  if (name.starts_with("%tid.")) {
    uint32_t const x = launch.block[0], y = launch.block[1];
    uint32_t const xyz[3] = {thread % x, thread / x % y, thread / x / y};
    return pick(xyz);
  }
  if (name.starts_with("%ntid.")) return pick(launch.block);
  if (name.starts_with("%ctaid.")) return pick(cta.index);
  if (name.starts_with("%nctaid.")) return pick(launch.grid);
  if (name == "%laneid") return thread % kWarp;
  if (name == "%warpid") return thread / kWarp;
  if (name == "%smid") return cta.index[0];
  if (name == "%cluster_ctarank") return 0;
  if (name.starts_with("%cluster_nctaid.")) return 1;
  if (name.starts_with("%cluster_ctaid.")) return 0;
  if (name == "%dynamic_smem_size") return launch.dynamic_shared;
  if (name == "%clock" || name == "%clock64" || name == "%globaltimer") return 0;
  throw std::runtime_error("unknown special register " + name);
}

}  // namespace

Warp::Warp(Cta& cta, int index) : cta(cta), index(index) {
  Kernel const& kernel = *cta.grid.launch.kernel;
  registers_.assign(static_cast<size_t>(kernel.slots) * kWarp, kPoison);
  in_flight_.assign(kernel.slots, 0);
  for (auto const& initial : kernel.initial) {
    for (int lane = 0; lane < kWarp; ++lane) {
      reg(initial.slot)[lane] = initial.special.empty()
                                    ? initial.value
                                    : special(initial.special, cta, index * kWarp + lane);
    }
  }
  for (auto& lane : stores) lane.emplace_back();
  uint32_t const* block = cta.grid.launch.block;
  int const threads = static_cast<int>(block[0] * block[1] * block[2]) - index * kWarp;
  groups_.push_back({0, threads >= kWarp ? ~0u : (1u << threads) - 1});
}

Lanes Warp::alive() const {
  Lanes lanes = 0;
  for (auto const& group : groups_) lanes |= group.lanes;
  return lanes;
}

std::string Warp::where() const {
  std::string text = "CTA " + std::to_string(cta.index[0]) + ", warp " + std::to_string(index);
  for (auto const& group : groups_) {
    text += ", lanes " + hex(group.lanes) + " at '" +
            cta.grid.launch.kernel->code.at(group.pc).text.substr(0, 100) + "'";
  }
  return text;
}

// The lowest program counter first, so that lanes that parted meet again; where it could not go
// on, any.
Warp::Group& Warp::choose() {
  if (stuck_) return groups_[cta.grid.below(static_cast<int>(groups_.size()))];
  return *std::min_element(groups_.begin(), groups_.end(),
                           [](Group const& a, Group const& b) { return a.pc < b.pc; });
}

void Warp::merge() {
  for (size_t i = 0; i < groups_.size(); ++i) {
    for (size_t j = groups_.size() - 1; j > i; --j) {
      if (groups_[j].pc != groups_[i].pc) continue;
      groups_[i].lanes |= groups_[j].lanes;
      groups_.erase(groups_.begin() + static_cast<std::ptrdiff_t>(j));
    }
  }
  std::erase_if(groups_, [](Group const& g) { return g.lanes == 0; });
}

bool Warp::run() {
  auto const& code = cta.grid.launch.kernel->code;
  for (int budget = 1 + cta.grid.below(200); budget > 0 && !groups_.empty(); --budget) {
    Group& group = choose();
    stuck_ = false;
    pc = group.pc;
    Instruction const& i = code.at(group.pc);
    Lanes active = group.lanes;
    if (i.guard >= 0) {
      uint64_t const* p = reg(i.guard);
      each(group.lanes, [&](int l) {
        if (((p[l] & 1) != 0) == i.guard_negated) active &= ~(1u << l);
      });
    }
    if (!products_.empty()) check_products(i);
    Next next = Next::Go;
    if (i.converged && active && group.lanes != alive()) {
      next = Next::Wait;
    } else if (active) {
      next = i.step(*this, active);
    }
    if (next == Next::Wait) {
      stuck_ = true;
      return false;
    }
    if (next == Next::Exit) {
      group.lanes &= ~active;
      group.pc++;
      cta.grid.progress();
    } else if (next == Next::Jump && active != group.lanes) {
      group.lanes &= ~active;
      group.pc++;
      groups_.push_back({i.target, active});
    } else {
      group.pc = next == Next::Jump ? i.target : group.pc + 1;
    }
    if (groups_.size() > 1 || group.lanes == 0) merge();
    if (next == Next::GoLater) {
      stuck_ = groups_.size() > 1;
      return false;
    }
  }
  return true;
}

void Warp::issue(Product product) {
  for (int slot : product.slots) ++in_flight_[slot];
  products_.push_back(std::move(product));
  ++issued_;
}

void Warp::run_product() {
  size_t const first = static_cast<size_t>(index) / 4 * 4;
  for (size_t w = first; w < first + 4; ++w) cta.warps.at(w)->run_own_product();
  cta.grid.progress();
}

void Warp::run_own_product() {
  Product product = std::move(products_.front());
  products_.pop_front();
  ++finished_;
  for (int slot : product.slots) --in_flight_[slot];
  product.run();
}

bool Warp::can_run_product() const {
  if (products_.empty()) return false;
  size_t const first = static_cast<size_t>(index) / 4 * 4;
  for (size_t w = first; w < first + 4; ++w) {
    if (cta.warps.at(w)->issued_ <= finished_) return false;
  }
  return true;
}

bool Warp::products_done(int left) {
  while (static_cast<int>(commits_.size()) > left) {
    while (finished_ < commits_.front()) {
      if (!can_run_product()) return false;
      run_product();
    }
    commits_.pop_front();
  }
  return true;
}

void Warp::check_products(Instruction const& i) const {
  if (i.words[0] == "wgmma") return;
  for (int slot : i.slots) {
    if (in_flight_[slot]) {
      throw std::runtime_error("a register of a matrix product in flight is used: " + where());
    }
  }
}

Cta::Cta(Grid& grid, uint32_t const at[3]) : grid(grid) {
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
    uint64_t const offset = address - kSharedWindow;
    return shared(offset, bytes);
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
    if (same && !writers) continue;  // seen already
    if (!same) writers = 0;
    writers |= 1u << warp.index;
    unfenced_[warp.index].push_back(static_cast<uint32_t>(granule));
    std::memcpy(there, from, part);
  }
}

void Cta::fence(Warp const& warp) {
  for (uint32_t const granule : unfenced_[warp.index]) {
    if (writers_[granule] >> warp.index & 1) writers_[granule] = 0;
  }
  unfenced_[warp.index].clear();
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

void Memory::own(uint64_t begin, uint64_t bytes) {
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

Grid::Grid(Launch launch_, Memory const& memory, Settings const& settings)
    : launch(std::move(launch_)), memory(memory), settings(settings), random(settings.seed) {
  for (uint32_t z = 0; z < launch.grid[2]; ++z) {
    for (uint32_t y = 0; y < launch.grid[1]; ++y) {
      for (uint32_t x = 0; x < launch.grid[0]; ++x) {
        uint32_t const at[3] = {x, y, z};
        ctas_.push_back(std::make_unique<Cta>(*this, at));
      }
    }
  }
}

// Runs one asynchronous thing of a CTA that may run; false if there is none.
bool Grid::something_asynchronous(Cta& cta) {
  std::vector<std::function<void()>> ready;
  for (size_t i = 0; i < cta.loads.size(); ++i) {
    ready.push_back([&cta, i] {
      auto const load = std::move(cta.loads[i]);
      cta.loads.erase(cta.loads.begin() + static_cast<std::ptrdiff_t>(i));
      load();
    });
  }
  for (auto const& warp : cta.warps) {
    if (warp->can_run_product()) ready.push_back([w = warp.get()] { w->run_product(); });
    for (auto& lane : warp->stores) {
      for (auto& group : lane) {
        for (auto& store : group) {
          ready.push_back([&store, &group, &lane] {
            (store.was_read ? store.write : store.read)();
            if (!store.was_read) {
              store.was_read = true;
              return;
            }
            std::erase_if(group, [&](BulkStore const& s) { return &s == &store; });
            if (group.empty() && &group == &lane.front() && lane.size() > 1) lane.pop_front();
          });
        }
      }
    }
  }
  if (ready.empty()) return false;
  ready[below(static_cast<int>(ready.size()))]();
  ++progress_;
  return true;
}

// Its bulk stores may go on without it, but not read its shared memory.
void Grid::end(Cta& cta) {
  char const* left = cta.loads.empty() ? nullptr : "a bulk load";
  for (auto const& warp : cta.warps) {
    for (auto const& lane : warp->stores) {
      for (auto const& group : lane) {
        for (auto const& store : group) {
          if (!store.was_read) left = "a bulk store that has not read shared memory";
        }
      }
    }
  }
  if (left) {
    throw std::runtime_error("CTA " + std::to_string(cta.index[0]) + " of " + launch.kernel->name +
                             " ended before " + left);
  }
  while (something_asynchronous(cta)) {
  }
}

void Grid::run() {
  using Clock = std::chrono::steady_clock;
  auto last_moved = Clock::now();
  int64_t last_progress = progress_;
  std::vector<Warp*> warps;
  while (true) {
    std::erase_if(ctas_, [&](auto& cta) {
      if (!cta->done()) return false;
      end(*cta);
      return true;
    });
    if (ctas_.empty()) return;
    warps.clear();
    for (auto const& cta : ctas_) {
      for (auto const& warp : cta->warps) {
        if (!warp->done()) warps.push_back(warp.get());
      }
    }
    std::shuffle(warps.begin(), warps.end(), random);
    bool moved = false;  // or every warp waits
    for (Warp* const warp : warps) {
      try {
        moved |= warp->run();
        if (chance(settings.eagerness)) moved |= something_asynchronous(warp->cta);
      } catch (std::runtime_error const& error) {
        throw std::runtime_error(std::string(error.what()) + " (" + launch.kernel->name + ", " +
                                 warp->where() + ")");
      }
    }
    if (!moved) {
      for (auto const& cta : ctas_) something_asynchronous(*cta);
    }
    if (progress_ != last_progress) {
      last_progress = progress_;
      last_moved = Clock::now();
    } else if (Clock::now() - last_moved > std::chrono::duration<double>(settings.patience)) {
      std::string text = "deadlock in " + launch.kernel->name + ":";
      for (Warp const* const warp : warps) text += "\n  " + warp->where();
      throw std::runtime_error(text);
    }
  }
}

}  // namespace emulator
