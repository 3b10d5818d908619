// What a call's launches depend on, besides addresses and values: calls with equal keys launch the
// same kernels with the same words.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <bit>
#include <cstdint>
#include <cstring>
#include <string_view>

namespace ringfa3::host {

class Key {
 public:
  void add(int64_t word) { words_.push_back(word); }
  void add(double number) { add(std::bit_cast<int64_t>(number)); }

  // Type, shape, strides, and where the first byte lies in 16 bytes, which TMA addresses; as
  // `layouts_of` of ringfa3/schedules/link.py.
  void add(at::Tensor const& x) {
    if (!x.defined()) return add(int64_t{-1});
    auto const begin = reinterpret_cast<uintptr_t>(x.const_data_ptr());
    add(x.dim() | static_cast<int64_t>(x.scalar_type()) << 8 |
        static_cast<int64_t>(begin % 16) << 16);
    words_.append(x.sizes().begin(), x.sizes().end());
    words_.append(x.strides().begin(), x.strides().end());
  }

  // Up to two tensors of lengths: programs of the key go when either changes. See `Programs`.
  void add_document(int64_t id) {
    add(id);
    documents_[documents_[0] ? 1 : 0] = id;
  }
  bool has_document(int64_t id) const { return documents_[0] == id || documents_[1] == id; }

  // The words from a number on, as bytes.
  std::string_view from(size_t first) const {
    return {reinterpret_cast<char const*>(words_.data() + first),
            (words_.size() - first) * sizeof(int64_t)};
  }
  size_t size() const { return words_.size(); }

  // The key with another first word, and other words from number `first` on, as bytes.
  Key with(int64_t word, size_t first, std::string_view bytes) const {
    Key made;
    made.words_.append(words_.begin(), words_.begin() + first);
    made.words_[0] = word;
    made.words_.resize(first + bytes.size() / sizeof(int64_t));
    std::memcpy(made.words_.data() + first, bytes.data(), bytes.size());
    return made;
  }

  bool operator==(Key const& other) const { return words_ == other.words_; }

  size_t hash() const {
    uint64_t mixed = words_.size();
    for (int64_t const word : words_) {
      mixed = (mixed ^ static_cast<uint64_t>(word)) * 0x9e3779b97f4a7c15;
      mixed ^= mixed >> 32;
    }
    return mixed;
  }

 private:
  c10::SmallVector<int64_t, 80> words_;
  int64_t documents_[2] = {0, 0};  // ids of tensors on the device, 0 for none
};

struct KeyHash {
  size_t operator()(Key const& key) const { return key.hash(); }
};

}  // namespace ringfa3::host
