// What a call does, as ringfa3/schedules/steps.py encodes it: steps that allocate, launch, compute
// and, in a ring, call the driver. Tensors have numbers: a call's inputs first, then what it
// allocates; memory of the program, from -1 down.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/sum.h>
#include <c10/util/Exception.h>
#include <c10/util/SmallVector.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "host/driver.h"

namespace ringfa3::host {

using Tensors = c10::SmallVector<at::Tensor, 16>;

constexpr size_t kMaxArguments = 1024;                             // bytes of a kernel's arguments
constexpr int64_t kUnknown = std::numeric_limits<int64_t>::min();  // address of no symbol

enum Opcode : int64_t {
  kLaunch,
  kZero,
  kCopy,
  kDriverCall,
  kMemoryOps,
  kSumColumns,
  kAllocate,
  kFree,
  kAdd,
  kGatherRows,
  kAddRows,
  kExchange,
  kWaitExchange
};

// What sends and receives the messages of one call of a ring. Exchanges have numbers, from 0 on.
class Messages {
 public:
  virtual ~Messages() = default;
  // tensors: those that it sends, then those that it receives
  virtual void start(int64_t exchange, Tensors tensors) = 0;
  // On return, later work of the current stream may use the tensors.
  virtual void wait(int64_t exchange) = 0;
};

// Reads words of a program, in place.
class Reader {
 public:
  explicit Reader(std::vector<int64_t> const& words)
      : at_(words.data()), end_(words.data() + words.size()) {}

  int64_t word() { return *take(1); }
  at::IntArrayRef numbers(int64_t count) { return {take(count), static_cast<size_t>(count)}; }
  // Words with bytes, after their count.
  std::string_view bytes() {
    int64_t const count = word();
    return {reinterpret_cast<char const*>(take((count + 7) / 8)), static_cast<size_t>(count)};
  }

 private:
  int64_t const* take(int64_t count) {
    TORCH_CHECK(0 <= count && count <= end_ - at_, "a program ends early");
    return std::exchange(at_, at_ + count);
  }

  int64_t const *at_, *end_;
};

struct Program {
  std::vector<int64_t> words;
  std::vector<at::Tensor> memory;  // of other calls, too; steps have addresses of some
  std::shared_ptr<void> held;      // an object of Python that lives as long

  // Adds addresses to the words at some numbers, in place. symbols: for each of these words the
  // number of its address, or -1 - n for memory n.
  //
  // Returns whether all of them are known; else the words are in no defined state.
  bool link(at::IntArrayRef at, at::IntArrayRef symbols, at::IntArrayRef addresses) {
    TORCH_CHECK(at.size() == symbols.size(), "a program has ", at.size(), " words to link, and ",
                symbols.size(), " symbols");
    c10::SmallVector<int64_t, 8> of_memory;
    for (at::Tensor const& x : memory) {
      of_memory.push_back(reinterpret_cast<int64_t>(x.const_data_ptr()));
    }
    for (size_t i = 0; i < at.size(); ++i) {
      int64_t const symbol = symbols[i], n = -1 - symbol;
      TORCH_CHECK(0 <= at[i] && at[i] < static_cast<int64_t>(words.size()) &&
                      n < static_cast<int64_t>(of_memory.size()),
                  "a program links word ", at[i], " to symbol ", symbol, ", beyond its end");
      if (n < 0 &&
          (symbol >= static_cast<int64_t>(addresses.size()) || addresses[symbol] == kUnknown)) {
        return false;
      }
      words[at[i]] += n < 0 ? addresses[symbol] : of_memory[n];
    }
    return true;
  }

