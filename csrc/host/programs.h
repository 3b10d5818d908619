// The programs that calls replay, by key, and which tensors of cumulative lengths they belong to.
#pragma once

#include <c10/core/TensorImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "host/key.h"
#include "host/program.h"

namespace ringfa3::host {

constexpr size_t kMaxPrograms = 256;   // beyond that the one that was used least recently goes
constexpr size_t kMaxDocuments = 256;  // tensors of lengths; as for programs

// A program, or for a call that Python always runs none.
using Found = std::optional<std::shared_ptr<Program const>>;

// Ops release the GIL, so calls of several threads look up at once. Freeing a tensor may take the
// GIL: nothing is freed under the mutex, and nobody who holds it takes the GIL.
class Programs {
 public:
  Found find(Key const& key) {
    std::lock_guard const lock(mutex_);
    auto const at = entries_.find(key);
    if (at == entries_.end()) return std::nullopt;
    at->second.used = ++clock_;
    return at->second.program;
  }

  void put(Key key, std::shared_ptr<Program const> program) {
    std::vector<std::shared_ptr<Program const>> dropped;
    std::vector<Tensor> expired;
    std::lock_guard const lock(mutex_);
    forget_expired(expired);
    for (int64_t const id : std::exchange(outdated_, {})) {
      for (auto at = entries_.begin(); at != entries_.end();) {
        if (!at->first.has_document(id)) {
          ++at;
          continue;
        }
        dropped.push_back(std::move(at->second.program));
        at = entries_.erase(at);
      }
    }
    for (auto& document : documents_) {
      document.second.has_programs |= key.has_document(document.second.id);
    }
    Entry& entry = entries_[std::move(key)];
    dropped.push_back(std::exchange(entry.program, std::move(program)));
    entry.used = ++clock_;
    if (entries_.size() > kMaxPrograms) {
      auto const oldest = std::min_element(
          entries_.begin(), entries_.end(),
          [](auto const& a, auto const& b) { return a.second.used < b.second.used; });
      dropped.push_back(std::move(oldest->second.program));
      entries_.erase(oldest);
    }
  }

  void clear() {
    std::unordered_map<Key, Entry, KeyHash> entries;
    Documents documents;
    std::lock_guard const lock(mutex_);
    entries.swap(entries_);
    documents.swap(documents_);
    outdated_.clear();
  }

  size_t size() {
    std::lock_guard const lock(mutex_);
    return entries_.size();
  }

  // A number of a tensor and its version, above 0. Another tensor, and other values in this one,
  // get another number.
  int64_t document(at::Tensor const& x) {
    c10::TensorImpl* const impl = x.unsafeGetTensorImpl();
    auto const version = impl->version_counter().current_version();
    std::vector<Tensor> expired;
    std::lock_guard const lock(mutex_);
    auto const at = documents_.find(impl);
    if (at != documents_.end()) {  // the weak reference keeps its address from another tensor
      at->second.used = ++clock_;
      if (at->second.version == version) return at->second.id;
      if (std::exchange(at->second.has_programs, false)) outdated_.push_back(at->second.id);
      at->second.version = version;
      return at->second.id = ++last_id_;
    }
    if (documents_.size() >= kMaxDocuments) forget_expired(expired);
    if (documents_.size() >= kMaxDocuments) {
      auto const oldest = std::min_element(
          documents_.begin(), documents_.end(),
          [](auto const& a, auto const& b) { return a.second.used < b.second.used; });
      forget(oldest, expired);
    }
    documents_.emplace(impl, Document{Tensor(x.getIntrusivePtr()), version, ++last_id_, ++clock_});
    return last_id_;
  }

 private:
  using Tensor = c10::weak_intrusive_ptr<c10::TensorImpl, at::UndefinedTensorImpl>;
  struct Entry {
    std::shared_ptr<Program const> program;
    uint64_t used = 0;
  };
  struct Document {
    Tensor tensor;
    uint32_t version;
    int64_t id;
    uint64_t used;
    bool has_programs = false;  // of this version
  };
  using Documents = std::unordered_map<c10::TensorImpl*, Document>;

  // Moves documents whose tensors are gone to `expired`.
  void forget_expired(std::vector<Tensor>& expired) {
    for (auto at = documents_.begin(); at != documents_.end();) {
      if (!at->second.tensor.expired()) {
        ++at;
        continue;
      }
      at = forget(at, expired);
    }
  }

  // Moves the document's reference to `freed`; its programs go at the next `put`.
  Documents::iterator forget(Documents::iterator at, std::vector<Tensor>& freed) {
    if (at->second.has_programs) outdated_.push_back(at->second.id);
    freed.push_back(std::move(at->second.tensor));
    return documents_.erase(at);
  }

  std::mutex mutex_;
  std::unordered_map<Key, Entry, KeyHash> entries_;
  Documents documents_;
  std::vector<int64_t> outdated_;  // ids of documents whose programs go at the next `put`
  uint64_t clock_ = 0;
  int64_t last_id_ = 0;
};

}  // namespace ringfa3::host
