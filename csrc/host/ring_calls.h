// Ring calls that replay a program, by their keys. Those of several ranks are a ReplayableCall of
// ringfa3/symmetric/ring_program.py, which begin_again.h begins.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "host/key.h"
#include "host/program.h"

namespace ringfa3::host {

constexpr size_t kMaxRingCalls = 1024;  // beyond that all are forgotten

// A launch of a program: the program, the waits of earlier calls, and the number of its call in a
// group.
struct ProgramLaunch {
  std::shared_ptr<Program const> program;
  Waits waits{};
  int64_t call = 0;
};

class ReplayableCall {
 public:
  virtual ~ReplayableCall() = default;
  // None, and nothing has begun: Python must look at the call. Throws what Python raises. A
  // backward names its forward call by the LSE; that of a forward is undefined.
  virtual std::optional<ProgramLaunch> begin(at::Tensor const& lse) = 0;
  // Tell the other ranks; the first one throws what Python raises.
  virtual void refused(std::string const& name, int status) = 0;
  virtual void failed(bool memory, std::string const& text) = 0;
};

// A call of a plan for one rank: nobody else takes part. Its program lives as long as the plan.
class LocalCall : public ReplayableCall {
 public:
  explicit LocalCall(std::weak_ptr<Program const> program) : program_(std::move(program)) {}

  std::optional<ProgramLaunch> begin(at::Tensor const&) override {
    auto program = program_.lock();
    if (!program) return std::nullopt;
    return ProgramLaunch{std::move(program)};
  }
  void refused(std::string const&, int) override {}
  void failed(bool, std::string const&) override {}

 private:
  std::weak_ptr<Program const> const program_;
};

// A ring call that the library does not know. inputs: of its schedule; layouts: theirs, as in a
// key.
struct FirstCall {
  char const* op;
  std::string_view layouts;
  Tensors const& inputs;
  int64_t plan;
  double scale;
  bool deterministic;
  std::string_view transport;
  Stream stream;
};

// A call of a prepared plan. op: its number in a key; layouts: of its inputs, as in a key.
struct PreparedCall {
  int64_t op;
  std::string layouts;
  std::shared_ptr<ReplayableCall> call;
};

// Freeing a call takes the GIL: none is freed under the mutex.
class RingCalls {
 public:
  std::shared_ptr<ReplayableCall> find(Key const& key) {
    std::lock_guard const lock(mutex_);
    auto const at = calls_.find(key);
    return at == calls_.end() ? nullptr : at->second;
  }

  void put(Key key, std::shared_ptr<ReplayableCall> call) {
    Calls dropped;
    std::lock_guard const lock(mutex_);
    if (calls_.size() >= kMaxRingCalls) dropped.swap(calls_);
    std::swap(calls_[std::move(key)], call);
  }

  void clear() {
    Calls dropped;
    std::lock_guard const lock(mutex_);
    dropped.swap(calls_);
  }

 private:
  using Calls = std::unordered_map<Key, std::shared_ptr<ReplayableCall>, KeyHash>;

  std::mutex mutex_;
  Calls calls_;
};

// Numbers of forward calls, by the LSE that they have returned. A backward names its forward call
// by its LSE, also after a checkpoint or a compiled graph. As `MemoryCache` of
// ringfa3/tensor_cache.py, which has those of calls that Python began.
class ForwardCalls {
 public:
  void set(at::Tensor const& lse, int64_t number) {
    std::lock_guard const lock(mutex_);
    if (numbers_.size() >= limit_) {
      std::erase_if(numbers_, [](auto const& entry) { return entry.second.first.expired(); });
      limit_ = kFew + 2 * numbers_.size();
    }
    // no other memory has its address as long as there is a weak reference
    auto memory = lse.storage().getWeakStorageImpl();
    numbers_.insert_or_assign(lse.storage().unsafeGetStorageImpl(),
                              std::pair(std::move(memory), number));
  }

  // 0: unknown.
  int64_t get(at::Tensor const& lse) {
    std::lock_guard const lock(mutex_);
    auto const at = numbers_.find(lse.storage().unsafeGetStorageImpl());
    return at == numbers_.end() || at->second.first.expired() ? 0 : at->second.second;
  }

  void clear() {
    std::lock_guard const lock(mutex_);
    numbers_.clear();
  }

 private:
  static constexpr size_t kFew = 16;
  using Memory = c10::weak_intrusive_ptr<c10::StorageImpl>;

  std::mutex mutex_;
  std::unordered_map<c10::StorageImpl const*, std::pair<Memory, int64_t>> numbers_;
  size_t limit_ = kFew;  // entries, after which those of freed memory are dropped
};

}  // namespace ringfa3::host
