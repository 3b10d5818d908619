// Objects of Python that the library calls, from any thread.
#pragma once

#include <Python.h>

#include <ATen/ops/from_blob.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "host/begin_again.h"
#include "host/ring_calls.h"

namespace ringfa3::host {

namespace py = pybind11;

// A `ReplayableCall` of Python, which may be gone: then Python runs the call.
class PythonCall : public ReplayableCall {
 public:
  // Needs the GIL.
  explicit PythonCall(PyObject* call) : weak_(PyWeakref_NewRef(call, nullptr)) {
    if (!weak_) throw_raised();
  }
  ~PythonCall() override {
    if (!Py_IsInitialized()) return;  // Python has ended
    py::gil_scoped_acquire const gil;
    Py_DECREF(weak_);
  }

  std::optional<ProgramLaunch> begin(at::Tensor const& lse) override {
    py::gil_scoped_acquire const gil;
    auto const call = alive();
    if (!call) return std::nullopt;
    return begin_again(call, lse);
  }

  void refused(std::string const& name, int status) override {
    py::gil_scoped_acquire const gil;
    if (auto const call = alive()) {
      checked(PyObject_CallMethod(call.ptr(), "refused", "si", name.c_str(), status));
    }
  }

  void failed(bool memory, std::string const& text) override {
    py::gil_scoped_acquire const gil;
    if (auto const call = alive()) {
      PyObject* const of_memory = memory ? Py_True : Py_False;
      checked(PyObject_CallMethod(call.ptr(), "failed", "Os", of_memory, text.c_str()));
    }
  }

 private:
  // Calling a weak reference is in every version of Python; PyWeakref_GetObject goes in 3.15, and
  // PyWeakref_GetRef came in 3.13.
  py::object alive() const {
    auto const call = checked(PyObject_CallNoArgs(weak_));
    return call.is_none() ? py::object() : call;
  }

  PyObject* const weak_;
};

// `_prepared_calls` of ringfa3/ring/op.py.
inline PyObject* find_prepared = nullptr;

inline std::vector<PreparedCall> prepared_calls(FirstCall const& call) {
  py::gil_scoped_acquire const gil;
  py::tuple inputs(call.inputs.size());
  for (size_t i = 0; i < call.inputs.size(); ++i)
    inputs[i] = checked(THPVariable_Wrap(call.inputs[i]));
  auto const prepared = checked(PyObject_CallFunction(
      find_prepared, "sy#OLdOs#KK", call.op, call.layouts.data(),
      static_cast<Py_ssize_t>(call.layouts.size()), inputs.ptr(), static_cast<long long>(call.plan),
      call.scale, call.deterministic ? Py_True : Py_False, call.transport.data(),
      static_cast<Py_ssize_t>(call.transport.size()),
      reinterpret_cast<unsigned long long>(call.stream.handle),
      static_cast<unsigned long long>(call.stream.id)));
  std::vector<PreparedCall> found;
  for (py::handle const each : prepared) {
    found.push_back({integer(item(each, 0)), item(each, 1).cast<std::string>(),
                     std::make_shared<PythonCall>(item(each, 2).ptr())});
  }
  return found;
}

// ContextPlan.from_handle, which raises for a plan that is gone.
inline PyObject* find_plan = nullptr;

// A tensor without data, with which the plan lives.
inline at::Tensor keep_plan(int64_t handle) {
  static char nothing;
  py::gil_scoped_acquire const gil;
  PyObject* const plan = PyObject_CallFunction(find_plan, "L", static_cast<long long>(handle));
  if (!plan) throw_raised();
  auto const release = [plan](void*) {
    if (!Py_IsInitialized()) return;  // Python has ended
    py::gil_scoped_acquire const again;
    Py_DECREF(plan);
  };
  return at::from_blob(&nothing, {0}, release, at::kByte);
}

}  // namespace ringfa3::host
