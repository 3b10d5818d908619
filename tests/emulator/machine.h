// What runs a kernel: warps of 32 lanes, their CTA with its shared memory, and the grid.
//
// Everything asynchronous (bulk copies, matrix products) runs some time between where it is issued
// and where it is waited for. Which warp goes on and when these run is drawn at random from a
// seed, so that a missing wait shows as a wrong number for some seed.
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
constexpr int kGranule = 2;  // bytes of shared memory whose writers are known

class Cta;
class Grid;

std::string hex(uint64_t value);

template <class Function>
inline void each(Lanes lanes, Function const& f) {
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

// Bulk copies out of shared memory, by the thread that issued them. Each step is run twice:
// first it reads shared memory, later it writes global memory.
struct BulkStore {
  std::function<void()> read, write;
  bool was_read = false;
};
using BulkGroup = std::deque<BulkStore>;

class Warp {
 public:
  Warp(Cta& cta, int index);
  // Runs a random number of instructions; false: it waits for something.
  bool run();
  bool done() const { return groups_.empty(); }
  uint64_t* reg(int slot) { return &registers_[static_cast<size_t>(slot) * kWarp]; }
  Lanes alive() const;
  std::string where() const;

  // Matrix products: issued ones run in order, each for all four warps of the warpgroup at once
  // when all have issued it. So one thread may say for its warpgroup that it is over.
  struct Product {
    std::function<void()> run;
    std::vector<int> slots;
  };
  void issue(Product product);
  void commit() { commits_.push_back(issued_); }
  bool products_done(int left);  // all but the last `left` commits; runs what can run
  bool can_run_product() const;
  void run_product();  // of the warpgroup

  Cta& cta;
  int const index;
  std::deque<BulkGroup> stores[kWarp];  // of each lane; the last group is open
  int pc = 0;                           // of the instruction that runs
  int barrier = -1;                     // that it has arrived at and waits for

 private:
  struct Group {
    int pc;
    Lanes lanes;
  };
  Group& choose();
  void merge();
  void run_own_product();
  void check_products(Instruction const& i) const;

  std::vector<Group> groups_;
  bool stuck_ = false;  // the last group that ran could not go on
  std::vector<uint64_t> registers_;
  std::deque<Product> products_;
  std::deque<int64_t> commits_;  // products issued up to each commit
  int64_t issued_ = 0, finished_ = 0;
  std::vector<uint8_t> in_flight_;  // slots that products in flight use
};

// For each warp of a CTA, up to which of its releases what it did comes first.
using Clock = std::vector<uint32_t>;

// What those who arrive at a barrier release: until it is complete nobody has it.
struct Releases {
  Clock pending, complete;
};

void merge(Clock& into, Clock const& other);

struct NamedBarrier {
  int arrived = 0;
  std::vector<Warp*> waiting;
  Releases releases;
};

class Cta {
 public:
  Cta(Grid& grid, uint32_t const index[3]);
  bool done() const;
  char* shared(uint64_t offset, size_t bytes);  // throws beyond the CTA's shared memory
  // Where a generic address points, for one lane.
  char* at(Warp& warp, int lane, uint64_t address, size_t bytes, bool written);
  // An ordinary store to a generic address.
  void store(Warp& warp, int lane, uint64_t address, void const* value, size_t bytes);

  // Barriers order what warps do: who arrives releases, who has waited acquires. Warps are taken as
  // one: a lane's arrival releases what all lanes did.
  void release(Warp const& warp, Releases& barrier);
  void acquire(Warp const& warp, Releases const& barrier);
  Releases& mbarrier(uint32_t offset) { return mbarriers_[offset]; }

  // Bulk copies and matrix products may not see what ordinary stores have written to shared memory
  // until it is fenced, by a warp that wrote it or by one for which that has come first; not
  // necessarily by the reader's. `value` is what gets written; `reader` names who reads.
  void write(Warp const& warp, uint64_t offset, void const* value, size_t bytes);
  void fence(Warp const& warp);
  void check_fenced(uint64_t offset, size_t bytes, char const* reader) const;

  Grid& grid;
  uint32_t index[3];
  std::vector<std::unique_ptr<Warp>> warps;
  std::vector<std::vector<char>> local;  // of each thread
  NamedBarrier barriers[16];
  std::vector<std::function<void()>> loads;  // bulk copies into shared memory, in no order
  bool triggered = false;                    // allows the next launch to begin

 private:
  std::vector<char> shared_;
  std::vector<Clock> known_;  // by each warp; its own number is that of its next release
  std::unordered_map<uint32_t, Releases> mbarriers_;
  std::vector<uint32_t> writers_;  // of each granule's value: a bit for each warp
  // Granules that each warp has written, and its clock at the last time.
  std::vector<std::unordered_map<uint32_t, uint32_t>> unfenced_;
};

// One launch. `params` is the kernel's parameter block.
struct Launch {
  std::shared_ptr<Kernel> kernel;
  uint32_t grid[3], block[3];
  int dynamic_shared = 0;
  bool programmatic = false;  // may begin when the launch before it allows
  std::vector<char> params;
};

// Global memory that kernels may touch.
class Memory {
 public:
  void own(uint64_t begin, uint64_t bytes);
  void clear() { ranges_.clear(); }
  void check(uint64_t address, uint64_t bytes, char const* what) const;

 private:
  std::map<uint64_t, uint64_t> ranges_;  // end by begin, disjoint
};

struct Settings {
  uint64_t seed = 0;
  double eagerness = 0.1;      // of asynchronous work: 0 as late as possible
  double patience = 2;         // seconds in which nothing changes after which a launch is given up
  size_t resident = SIZE_MAX;  // CTAs of a launch that find room; another comes when one ends
};

class Grid {
 public:
  Grid(Launch launch, Memory const& memory, Settings const& settings, Grid const* before);
  // Every warp runs for a while. Throws std::runtime_error, naming instruction and warp.
  void round();
  bool done() const { return ctas_.empty(); }
  bool triggered() const;  // all CTAs allow the next launch to begin
  std::string where() const;

  // Something has changed that others may wait for.
  void progress() { ++progress_; }
  int64_t changes() const { return progress_; }
  bool chance(double p) { return std::uniform_real_distribution<>()(random) < p; }
  int below(int n) { return std::uniform_int_distribution<>(0, n - 1)(random); }

  Launch const launch;
  Memory const& memory;
  Settings const settings;
  Grid const* before;  // the launch that griddepcontrol.wait waits for, null when it is over
  std::mt19937_64 random;

 private:
  bool something_asynchronous(Cta& cta);
  void end(Cta& cta);

  std::vector<std::unique_ptr<Cta>> ctas_;
  int64_t progress_ = 0;
};

// What a stream has to do next: a launch, or something of the host's.
struct Work {
  std::unique_ptr<Launch> launch;
  std::function<void()> host;
};

// Runs a stream's work and empties it. Throws std::runtime_error.
void run_in_order(std::deque<Work>& queue, Memory const& memory, Settings const& settings);

}  // namespace emulator
