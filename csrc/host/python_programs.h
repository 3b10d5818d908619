// Programs as objects of Python, which links and runs them: functions of the module.
#pragma once

#include <Python.h>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <deque>
#include <memory>
#include <utility>

#include "host/ops.h"

namespace ringfa3::host {

namespace py = pybind11;

// What Python raises.
[[noreturn]] inline void throw_raised() {
  python_error raised;
  raised.persist();
  throw raised;
}

// The object, which is not null.
inline py::object checked(PyObject* result) {
  if (!result) throw_raised();
  return py::reinterpret_steal<py::object>(result);
}

struct WithoutGil {
  PyThreadState* const state = PyEval_SaveThread();
  ~WithoutGil() { PyEval_RestoreThread(state); }
};

// A buffer of Python, for as long as this lives.
struct Buffer {
  Py_buffer view{};

  Buffer() = default;
  Buffer(Buffer const&) = delete;
  ~Buffer() { PyBuffer_Release(&view); }  // does nothing without an object

  at::IntArrayRef numbers() const {
    return {static_cast<int64_t const*>(view.buf), static_cast<size_t>(view.len) / sizeof(int64_t)};
  }
};

// The program in what `program` gives; null, and an error of Python, for another object.
inline std::shared_ptr<Program const> held_program(PyObject* capsule) {
  auto* const held =
      static_cast<std::shared_ptr<Program const>*>(PyCapsule_GetPointer(capsule, nullptr));
  return held ? *held : nullptr;
}

// program(words, at, symbols, addresses, memory: tuple[torch.Tensor, ...], held: object), which
// Python holds; None: a symbol has no address. See `Program::link`; the first four are buffers of
// int64.
inline PyObject* program(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  Buffer words, at, symbols, addresses;
  PyObject *memory, *held;
  if (!PyArg_ParseTuple(args, "y*y*y*y*O!O", &words.view, &at.view, &symbols.view, &addresses.view,
                        &PyTuple_Type, &memory, &held)) {
    return nullptr;
  }
  auto made = std::make_shared<Program>();
  made->words.assign(words.numbers().begin(), words.numbers().end());
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(memory); ++i) {
    made->memory.push_back(THPVariable_Unpack(PyTuple_GET_ITEM(memory, i)));
  }
  if (!made->link(at.numbers(), symbols.numbers(), addresses.numbers())) Py_RETURN_NONE;
  Py_INCREF(held);
  made->held = std::shared_ptr<PyObject>(held, [](PyObject* object) {
    py::gil_scoped_acquire const gil;
    Py_DECREF(object);
  });
  auto* const kept = new std::shared_ptr<Program const>(std::move(made));
  return PyCapsule_New(kept, nullptr, [](PyObject* capsule) {
    delete static_cast<std::shared_ptr<Program const>*>(PyCapsule_GetPointer(capsule, nullptr));
  });
  END_HANDLE_TH_ERRORS
}

// to_device(arrays: list[buffer], device: int) -> list[torch.Tensor], their bytes in one piece
// of device memory, by one copy: `to_device` of ringfa3/kernels/uploads.py.
inline PyObject* to_device(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  PyObject* arrays;
  int index;
  if (!PyArg_ParseTuple(args, "Oi", &arrays, &index)) return nullptr;
  auto const given = py::reinterpret_borrow<py::list>(arrays);
  std::deque<Buffer> buffers;
  int64_t size = 0;
  for (py::handle const array : given) {
    Py_buffer& view = buffers.emplace_back().view;
    if (PyObject_GetBuffer(array.ptr(), &view, PyBUF_SIMPLE)) return nullptr;
    size += view.len;
  }
  at::Tensor memory;
  {  // CUDA may block here until a stream has waited for other ranks, which Python threads watch
    WithoutGil const released;
    at::AutoDispatchBelowADInplaceOrView const below;
    at::Device const device(host().device, static_cast<c10::DeviceIndex>(index));
    auto const bytes = at::TensorOptions().dtype(at::kByte);
    // PyTorch reuses pinned memory only after the copy that reads it
    at::Tensor const source = at::empty({size}, bytes.pinned_memory(device.is_cuda()));
    auto* to = static_cast<char*>(source.mutable_data_ptr());
    for (Buffer const& x : buffers) {
      to = std::copy_n(static_cast<char const*>(x.view.buf), x.view.len, to);
    }
    memory = at::empty({size}, bytes.device(device));
    memory.copy_(source, /*non_blocking=*/true);
  }
  py::list parts(buffers.size());
  int64_t begin = 0;
  for (size_t i = 0; i < buffers.size(); ++i) {
    int64_t const length = buffers[i].view.len;
    at::Tensor const part = memory.as_strided({length}, {1}, begin);
    parts[i] = py::reinterpret_steal<py::object>(THPVariable_Wrap(part));
    begin += length;
  }
  return parts.release().ptr();
  END_HANDLE_TH_ERRORS
}

