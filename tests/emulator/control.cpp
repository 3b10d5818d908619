// Branches, collective operations of a warp, named barriers and programmatic launch control.
#include <algorithm>

#include "decode.h"
#include "number_formats.h"

namespace emulator {

namespace {

// Whether all running lanes of `members` have reached the instruction. Diverged lanes reach it one
// group after another.
bool all_arrived(Warp& w, Lanes lanes, uint32_t members) {
  if (lanes & ~members) throw std::runtime_error("a lane is not a member of its own mask");
  return (members & w.alive() & ~lanes) == 0;
}

Step shuffle(Instruction const& i) {
  bool const has_predicate = i.operands.size() == 6;
  int const d = i.slot(0), p = has_predicate ? i.operands[1].slot : -1;
  size_t const at = has_predicate ? 2 : 1;
  int const a = i.slot(at), b = i.slot(at + 1), c = i.slot(at + 2), members = i.slot(at + 3);
  std::string const mode = i.words[2];
  return [=](Warp& w, Lanes lanes) {
    if (!all_arrived(w, lanes, static_cast<uint32_t>(w.reg(members)[__builtin_ctz(lanes)]))) {
      return Next::Retry;
    }
    uint64_t values[kWarp];
    std::copy_n(w.reg(a), kWarp, values);
    for_each_lane(lanes, [&](int l) {
      auto const by = static_cast<int>(w.reg(b)[l] & 31);
      auto const clamp = static_cast<int>(w.reg(c)[l]);
      int const segment = clamp >> 8 & 31, limit = (l & segment) | (clamp & 31 & ~segment);
      int from = mode == "up"     ? l - by
                 : mode == "down" ? l + by
                 : mode == "bfly" ? l ^ by
                                  : (l & segment) | (by & ~segment);
      bool const valid = mode == "up" ? from >= limit : from <= limit;
      if (!valid) from = l;
      if (!(lanes >> from & 1)) throw std::runtime_error("shfl reads a lane that is not here");
      w.reg(d)[l] = values[from];
      if (p >= 0) w.reg(p)[l] = valid;
    });
    return Next::Advance;
  };
}

Step vote(Instruction const& i) {
  int const d = i.slot(0), p = i.slot(1), members = i.slot(2);
  std::string const mode = i.words[2];
  return [=](Warp& w, Lanes lanes) {
    if (!all_arrived(w, lanes, static_cast<uint32_t>(w.reg(members)[__builtin_ctz(lanes)]))) {
      return Next::Retry;
    }
    Lanes ballot = 0;
    for_each_lane(lanes, [&](int l) { ballot |= (w.reg(p)[l] & 1) << l; });
    uint64_t const result = mode == "ballot" ? ballot
                            : mode == "any"  ? ballot != 0
                            : mode == "all"  ? ballot == lanes
                                             : ballot == lanes || ballot == 0;
    for_each_lane(lanes, [&](int l) { w.reg(d)[l] = result; });
    return Next::Advance;
  };
}

// redux.sync.op.type: a reduction over the lanes.
Step reduce(Instruction const& i) {
  int const d = i.slot(0), a = i.slot(1), members = i.slot(2);
  std::string const op = i.words[2];
  return with_integer(i.words.back(), [&](auto t) -> Step {
    using T = decltype(t);
    return [=](Warp& w, Lanes lanes) {
      if (!all_arrived(w, lanes, static_cast<uint32_t>(w.reg(members)[__builtin_ctz(lanes)]))) {
        return Next::Retry;
      }
      T result = get<T>(w.reg(a)[__builtin_ctz(lanes)]);
      for_each_lane(lanes & (lanes - 1), [&](int l) {
        T const x = get<T>(w.reg(a)[l]);
        result = op == "add"   ? static_cast<T>(result + x)
                 : op == "min" ? std::min(result, x)
                 : op == "max" ? std::max(result, x)
                 : op == "and" ? static_cast<T>(result & x)
                 : op == "or"  ? static_cast<T>(result | x)
                               : static_cast<T>(result ^ x);
      });
      for_each_lane(lanes, [&](int l) { w.reg(d)[l] = bits(result); });
      return Next::Advance;
    };
  });
}

Step elect(Instruction const& i) {  // elect.sync d|p, members
  int const d = i.operands[0].slot, p = i.slot(1), members = i.slot(2);
  return [=](Warp& w, Lanes lanes) {
    if (!all_arrived(w, lanes, static_cast<uint32_t>(w.reg(members)[__builtin_ctz(lanes)]))) {
      return Next::Retry;
    }
    int const leader = __builtin_ctz(lanes);
    for_each_lane(lanes, [&](int l) {
      if (d >= 0) w.reg(d)[l] = leader;
      w.reg(p)[l] = l == leader;
    });
    return Next::Advance;
  };
}

Step warp_barrier(Instruction const& i) {
  int const members = i.slot(0);
  return [=](Warp& w, Lanes lanes) {
    auto const mask = static_cast<uint32_t>(w.reg(members)[__builtin_ctz(lanes)]);
    return all_arrived(w, lanes, mask) ? Next::Advance : Next::Retry;
  };
}

// bar.sync and bar.arrive. A warp counts as 32 threads.
Step barrier(Instruction& i) {
  bool const waits = !i.has("arrive");
  if (i.has("red")) throw std::runtime_error("PTX: bar.red: " + i.text);
  i.converged = true;
  int const id = i.slot(0), threads = i.operands.size() > 1 ? i.slot(1) : -1;
  return [=](Warp& w, Lanes lanes) {
    int const lane = __builtin_ctz(lanes);
    auto const which = w.reg(id)[lane];
    if (which > 15) throw std::runtime_error("there are 16 named barriers");
    NamedBarrier& b = w.cta.barriers[which];
    if (w.barrier >= 0) {  // this warp has arrived
      if (std::find(b.waiting.begin(), b.waiting.end(), &w) != b.waiting.end()) return Next::Retry;
      w.barrier = -1;
      w.cta.acquire(w, b.releases);
      return Next::Advance;
    }
    w.cta.release(w, b.releases);
    auto const expected = threads >= 0 ? static_cast<int>(w.reg(threads)[lane])
                                       : static_cast<int>(w.cta.warps.size()) * kWarp;
    if (expected % kWarp) throw std::runtime_error("a named barrier counts whole warps");
    b.arrived += kWarp;
    w.cta.grid.progress();
    if (b.arrived > expected) throw std::runtime_error("too many threads at a named barrier");
    bool const complete = b.arrived == expected;
    if (complete) {
      b.arrived = 0;
      b.waiting.clear();
      merge(b.releases.complete, b.releases.pending);
    }
    if (waits && complete) w.cta.acquire(w, b.releases);
    if (!waits || complete) return Next::Advance;
    b.waiting.push_back(&w);
    w.barrier = static_cast<int>(which);
    return Next::Retry;
  };
}

// barrier.cluster.arrive and barrier.cluster.wait. Threads that have ended count as arrived.
Step cluster_barrier(Instruction const& i) {
  if (i.has("arrive")) {
    return [](Warp& w, Lanes lanes) {
      Cluster& cluster = *w.cta.cluster;
      for_each_lane(lanes, [&](int l) { w.cluster_phase[l] = cluster.phase; });
      cluster.arrived += __builtin_popcount(lanes);
      w.cta.grid.progress();
      return Next::Advance;
    };
  }
  return [](Warp& w, Lanes lanes) {
    Cluster& cluster = *w.cta.cluster;
    if (w.cluster_phase[__builtin_ctz(lanes)] < cluster.phase) return Next::Advance;
    if (cluster.arrived < cluster.running_threads()) return Next::Retry;
    ++cluster.phase, cluster.arrived = 0;
    w.cta.grid.progress();
    return Next::Advance;
  };
}

Next no_operation(Warp&, Lanes) { return Next::Advance; }

}  // namespace

Step decode_control(Instruction& i) {
  std::string const& op = i.words[0];
  if (op == "bra") return [](Warp&, Lanes) { return Next::Jump; };
  if (op == "ret" || op == "exit") return [](Warp&, Lanes) { return Next::Exit; };
  if (op == "trap") {
    return [](Warp&, Lanes) -> Next { throw std::runtime_error("the kernel trapped"); };
  }
  if (op == "shfl") return shuffle(i);
  if (op == "vote") return vote(i);
  if (op == "redux") return reduce(i);
  if (op == "elect") return elect(i);
  if (op == "bar" && i.has("warp")) return warp_barrier(i);
  if (op == "barrier" && i.has("cluster")) return cluster_barrier(i);
  if (op == "bar" || op == "barrier") return barrier(i);
  if (op == "activemask") {
    int const d = i.slot(0);
    return [=](Warp& w, Lanes lanes) {
      for_each_lane(lanes, [&](int l) { w.reg(d)[l] = lanes; });
      return Next::Advance;
    };
  }
  if (op == "nanosleep") return [](Warp&, Lanes) { return Next::Yield; };
  if (op == "setmaxnreg") {
    i.converged = true;
    return no_operation;
  }
  if (op == "griddepcontrol" && i.has("wait")) {
    return [](Warp& w, Lanes) { return w.cta.grid.previous ? Next::Retry : Next::Advance; };
  }
  if (op == "griddepcontrol") {
    return [](Warp& w, Lanes) {
      w.cta.triggered = true;
      w.cta.grid.progress();
      return Next::Advance;
    };
  }
  if (op == "prefetch" || op == "prefetchu" || op == "membar") {
    return no_operation;
  }
  return {};
}

}  // namespace emulator
