// What a call does, as ringfa3/kernels/program.py records it: buffers to allocate, then launches,
// fills and copies. Tensors have numbers: a call's inputs first, then the program's buffers.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <c10/util/SmallVector.h>

#include <array>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "host/driver.h"

namespace ringfa3::host {

using Sizes = c10::SmallVector<int64_t, 4>;
using Tensors = c10::SmallVector<at::Tensor, 16>;

constexpr size_t kMaxWords = 1024;  // bytes of a kernel's arguments

struct Buffer {
  at::ScalarType dtype;
  Sizes sizes;
};

struct View {
  int64_t tensor, offset;  // elements from the tensor's first
  Sizes sizes, strides;

  at::Tensor of(Tensors const& tensors) const {
    at::Tensor const& x = tensors[tensor];
    if (offset == 0 && x.sizes() == sizes && x.strides() == strides) return x;
    return x.as_strided(sizes, strides, x.storage_offset() + offset);
  }
};

// The word at byte `at` becomes the address of a tensor's byte `offset`.
struct Patch {
  int64_t at, tensor, offset;
};

struct Launch {
  int (*entry)(void const* words, void* stream);  // ringfa3_forward, ...
  std::string name;                               // for an error
  std::vector<char> words;
  std::vector<Patch> patches;
};
struct Zero {
  View target;
};
struct Copy {
  View target, source;
};
using Step = std::variant<Launch, Zero, Copy>;

struct Program {
  std::vector<Buffer> buffers;
  std::vector<Step> steps;
  std::vector<View> outputs;
  std::vector<at::Tensor> tables;  // whose addresses the launches hold
  std::shared_ptr<void> kept;      // an object of Python that lives as long

  // The outputs of a call. `tensors` are its inputs; an undefined one has no launch that reads it.
  Tensors run(Tensors tensors, Stream stream) const {
    auto const options = tensors.front().options();
    for (Buffer const& buffer : buffers) {
      tensors.push_back(at::empty(buffer.sizes, options.dtype(buffer.dtype)));
    }
    for (Step const& step : steps) {
      if (auto const* launch = std::get_if<Launch>(&step)) {
        start(*launch, tensors, stream);
      } else if (auto const* zero = std::get_if<Zero>(&step)) {
        zero->target.of(tensors).zero_();
      } else {
        auto const& copy = std::get<Copy>(step);
        copy.target.of(tensors).copy_(copy.source.of(tensors));
      }
    }
    Tensors results;
    for (View const& output : outputs) results.push_back(output.of(tensors));
    return results;
  }

 private:
  static void start(Launch const& launch, Tensors const& tensors, Stream stream) {
    alignas(16) std::array<char, kMaxWords> words;
    std::memcpy(words.data(), launch.words.data(), launch.words.size());
    for (Patch const& patch : launch.patches) {
      auto const* begin = static_cast<char const*>(tensors[patch.tensor].const_data_ptr());
      char const* const address = begin + patch.offset;
      std::memcpy(words.data() + patch.at, &address, sizeof address);
    }
    int const status = launch.entry(words.data(), stream.handle);
    TORCH_CHECK(status == 0, launch.name, " could not be launched: CUDA error ", status);
  }
};

}  // namespace ringfa3::host
