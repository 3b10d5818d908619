// The machine that runs a kernel: warps of 32 lanes, CTAs with their shared memory, and the grid.
//
// Asynchronous operations (bulk copies, wgmma) run at a random time between their issue and the
// wait for them. A seed determines these times and the order of the warps. A missing wait therefore
// yields a wrong number for some seeds.
#pragma once

#include <chrono>
#include <cstring>
#include <deque>
#include <random>
#include <stdexcept>
#include <unordered_map>
#include <vector>

#include "kernel.h"

namespace emulator {

constexpr int kWarp = 32;
constexpr int kSharedBytes = 228 * 1024;
constexpr int kGranule = 2;  // the emulator records writers of shared memory for every 2 bytes
// An address in shared::cluster that `mapa` makes has the rank of its CTA, plus one, from this bit
// on.
constexpr int kRankBit = 20;

class Cta;
class Grid;

std::string hex(uint64_t value);

template <class Function>
inline void for_each_lane(Lanes lanes, Function const& f) {
  if (lanes == ~0u) {
    for (int l = 0; l < kWarp; ++l) f(l);
  } else {
    for (; lanes; lanes &= lanes - 1) f(__builtin_ctz(lanes));
  }
}

template <class T>
inline T get(uint64_t bits) {
  T value;
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}

template <class T>
inline uint64_t bits(T value) {
  uint64_t result = 0;
  std::memcpy(&result, &value, sizeof(T));
  return result;
}

// A bulk copy out of shared memory. It reads shared memory first and writes global memory later.
struct BulkStore {
  std::function<void()> read, write;
  bool was_read = false;
};
using BulkGroup = std::deque<BulkStore>;

class Warp {
 public:
  Warp(Cta& cta, int index);
  // Runs a random number of instructions. Returns false if the warp waits.
  bool run();
  bool done() const { return groups_.empty(); }
  uint64_t* reg(int slot) { return &registers_[static_cast<size_t>(slot) * kWarp]; }
  Lanes alive() const;
  std::string where() const;

  // A wgmma of this warp. Wgmmas run in the order of their issue, each for all four warps of the
  // warpgroup at once after all four have issued it, from the same place of the code. One thread
  // may therefore signal for its warpgroup that a wgmma has ended.
  struct Wgmma {
    int pc;
    std::function<void()> run;
    std::vector<int> slots;
  };
  void issue(Wgmma wgmma);
  void commit() { commits_.push_back(issued_); }
  // Runs wgmmas until at most `left` commits are incomplete. Returns false if it must wait.
  bool complete_wgmmas(int left);
  bool can_run_wgmma() const;
  void run_wgmma();  // of all four warps

  Cta& cta;
  int const index;
  std::deque<BulkGroup> stores[kWarp];  // of each lane; the last group is not committed yet
  int pc = 0;                           // of the running instruction
  int barrier = -1;                     // the named barrier that the warp waits at, -1 for none
  int64_t cluster_phase[kWarp] = {};    // of the cluster barrier at which each lane arrived last

 private:
  struct Group {  // lanes at the same instruction
    int pc;
    Lanes lanes;
  };
  Group& choose();
  void merge();
  void run_own_wgmma();
  void check_wgmma_registers(Instruction const& i) const;

  std::vector<Group> groups_;
  bool stuck_ = false;  // the group that ran last must wait
  std::vector<uint64_t> registers_;
  std::deque<Wgmma> wgmmas_;
  std::deque<int64_t> commits_;  // number of wgmmas issued up to each commit
  int64_t issued_ = 0, finished_ = 0;
  std::vector<uint8_t> in_flight_;  // for each slot, the number of pending wgmmas that use it
};

// A vector clock: for each warp of a CTA, the number of its releases that happened before.
using Clock = std::vector<uint32_t>;

// Clocks that a barrier passes on: `pending` from arrivals of the current phase, `complete` from
// completed phases.
struct Releases {
  Clock pending, complete;
};

void merge(Clock& into, Clock const& other);

struct NamedBarrier {
  int arrived = 0;
  std::vector<Warp*> waiting;
  Releases releases;
};

// CTAs that reach each other's shared memory.
struct Cluster {
  std::vector<Cta*> ctas;  // by rank; null for a CTA that has ended
  int64_t phase = 0;       // of barrier.cluster
  int arrived = 0;         // threads, in this phase

