// What a call does, as ringfa3/schedules/steps.py encodes it: buffers to allocate, then launches,
// tensor operations and, in a ring, calls of the driver. Tensors have numbers: a call's inputs
// first, then the program's buffers; its tables, from -1 down.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/sum.h>
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
#include "host/driver_calls.h"

namespace ringfa3::host {

using Sizes = c10::SmallVector<int64_t, 4>;
using Tensors = c10::SmallVector<at::Tensor, 16>;

constexpr size_t kMaxWords = 1024;  // bytes of a kernel's arguments

constexpr size_t kAlways = ~size_t{0};

// Memory that a call allocates before step `first` and frees behind step `last`: a result is not
// freed, and a buffer that no step uses is allocated only.
struct Buffer {
  at::ScalarType dtype;
  size_t first;
  Sizes sizes;
  size_t last = kAlways;
};

struct View {
  int64_t tensor, offset;  // elements from the tensor's first
  Sizes sizes, strides;

  // A table is given whole.
  at::Tensor of(Tensors const& tensors, std::vector<at::Tensor> const& tables) const {
    if (tensor < 0) return tables[-1 - tensor];
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
struct SumColumns {  // target[i] = the sum of source[i]
  View target, source;
};
using Step = std::variant<Launch, Zero, Copy, DriverCall, MemoryOps, SumColumns>;

// Calls visit(number) for each tensor that a step reads or writes; tables have negative numbers.
inline void visit_tensors(Step const& step, auto const& visit) {
  auto const views = [&](auto const&... view) { (visit(view.tensor), ...); };
  if (auto const* launch = std::get_if<Launch>(&step)) {
    for (Patch const& patch : launch->patches) visit(patch.tensor);
  } else if (auto const* zero = std::get_if<Zero>(&step)) {
    views(zero->target);
  } else if (auto const* copy = std::get_if<Copy>(&step)) {
    views(copy->target, copy->source);
  } else if (auto const* sum = std::get_if<SumColumns>(&step)) {
    views(sum->target, sum->source);
  }
}

struct Program {
  std::vector<Buffer> buffers;  // by `first`
  std::vector<Step> steps;
  std::vector<View> outputs;
  std::vector<at::Tensor> tables;  // memory of other calls, too, whose addresses the steps hold
  std::shared_ptr<void> held;      // an object of Python that lives as long

  // The outputs of a call. `tensors` are its inputs; an undefined one has no step that reads it.
  // waits: of a ring's earlier calls.
  //
  // Throws Refused: the driver refuses a call.
  Tensors run(Tensors tensors, Stream stream, Waits waits = {}) const {
    auto const options = tensors.front().options();
    size_t const inputs = tensors.size();
    auto const allocate = [&](size_t before) {
      for (size_t n = tensors.size() - inputs; n < buffers.size(); ++n) {
        if (buffers[n].first > before) return;
        tensors.push_back(at::empty(buffers[n].sizes, options.dtype(buffers[n].dtype)));
      }
    };
    auto const of = [&](View const& view) { return view.of(tensors, tables); };
    for (size_t i = 0; i < steps.size(); ++i) {
      allocate(i);
      Step const& step = steps[i];
      if (auto const* launch = std::get_if<Launch>(&step)) {
        start(*launch, tensors, stream);
      } else if (auto const* call = std::get_if<DriverCall>(&step)) {
        call->run();
      } else if (auto const* operations = std::get_if<MemoryOps>(&step)) {
        operations->run(waits);
      } else if (auto const* zero = std::get_if<Zero>(&step)) {
        of(zero->target).zero_();
      } else if (auto const* copy = std::get_if<Copy>(&step)) {
        of(copy->target).copy_(of(copy->source));
      } else {
        auto const& sum = std::get<SumColumns>(step);
        at::Tensor target = of(sum.target);
        at::sum_out(target, of(sum.source), 1);
      }
      for (size_t n = 0; n < buffers.size(); ++n) {
        if (buffers[n].last == i) tensors[inputs + n].reset();
      }
    }
    allocate(kAlways);
    Tensors results;
    for (View const& output : outputs) results.push_back(of(output));
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