  // The results of a call. `tensors` are its inputs; an undefined one has no step that reads it.
  // waits: of a ring's earlier calls. messages: of a call that sends some.
  //
  // Throws Refused: the driver refuses a call.
  Tensors run(Tensors tensors, Stream stream, Waits waits = {},
              Messages* messages = nullptr) const {
    auto const options = tensors.front().options();
    Reader in(words);
    auto const view = [&] { return read_view(in, tensors); };
    for (int64_t left = in.word(); left; --left) {
      switch (int64_t const opcode = in.word()) {
        case kAllocate: {
          auto const dtype = static_cast<at::ScalarType>(in.word());
          tensors.push_back(at::empty(in.numbers(in.word()), options.dtype(dtype)));
          break;
        }
        case kFree:
          tensors[in.word()].reset();
          break;
        case kLaunch:
          launch(in, tensors, stream);
          break;
        case kDriverCall:
          call_driver(in);
          break;
        case kMemoryOps:
          issue_memory_ops(in, waits);
          break;
        case kZero:
          view().zero_();
          break;
        case kCopy: {
          at::Tensor target = view();
          target.copy_(view());
          break;
        }
        case kSumColumns: {
          at::Tensor target = view();
          at::sum_out(target, view(), 1);  // target[i] = the sum of source[i]
          break;
        }
        case kAdd: {
          at::Tensor target = view();
          target.add_(view());
          break;
        }
        case kGatherRows: {  // target[i] = source[index[i]]
          at::Tensor target = view(), source = view();
          at::index_select_out(target, source, 0, view());
          break;
        }
        case kAddRows: {  // target[index[i]] += source[i]
          at::Tensor target = view(), source = view();
          target.index_add_(0, view(), source);
          break;
        }
        case kExchange: {
          TORCH_CHECK(messages, "a program sends messages, and its call has none");
          int64_t const exchange = in.word();
          Tensors moved;
          for (int64_t more = in.word(); more; --more) moved.push_back(view());
          messages->start(exchange, std::move(moved));
          break;
        }
        case kWaitExchange:
          messages->wait(in.word());
          break;
        default:
          TORCH_CHECK(false, "a program has an unknown step, ", opcode);
      }
    }
    Tensors results;
    for (int64_t left = in.word(); left; --left) results.push_back(view());
    return results;
  }

 private:
  // (tensor, offset in elements from its first, dimensions, sizes, strides). Memory of the program
  // is given whole.
  at::Tensor read_view(Reader& in, Tensors const& tensors) const {
    int64_t const number = in.word(), offset = in.word(), dims = in.word();
    at::IntArrayRef const sizes = in.numbers(dims), strides = in.numbers(dims);
    if (number < 0) return memory.at(static_cast<size_t>(-1 - number));
    at::Tensor const& x = tensors[number];
    if (offset == 0 && x.sizes() == sizes && x.strides() == strides) return x;
    return x.as_strided(sizes, strides, x.storage_offset() + offset);
  }

  // (entry, name, arguments, patches). A patch writes at a byte the address of a tensor's byte.
  static void launch(Reader& in, Tensors const& tensors, Stream stream) {
    auto const entry = reinterpret_cast<int (*)(void const* arguments, void* stream)>(in.word());
    auto const name = in.bytes(), given = in.bytes();
    TORCH_CHECK(given.size() <= kMaxArguments, "a launch has too many arguments");
    alignas(16) std::array<char, kMaxArguments> arguments;
    std::memcpy(arguments.data(), given.data(), given.size());
    for (int64_t left = in.word(); left; --left) {
      int64_t const at = in.word(), tensor = in.word(), offset = in.word();
      auto const* begin = static_cast<char const*>(tensors[tensor].const_data_ptr());
      char const* const address = begin + offset;
      std::memcpy(arguments.data() + at, &address, sizeof address);
    }
    int const status = entry(arguments.data(), stream.handle);
    TORCH_CHECK(status == 0, name, " could not be launched: CUDA error ", status);
  }

  // (entry, name, arguments)
  static void call_driver(Reader& in) {
    auto const entry = reinterpret_cast<DriverEntry>(in.word());
    auto const name = in.bytes();
    at::IntArrayRef const x = in.numbers(kDriverArguments);
    if (int const status = entry(x[0], x[1], x[2], x[3])) throw Refused(std::string(name), status);
  }

  // (entry, name, stream, number of operations, operations, counts): cuStreamBatchMemOp. The value
  // at word `at` of a count becomes the number of waits of its stream.
  static void issue_memory_ops(Reader& in, Waits& waits) {
    auto const entry = reinterpret_cast<DriverEntry>(in.word());
    auto const name = in.bytes();
    int64_t const stream = in.word(), number = in.word();
    at::IntArrayRef const given = in.numbers(number * kOperationWords);
    c10::SmallVector<int64_t, 16 * kOperationWords> issued(given.begin(), given.end());
    for (int64_t left = in.word(); left; --left) {
      int64_t const at = in.word(), of_stream = in.word();
      issued[at] = static_cast<int64_t>(++waits[of_stream] & 0xffffffff);
    }
    auto const begin = reinterpret_cast<int64_t>(issued.data());
    if (int const status = entry(stream, number, begin, 0)) {
      throw Refused(std::string(name), status);
    }
  }
};

}  // namespace ringfa3::host
