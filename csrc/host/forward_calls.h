// Numbers of forward calls of rings, by the LSE that they have returned. A backward names its
// forward call by its LSE, also after a checkpoint or a compiled graph.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <mutex>
#include <unordered_map>
#include <utility>

namespace ringfa3::host {

// As `MemoryCache` of ringfa3/tensor_cache.py, which has those of calls that Python began.
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
