#include <algorithm>

#include "machine.h"

namespace emulator {

Grid::Grid(Launch launch_, Memory const& memory, Settings const& settings, Grid const* previous)
    : launch(std::move(launch_)),
      memory(memory),
      settings(settings),
      previous(previous),
      random(settings.seed) {
  if (launch.grid[0] % launch.cluster) throw std::runtime_error("the grid has a part of a cluster");
  for (uint32_t z = 0; z < launch.grid[2]; ++z) {
    for (uint32_t y = 0; y < launch.grid[1]; ++y) {
      for (uint32_t x = 0; x < launch.grid[0]; ++x) {
        uint32_t const at[3] = {x, y, z};
        size_t const rank = x % launch.cluster;
        auto const cluster = rank ? ctas_.back()->cluster : std::make_shared<Cluster>();
        ctas_.push_back(std::make_unique<Cta>(*this, at, cluster, rank));
        cluster->ctas.push_back(ctas_.back().get());
      }
    }
  }
}

// Runs a random pending asynchronous operation of a CTA. Returns false if there is none.
bool Grid::run_one_async(Cta& cta) {
  std::vector<std::function<void()>> ready;
  for (size_t i = 0; i < cta.loads.size(); ++i) {
    ready.push_back([&cta, i] {
      auto const load = std::move(cta.loads[i]);
      cta.loads.erase(cta.loads.begin() + static_cast<std::ptrdiff_t>(i));
      load();
    });
  }
  for (auto const& warp : cta.warps) {
    if (warp->can_run_wgmma()) ready.push_back([w = warp.get()] { w->run_wgmma(); });
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

// Ends a CTA. Its bulk stores may write global memory later, but must have read shared memory.
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
  while (run_one_async(cta)) {
  }
  cta.cluster->ctas[cta.rank] = nullptr;
}

bool Grid::triggered() const {
  return std::all_of(ctas_.begin(), ctas_.end(), [](auto const& cta) { return cta->triggered; });
}

void Grid::round() {
  std::erase_if(ctas_, [&](auto& cta) {
    if (!cta->done()) return false;
    end(*cta);
    progress();
    return true;
  });
  std::vector<Warp*> warps;
  size_t begun = 0;  // CTAs of the clusters that run
  Cluster const* last = nullptr;
  for (auto const& cta : ctas_) {
    if (cta->cluster.get() != last && begun >= settings.resident_ctas) break;
    if (cta->cluster.get() != last) begun += launch.cluster;
    last = cta->cluster.get();
    for (auto const& warp : cta->warps) {
      if (!warp->done()) warps.push_back(warp.get());
    }
  }
  std::shuffle(warps.begin(), warps.end(), random);
  bool moved = false;  // false if every warp waits
  for (Warp* const warp : warps) {
    try {
      moved |= warp->run();
      if (chance(settings.async_chance)) moved |= run_one_async(warp->cta);
    } catch (std::runtime_error const& error) {
      throw std::runtime_error(std::string(error.what()) + " (" + launch.kernel->name + ", " +
                               warp->where() + ")");
    }
  }
  if (!moved) {
    for (auto const& cta : ctas_) run_one_async(*cta);
  }
}

std::string Grid::where() const {
  std::string text = launch.kernel->name + ":";
  for (auto const& cta : ctas_) {
    for (auto const& warp : cta->warps) {
      if (!warp->done()) text += "\n  " + warp->where();
    }
  }
  return text;
}

// A programmatic dependent launch may begin once all CTAs of the previous launch have executed
// griddepcontrol.launch_dependents. Any other launch begins when the previous one has ended.
void run_in_order(std::deque<Work>& queue, Memory const& memory, Settings const& settings) {
  using Clock = std::chrono::steady_clock;
  std::deque<std::unique_ptr<Grid>> running;  // in stream order; all but the first overlap
  auto last_change = Clock::now();
  int64_t changes = 0, last_changes = 0;
  Settings next = settings;
  while (!queue.empty() || !running.empty()) {
    while (!queue.empty()) {
      Work& work = queue.front();
      bool const overlaps = work.launch && work.launch->programmatic;
      if (!running.empty() && !(overlaps && running.back()->triggered())) break;
      if (work.launch) {
        Grid const* const previous = running.empty() ? nullptr : running.back().get();
        running.push_back(std::make_unique<Grid>(std::move(*work.launch), memory, next, previous));
        next.seed += 1000003;
      } else {
        work.host();
      }
      queue.pop_front();
    }
    for (auto const& grid : running) grid->round();
    changes = 0;
    for (auto const& grid : running) changes += grid->changes();
    while (!running.empty() && running.front()->done()) {
      running.pop_front();
      if (!running.empty()) running.front()->previous = nullptr;
      changes = -1;
    }
    if (changes != last_changes) {
      last_changes = changes;
      last_change = Clock::now();
    } else if (Clock::now() - last_change > std::chrono::duration<double>(settings.deadlock_s)) {
      throw std::runtime_error("deadlock in " + running.front()->where());
    }
  }
}

}  // namespace emulator
