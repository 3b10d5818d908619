// The library as a module of Python, `ringfa3_host`. It is one translation unit, because PyTorch's
// headers take most of the time to compile it.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cmath>
#include <string>

#include "host/ops.h"
#include "host/python_objects.h"
#include "host/python_programs.h"

namespace {

using namespace ringfa3::host;

struct Settings {
  double scale;
  int64_t left, right;
  bool deterministic;
};

// Keeps the program of this thread's call; null: Python always runs such calls.
PyObject* keep_program(std::shared_ptr<Program const> program) {
  TORCH_CHECK(wanted, "no call of this thread asks for a program");
  host().programs.put(std::move(*wanted), std::move(program));
  wanted.reset();
  Py_RETURN_NONE;
}

// keep(program), for the call of this thread that asks for it
PyObject* keep(PyObject*, PyObject* capsule) {
  HANDLE_TH_ERRORS
  auto held = held_program(capsule);
  return held ? keep_program(std::move(held)) : nullptr;
  END_HANDLE_TH_ERRORS
}

PyObject* decline(PyObject*, PyObject*) {
  HANDLE_TH_ERRORS
  return keep_program(nullptr);
  END_HANDLE_TH_ERRORS
}

// Whether the call that this thread runs asks for a program.
PyObject* is_wanted(PyObject*, PyObject*) { return PyBool_FromLong(wanted.has_value()); }

// Whether the ring call that this thread runs may be kept.
PyObject* ring_wanted(PyObject*, PyObject*) { return PyBool_FromLong(wanted_ring.has_value()); }

PyObject* keep_ring_call(std::shared_ptr<ReplayableCall> call) {
  TORCH_CHECK(wanted_ring, "no ring call of this thread may be kept");
  Key key = std::move(*wanted_ring);
  wanted_ring.reset();
  {
    WithoutGil const released;
    host().ring_calls.put(std::move(key), std::move(call));
  }
  Py_RETURN_NONE;
}

// keep_ring(call: ReplayableCall), for the ring call that this thread runs
PyObject* keep_ring(PyObject*, PyObject* call) {
  HANDLE_TH_ERRORS
  return keep_ring_call(std::make_shared<PythonCall>(call));
  END_HANDLE_TH_ERRORS
}

// keep_local(program), as long as Python holds it, for the ring call that this thread runs
PyObject* keep_local(PyObject*, PyObject* capsule) {
  HANDLE_TH_ERRORS
  auto const held = held_program(capsule);
  return held ? keep_ring_call(std::make_shared<LocalCall>(held)) : nullptr;
  END_HANDLE_TH_ERRORS
}

// find_plans(find: Callable[[int], ContextPlan]): the plan of a handle
PyObject* find_plans(PyObject*, PyObject* find) {
  Py_INCREF(find);
  Py_XSETREF(find_plan, find);
  host().keep_plan = keep_plan;
  Py_RETURN_NONE;
}

// on_first_call(find): gives the calls of a prepared plan that the library does not know; None:
// Python runs these
PyObject* on_first_call(PyObject*, PyObject* find) {
  Py_INCREF(find);
  Py_XSETREF(find_prepared, find);
  host().prepared_calls = find == Py_None ? nullptr : prepared_calls;
  Py_RETURN_NONE;
}

// begin_call(group: RingGroup, agreed: AgreementSnapshot, lse: torch.Tensor | None) -> int, the
// number of the call; None: Python must begin it
PyObject* begin_ring_call(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  PyObject *group, *agreed, *lse;
  if (!PyArg_ParseTuple(args, "OOO", &group, &agreed, &lse)) return nullptr;
  auto const number =
      begin_call(group, agreed, lse == Py_None ? Tensor() : THPVariable_Unpack(lse));
  if (!number) Py_RETURN_NONE;
  return PyLong_FromLongLong(*number);
  END_HANDLE_TH_ERRORS
}

// forward_call(lse: torch.Tensor) -> int: its number, 0 if the library did not begin it
PyObject* forward_call(PyObject*, PyObject* lse) {
  HANDLE_TH_ERRORS
  return PyLong_FromLongLong(host().forward_calls.get(THPVariable_Unpack(lse)));
  END_HANDLE_TH_ERRORS
}

// start(device: str, current_stream: int, current_context: int, is_capturing: int, stream_id: int,
// lengths_by_value: bool)
PyObject* start_kernels(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  char const* device;
  unsigned long long current, context, capturing, id;
  int by_value;
  if (!PyArg_ParseTuple(args, "sKKKKp", &device, &current, &context, &capturing, &id, &by_value)) {
    return nullptr;
  }
  Driver driver{};
  driver.current_stream = reinterpret_cast<decltype(driver.current_stream)>(current);
  driver.current_context = reinterpret_cast<decltype(driver.current_context)>(context);
  driver.is_capturing = reinterpret_cast<decltype(driver.is_capturing)>(capturing);
  driver.stream_id = reinterpret_cast<decltype(driver.stream_id)>(id);
  start(at::Device(device).type(), driver, by_value);
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* stop_kernels(PyObject*, PyObject*) {
  HANDLE_TH_ERRORS
  stop();
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// enable(on: bool): whether the library starts calls
PyObject* enable(PyObject*, PyObject* args) {
  int on;
  if (!PyArg_ParseTuple(args, "p", &on)) return nullptr;
  host().enabled = on == 1;
  Py_RETURN_NONE;
}

// observe(observer: Callable[[str], AbstractContextManager] | None)
PyObject* observe(PyObject*, PyObject* observer) {
  host().observer.set(observer);
  Py_RETURN_NONE;
}

PyObject* clear(PyObject*, PyObject*) {
  HANDLE_TH_ERRORS
  host().programs.clear();
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* counts(PyObject*, PyObject*) {
  Counts const& n = host().counts;
  return Py_BuildValue("{s:L,s:L,s:L,s:n}", "replayed", n.replayed.load(), "built", n.built.load(),
                       "python", n.python.load(), "programs",
                       static_cast<Py_ssize_t>(host().programs.size()));
}

// The arguments of flash_attn_func and flash_attn_varlen_func that all calls may replay. Each
// function returns whether it takes the argument; ringfa3/functional.py checks the others, and has
// the texts of the errors.

bool take_tensor(PyObject* given, Tensor& x, int64_t dims) {
  if (!THPVariable_CheckExact(given)) return false;
  x = THPVariable_Unpack(given);
  auto const dtype = x.scalar_type();
  return is_plain(x) && x.dim() == dims && (dtype == at::kBFloat16 || dtype == at::kHalf) &&
         x.stride(-1) == 1;
}

bool take_qkv(PyObject* const* given, int64_t dims, Tensor& q, Tensor& k, Tensor& v) {
  if (!take_tensor(given[0], q, dims) || !take_tensor(given[1], k, dims) ||
      !take_tensor(given[2], v, dims)) {
    return false;
  }
  constexpr int64_t kHeadDimStep = 8;  // HEAD_DIM_STEP of ringfa3/validation.py
  int64_t const heads = q.size(-2), kv_heads = k.size(-2), d = q.size(-1), d_v = v.size(-1);
  return k.device() == q.device() && v.device() == q.device() && k.dtype() == q.dtype() &&
         v.dtype() == q.dtype() && k.size(-1) == d && d > 0 &&
         (d_v == d || (0 < d_v && d_v < d && d_v % kHeadDimStep == 0)) &&
         v.sizes().slice(0, dims - 1) == k.sizes().slice(0, dims - 1) && heads > 0 &&
         kv_heads > 0 && heads % kv_heads == 0 && (dims == 3 || k.size(0) == q.size(0));
}

bool take_bool(PyObject* given, bool& value) {
  value = given == Py_True;
  return PyBool_Check(given);
}

bool take_side(PyObject* given, int64_t& value) {
  if (given == Py_None) {
    value = -1;
    return true;
  }
  if (!PyLong_CheckExact(given)) return false;
  int overflow = 0;
  value = PyLong_AsLongLongAndOverflow(given, &overflow);
  return !overflow && value >= -1;
}

// (softmax_scale, causal, window_size, deterministic)
bool take_settings(PyObject* const* given, int64_t head_dim, Settings& settings) {
  constexpr double kLeast = 0x1p-64;  // LEAST_SCALE of ringfa3/validation.py
  if (given[0] == Py_None) {
    settings.scale = std::pow(static_cast<double>(head_dim), -0.5);
  } else if (PyFloat_CheckExact(given[0])) {
    settings.scale = PyFloat_AS_DOUBLE(given[0]);
    if (!(kLeast <= settings.scale && settings.scale <= 1 / kLeast)) return false;
  } else {
    return false;
  }
  bool causal;
  if (!take_bool(given[1], causal) || !PyTuple_CheckExact(given[2]) ||
      PyTuple_GET_SIZE(given[2]) != 2 || !take_side(PyTuple_GET_ITEM(given[2], 0), settings.left) ||
      !take_side(PyTuple_GET_ITEM(given[2], 1), settings.right)) {
    return false;
  }
  if (causal) settings.right = 0;
  return take_bool(given[3], settings.deterministic);
}

// Whether native precision and no sink are given, and nothing changes what a call of an op means.
bool take_context(PyObject* precision, PyObject* sink) {
  return sink == Py_None && PyUnicode_CheckExact(precision) &&
         PyUnicode_CompareWithASCIIString(precision, "native") == 0 &&
         host().enabled.load(std::memory_order_relaxed) &&
         !at::impl::torch_function_mode_enabled() &&
         !at::autocast::is_autocast_enabled(host().device);
}

PyObject* call(Tensor const& q, Tensor const& k, Tensor const& v, MaybeTensor const& cu_q,
               MaybeTensor const& cu_k, Settings const& settings, bool return_lse) {
  std::tuple<Tensor, Tensor> results;
  {
    WithoutGil const released;
    results = forward_op().call(q, k, v, std::nullopt, cu_q, cu_k, settings.scale, settings.left,
                                settings.right, settings.deterministic, "native");
  }
  PyObject* const out = THPVariable_Wrap(std::move(std::get<0>(results)));
  if (!return_lse || !out) return out;
  PyObject* const lse = THPVariable_Wrap(std::move(std::get<1>(results)));
  if (!lse) {
    Py_DECREF(out);
    return nullptr;
  }
  PyObject* const both = PyTuple_New(2);
  PyTuple_SET_ITEM(both, 0, out);
  PyTuple_SET_ITEM(both, 1, lse);
  return both;
}

// given: q, k, v; rest: softmax_scale, causal, window_size, deterministic, return_lse, precision,
// sink. Gives what flash_attn_func gives, or None for arguments that Python must look at.
PyObject* attend_checked(PyObject* const* given, int64_t dims, MaybeTensor const& cu_q,
                         MaybeTensor const& cu_k, PyObject* const* rest) {
  Tensor q, k, v;
  Settings settings;
  bool return_lse;
  if (!take_context(rest[5], rest[6]) || !take_qkv(given, dims, q, k, v) ||
      !take_settings(rest, q.size(-1), settings) || !take_bool(rest[4], return_lse)) {
    Py_RETURN_NONE;
  }
  return call(q, k, v, cu_q, cu_k, settings, return_lse);
}

// attend(q, k, v, ...), see `attend_checked`
PyObject* attend(PyObject*, PyObject* const* given, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK(count == 10, "attend takes 10 arguments, not ", count);
  return attend_checked(given, 4, std::nullopt, std::nullopt, given + 3);
  END_HANDLE_TH_ERRORS
}

// attend_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, ...): cumulative lengths in tensors
PyObject* attend_varlen(PyObject*, PyObject* const* given, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK(count == 12, "attend_varlen takes 12 arguments, not ", count);
  if (!THPVariable_CheckExact(given[3]) || !THPVariable_CheckExact(given[4])) Py_RETURN_NONE;
  return attend_checked(given, 3, THPVariable_Unpack(given[3]), THPVariable_Unpack(given[4]),
                        given + 5);
  END_HANDLE_TH_ERRORS
}

template <class F>
PyCFunction as_method(F* function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef methods[] = {
    {"attend", as_method(attend), METH_FASTCALL, nullptr},
    {"attend_varlen", as_method(attend_varlen), METH_FASTCALL, nullptr},
    {"wanted", is_wanted, METH_NOARGS, nullptr},
    {"keep", keep, METH_O, nullptr},
    {"decline", decline, METH_NOARGS, nullptr},
    {"program", program, METH_VARARGS, nullptr},
    {"words", words_of, METH_O, nullptr},
    {"to_device", to_device, METH_VARARGS, nullptr},
    {"run", run, METH_VARARGS, nullptr},
    {"find_plans", find_plans, METH_O, nullptr},
    {"on_first_call", on_first_call, METH_O, nullptr},
    {"begin_call", begin_ring_call, METH_VARARGS, nullptr},
    {"forward_call", forward_call, METH_O, nullptr},
    {"start", start_kernels, METH_VARARGS, nullptr},
    {"stop", stop_kernels, METH_NOARGS, nullptr},
    {"enable", enable, METH_VARARGS, nullptr},
    {"ring_wanted", ring_wanted, METH_NOARGS, nullptr},
    {"keep_ring", keep_ring, METH_O, nullptr},
    {"keep_local", keep_local, METH_O, nullptr},
    {"observe", observe, METH_O, nullptr},
    {"clear", clear, METH_NOARGS, nullptr},
    {"counts", counts, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module_definition = {PyModuleDef_HEAD_INIT,
                                 "ringfa3_host",
                                 nullptr,
                                 -1,
                                 methods,
                                 nullptr,
                                 nullptr,
                                 nullptr,
                                 nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_ringfa3_host() { return PyModule_Create(&module_definition); }