  Cta& at(size_t rank) const;  // throws if it has ended
  int running_threads() const;
};

class Cta {
 public:
  Cta(Grid& grid, uint32_t const index[3], std::shared_ptr<Cluster> cluster, size_t rank);
  bool done() const;
  char* shared(uint64_t offset, size_t bytes);  // throws outside the CTA's shared memory
  // The CTA of a shared::cluster offset, which loses its rank.
  Cta& owner(uint64_t& offset);
  // Host address of a lane's generic address.
  char* at(Warp& warp, int lane, uint64_t address, size_t bytes, bool written);
  // A store by the generic proxy (st, not a bulk copy).
  void store(Warp& warp, int lane, uint64_t address, void const* value, size_t bytes);

  // A warp that arrives at a barrier releases its accesses; a warp that has waited acquires them.
  // The granularity is a warp: one lane's arrival releases the accesses of all lanes.
  void release(Warp const& warp, Releases& barrier);
  void acquire(Warp const& warp, Releases const& barrier);
  Releases& mbarrier(uint32_t offset) { return mbarriers_[offset]; }

  // Bulk copies and wgmmas may access shared memory that a store has written only after
  // fence.proxy.async. The fencing warp is the writer or one that has acquired the write; it need
  // not be the reader. `value` is the written value; `reader` names the operation in errors.
  void write(Warp const& warp, uint64_t offset, void const* value, size_t bytes);
  void fence(Warp const& warp);
  void check_fenced(uint64_t offset, size_t bytes, char const* reader) const;

  Grid& grid;
  uint32_t index[3];
  std::shared_ptr<Cluster> const cluster;
  size_t const rank;
  std::vector<std::unique_ptr<Warp>> warps;
  std::vector<std::vector<char>> local;  // of each thread
  NamedBarrier barriers[16];
  std::vector<std::function<void()>> loads;  // pending copies into shared memory, unordered
  bool triggered = false;                    // griddepcontrol.launch_dependents was executed

 private:
  std::vector<char> shared_;
  std::vector<Clock> clocks_;  // of each warp; its own entry is the number of its next release
  std::unordered_map<uint32_t, Releases> mbarriers_;
  std::vector<uint32_t> writers_;  // for each granule, the warps that wrote its value (bit mask)
  // For each warp, the granules that it wrote and no fence covers, with its clock at the write.
  std::vector<std::unordered_map<uint32_t, uint32_t>> unfenced_;
};

// A kernel launch.
struct Launch {
  std::shared_ptr<Kernel> kernel;
  uint32_t grid[3], block[3];
  int dynamic_shared = 0;
  bool programmatic = false;  // programmatic dependent launch: may overlap the previous launch
  size_t cluster = 1;         // CTAs in a row that are a cluster
  std::vector<char> params;   // the parameter block
};

// Ranges of global memory that kernels may access.
class Memory {
 public:
  void allow(uint64_t begin, uint64_t bytes);
  void clear() { ranges_.clear(); }
  void check(uint64_t address, uint64_t bytes, char const* what) const;

 private:
  std::map<uint64_t, uint64_t> ranges_;  // end by begin, disjoint
};

struct Settings {
  uint64_t seed = 0;
  double async_chance =
      0.1;  // that an asynchronous operation runs after a warp's turn; 0: only at its wait
  double deadlock_s = 2;            // seconds without any change that count as a deadlock
  size_t resident_ctas = SIZE_MAX;  // CTAs of a launch that run at once, or the clusters of these
};

class Grid {
 public:
  Grid(Launch launch, Memory const& memory, Settings const& settings, Grid const* previous);
  // Each warp takes a turn. Throws std::runtime_error that names the instruction and the warp.
  void round();
  bool done() const { return ctas_.empty(); }
  bool triggered() const;  // all CTAs allow the dependent launch to begin
  std::string where() const;

  // Records a change that another warp may wait for.
  void progress() { ++progress_; }
  int64_t changes() const { return progress_; }
  bool chance(double p) { return std::uniform_real_distribution<>()(random) < p; }
  int below(int n) { return std::uniform_int_distribution<>(0, n - 1)(random); }

  Launch const launch;
  Memory const& memory;
  Settings const settings;
  Grid const* previous;  // the launch that griddepcontrol.wait waits for, null once it has ended
  std::mt19937_64 random;

 private:
  bool run_one_async(Cta& cta);
  void end(Cta& cta);

  std::vector<std::unique_ptr<Cta>> ctas_;
  int64_t progress_ = 0;
};

// One entry of a stream: a launch or a function of the host.
struct Work {
  std::unique_ptr<Launch> launch;  // null for a host function
  std::function<void()> host;
};

// Runs and removes all entries of a stream. Throws std::runtime_error.
void run_in_order(std::deque<Work>& queue, Memory const& memory, Settings const& settings);

}  // namespace emulator
