#include "machine.h"

#include <algorithm>

namespace emulator {

namespace {

constexpr uint64_t kPoison = 0x7ff4dead7fa4deadull;  // NaN as a float and as a double

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
  if (name == "%cluster_ctarank" || name == "%cluster_ctaid.x") return cta.rank;
  if (name == "%cluster_nctarank" || name == "%cluster_nctaid.x") return cta.cluster->ctas.size();
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

// The group with the lowest program counter runs first, so that diverged lanes reconverge. After it
// had to wait, a random group runs.
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
      for_each_lane(group.lanes, [&](int l) {
        if (((p[l] & 1) != 0) == i.guard_negated) active &= ~(1u << l);
      });
    }
    if (!wgmmas_.empty()) check_wgmma_registers(i);
    Next next = Next::Advance;
    if (i.converged && active && group.lanes != alive()) {
      next = Next::Retry;
    } else if (active) {
      next = i.step(*this, active);
    }
    if (next == Next::Retry) {
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
    if (next == Next::Yield) {
      stuck_ = groups_.size() > 1;
      return false;
    }
  }
  return true;
}

void Warp::issue(Wgmma wgmma) {
  for (int slot : wgmma.slots) ++in_flight_[slot];
  wgmmas_.push_back(std::move(wgmma));
  ++issued_;
}

void Warp::run_wgmma() {
  size_t const first = static_cast<size_t>(index) / 4 * 4;
  for (size_t w = first; w < first + 4; ++w) {
    Warp& warp = *cta.warps.at(w);
    if (warp.wgmmas_.front().pc != wgmmas_.front().pc) {
      throw std::runtime_error("warps of a warpgroup issue different wgmmas: " + where() + "; " +
                               warp.where());
    }
  }
  for (size_t w = first; w < first + 4; ++w) cta.warps.at(w)->run_own_wgmma();
  cta.grid.progress();
}

void Warp::run_own_wgmma() {
  Wgmma wgmma = std::move(wgmmas_.front());
  wgmmas_.pop_front();
  ++finished_;
  for (int slot : wgmma.slots) --in_flight_[slot];
  wgmma.run();
}

bool Warp::can_run_wgmma() const {
  if (wgmmas_.empty()) return false;
  size_t const first = static_cast<size_t>(index) / 4 * 4;
  for (size_t w = first; w < first + 4; ++w) {
    if (cta.warps.at(w)->issued_ <= finished_) return false;
  }
  return true;
}

bool Warp::complete_wgmmas(int left) {
  while (static_cast<int>(commits_.size()) > left) {
    while (finished_ < commits_.front()) {
      if (!can_run_wgmma()) return false;
      run_wgmma();
    }
    commits_.pop_front();
  }
  return true;
}

void Warp::check_wgmma_registers(Instruction const& i) const {
  if (i.words[0] == "wgmma") return;
  for (int slot : i.slots) {
    if (in_flight_[slot]) {
      throw std::runtime_error("a register of a matrix product in flight is used: " + where());
    }
  }
}

}  // namespace emulator