// words(program) -> bytes
inline PyObject* words_of(PyObject*, PyObject* capsule) {
  auto const held = held_program(capsule);
  if (!held) return nullptr;
  auto const size = static_cast<Py_ssize_t>(held->words.size() * sizeof(int64_t));
  return PyBytes_FromStringAndSize(reinterpret_cast<char const*>(held->words.data()), size);
}

// An object of Python with the methods of `Messages`.
class PythonMessages : public Messages {
 public:
  explicit PythonMessages(PyObject* messages) : messages_(messages) {}

  void start(int64_t exchange, Tensors tensors) override {
    py::gil_scoped_acquire const gil;
    py::list moved;
    for (auto& x : tensors) moved.append(checked(THPVariable_Wrap(std::move(x))));
    checked(PyObject_CallMethod(messages_, "start", "LO", static_cast<long long>(exchange),
                                moved.ptr()));
  }

  void wait(int64_t exchange) override {
    py::gil_scoped_acquire const gil;
    checked(PyObject_CallMethod(messages_, "wait", "L", static_cast<long long>(exchange)));
  }

 private:
  PyObject* const messages_;
};

// run(program, inputs: tuple[torch.Tensor | None, ...], stream: int, waits: tuple[int, int, int],
// messages: object = None) gives the outputs, or (name, status) of a call that the driver refuses.
// It raises what `messages` raises.
inline PyObject* run(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  PyObject *capsule, *inputs, *sender = Py_None;
  unsigned long long stream, compute, kv, gradients;
  if (!PyArg_ParseTuple(args, "OO!K(KKK)|O", &capsule, &PyTuple_Type, &inputs, &stream, &compute,
                        &kv, &gradients, &sender)) {
    return nullptr;
  }
  auto const program = held_program(capsule);
  if (!program) return nullptr;
  Tensors tensors;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(inputs); ++i) {
    PyObject* const input = PyTuple_GET_ITEM(inputs, i);
    tensors.push_back(input == Py_None ? Tensor() : THPVariable_Unpack(input));
  }
  if (!wanted) ++host().counts.replayed;  // else the call counts as one that asks for a program
  Tensors results;
  PythonMessages messages(sender);
  try {
    WithoutGil const released;
    at::AutoDispatchBelowADInplaceOrView const below;
    results = program->run(std::move(tensors), {reinterpret_cast<void*>(stream), 0},
                           {compute, kv, gradients}, sender == Py_None ? nullptr : &messages);
  } catch (Refused const& refused) {
    return Py_BuildValue("(si)", refused.what(), refused.status);
  }
  py::tuple wrapped(results.size());
  for (size_t i = 0; i < results.size(); ++i) {
    wrapped[i] = py::reinterpret_steal<py::object>(THPVariable_Wrap(std::move(results[i])));
  }
  return wrapped.release().ptr();
  END_HANDLE_TH_ERRORS
}

}  // namespace ringfa3::host
