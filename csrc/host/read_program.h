// Makes programs of the words of ringfa3/schedules/steps.py.
#pragma once

#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/python_variable.h>

#include <memory>
#include <utility>

#include "host/program.h"

namespace ringfa3::host {

namespace py = pybind11;

// Reads a list of 64-bit integers.
class Reader {
 public:
  Reader(char const* begin, Py_ssize_t bytes) : at_(begin), end_(begin + bytes) {}

  int64_t word() {
    int64_t value;
    std::memcpy(&value, take(sizeof value), sizeof value);
    return value;
  }
  Sizes sizes() {
    Sizes read(static_cast<size_t>(word()));
    for (int64_t& size : read) size = word();
    return read;
  }
  View view() {
    int64_t const tensor = word(), offset = word();
    Sizes sizes = this->sizes();
    return {tensor, offset, std::move(sizes), this->sizes()};
  }
  std::vector<char> bytes() {
    auto const count = static_cast<size_t>(word());
    char const* const begin = take((count + 7) / 8 * 8);
    return {begin, begin + count};
  }

 private:
  char const* take(size_t bytes) {
    TORCH_CHECK(static_cast<size_t>(end_ - at_) >= bytes, "a program ends early");
    return std::exchange(at_, at_ + bytes);
  }

  char const *at_, *end_;
};

enum Kind : int64_t { kLaunch, kZero, kCopy, kDriverCall, kMemoryOps, kSumColumns };

inline Step read_step(Reader& in, PyObject* names) {
  switch (in.word()) {
    case kLaunch: {
      Launch launch{};
      launch.entry = reinterpret_cast<int (*)(void const*, void*)>(in.word());
      launch.name = PyUnicode_AsUTF8(PyTuple_GetItem(names, in.word()));
      launch.words = in.bytes();
      TORCH_CHECK(launch.words.size() <= kMaxWords, "a launch has too many arguments");
      launch.patches.resize(static_cast<size_t>(in.word()));
      for (Patch& patch : launch.patches) {
        patch.at = in.word(), patch.tensor = in.word(), patch.offset = in.word();
      }
      return launch;
    }
    case kZero:
      return Zero{in.view()};
    case kCopy: {
      View target = in.view();
      return Copy{std::move(target), in.view()};
    }
    case kDriverCall: {
      DriverCall call{};
      call.entry = reinterpret_cast<DriverEntry>(in.word());
      call.name = PyUnicode_AsUTF8(PyTuple_GetItem(names, in.word()));
      for (uint64_t& word : call.words) word = static_cast<uint64_t>(in.word());
      return call;
    }
    case kMemoryOps: {
      MemoryOps batch{};
      batch.entry = reinterpret_cast<DriverEntry>(in.word());
      batch.name = PyUnicode_AsUTF8(PyTuple_GetItem(names, in.word()));
      batch.stream = static_cast<uint64_t>(in.word());
      batch.number = static_cast<uint64_t>(in.word());
      batch.operations = in.bytes();
      batch.counts.resize(static_cast<size_t>(in.word()));
      for (auto& [at, stream] : batch.counts) at = in.word(), stream = in.word();
      return batch;
    }
    case kSumColumns: {
      View target = in.view();
      return SumColumns{std::move(target), in.view()};
    }
    default:
      TORCH_CHECK(false, "a program has a step of an unknown kind");
  }
}

// A program from (words: bytes, names: tuple[str, ...], tables: tuple[torch.Tensor, ...], held:
// object). Null, and an error of Python, for other arguments.
inline std::shared_ptr<Program> read_program(PyObject* args) {
  char const* begin;
  Py_ssize_t bytes;
  PyObject *names, *tables, *held;
  if (!PyArg_ParseTuple(args, "y#O!O!O", &begin, &bytes, &PyTuple_Type, &names, &PyTuple_Type,
                        &tables, &held)) {
    return nullptr;
  }
  Reader in(begin, bytes);
  auto program = std::make_shared<Program>();
  program->buffers.resize(static_cast<size_t>(in.word()));
  for (Buffer& buffer : program->buffers) {
    buffer.dtype = static_cast<at::ScalarType>(in.word());
    buffer.first = static_cast<size_t>(in.word());
    buffer.sizes = in.sizes();
  }
  auto const inputs = in.word(), steps = in.word();
  auto const of_buffer = [&](int64_t tensor, size_t last) {
    if (tensor >= inputs) program->buffers.at(static_cast<size_t>(tensor - inputs)).last = last;
  };
  for (int64_t i = 0; i < steps; ++i) {
    program->steps.push_back(read_step(in, names));
    visit_tensors(program->steps.back(),
                  [&](int64_t tensor) { of_buffer(tensor, static_cast<size_t>(i)); });
  }
  auto const outputs = in.word();
  for (int64_t i = 0; i < outputs; ++i) {
    program->outputs.push_back(in.view());
    of_buffer(program->outputs.back().tensor, kAlways);
  }
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tables); ++i) {
    program->tables.push_back(THPVariable_Unpack(PyTuple_GET_ITEM(tables, i)));
  }
  Py_INCREF(held);
  program->held = std::shared_ptr<PyObject>(held, [](PyObject* object) {
    py::gil_scoped_acquire const gil;
    Py_DECREF(object);
  });
  return program;
}

}  // namespace ringfa3::host
