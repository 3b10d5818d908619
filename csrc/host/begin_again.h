// Begins a ring call like an earlier one, on the objects of Python that begin others, but without
// its functions: a frame of Python costs as much as a launch. The caller holds the GIL.
#pragma once

#include <Python.h>

#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <optional>

#include "host/python_programs.h"
#include "host/state.h"

namespace ringfa3::host {

// The name of an attribute, made once.
struct Name {
  PyObject* const text;
  explicit Name(char const* name) : text(PyUnicode_InternFromString(name)) {}

  py::object of(py::handle object) const { return checked(PyObject_GetAttr(object.ptr(), text)); }
  void set(py::handle object, py::handle value) const {
    if (PyObject_SetAttr(object.ptr(), text, value.ptr())) throw_raised();
  }
  void append(py::handle value, py::handle to) const {
    checked(PyObject_CallMethodOneArg(to.ptr(), text, value.ptr()));
  }
};

// Attributes of `RingGroup`, `SymmetricBackend`, `ReplayableCall` and what these hold.
struct Names {
  Name agreed{"agreed"}, agreement_id{"agreement_id"}, agreements{"agreements"}, append{"append"},
      backend{"backend"}, cache_version{"cache_version"}, caller{"caller"}, calls{"calls"},
      compute{"compute"}, connections{"connections"}, digest{"digest"}, error{"error"},
      failure{"failure"}, group{"group"}, interruption{"interruption"},
      join_request{"join_request"}, last_compute{"last_compute"}, last_transport{"last_transport"},
      latest{"latest"}, links{"links"}, monitor{"monitor"}, peer_failure{"peer_failure"},
      posted{"posted"}, process_group{"process_group"}, process_groups{"process_groups"},
      programs{"programs"}, recent{"recent"}, refused{"refused"}, waits{"waits"};
  py::object const symmetric = py::str("symmetric");

  static Names const& get() {
    static auto const* const made = new Names;  // never freed: Python may have ended
    return *made;
  }
};

inline int64_t integer(py::handle number) {
  int64_t const value = PyLong_AsLongLong(number.ptr());
  if (value == -1 && PyErr_Occurred()) throw_raised();
  return value;
}

inline py::handle item(py::handle tuple, Py_ssize_t at) {
  return PyTuple_GET_ITEM(tuple.ptr(), at);
}

// Whether a call of a `RingGroup` may begin with an `AgreementSnapshot`: no rank is in trouble, as
// far as is known, and ranks need not agree first.
inline bool may_begin(py::handle group, py::handle agreed) {
  auto const& n = Names::get();
  if (!n.failure.of(group).is_none() || !n.error.of(n.interruption.of(group)).is_none()) {
    return false;
  }
  auto const agreements = n.agreements.of(group), monitor = n.monitor.of(group);
  if (integer(n.cache_version.of(agreements)) != integer(item(agreed, 1))) return false;
  if (!monitor.is_none()) {
    int64_t const next = integer(n.agreement_id.of(agreements)) + 1;
    if (!n.peer_failure.of(monitor).is_none() || integer(n.join_request.of(monitor)) == next) {
      return false;
    }
  }
  auto const alive = checked(PyObject_CallNoArgs(n.process_group.of(group).ptr()));
  int const known = PyDict_Contains(n.process_groups.of(group).ptr(), alive.ptr());
  if (known < 0) throw_raised();
  return known;
}

// As `Interruption.called`.
inline void called(py::handle interruption) {
  if (torch::autograd::get_current_graph_task_id() >= 0) return;
  static auto const* const threads =
      new py::object(py::module_::import("threading").attr("_active"));
  auto const ident = checked(PyLong_FromUnsignedLong(PyThread_get_thread_ident()));
  PyObject* const thread = PyDict_GetItemWithError(threads->ptr(), ident.ptr());
  if (!thread) {  // Python does not know the thread yet
    if (PyErr_Occurred()) throw_raised();
    interruption.attr("called")();
    return;
  }
  Names::get().caller.set(interruption, checked(PyWeakref_NewRef(thread, nullptr)));
}

// Number of the forward call that returned the LSE of a backward; 0: unknown, or a forward.
inline int64_t forward_of(py::handle calls, at::Tensor const& lse) {
  if (!lse.defined()) return 0;
  if (int64_t const number = host().forward_calls.get(lse)) return number;
  return integer(calls.attr("forward_of")(checked(THPVariable_Wrap(lse))));  // one of Python's
}

// As `CallHistory.begin`. Returns the number of the call.
inline int64_t count(py::handle calls, py::handle settings, int64_t forward) {
  auto const& n = Names::get();
  auto const latest = n.latest.of(calls);
  int64_t const number = integer(item(latest, 0)) + 1;
  // `LatestCall.next`; a tuple's hash is of whole numbers, so equal on all ranks
  auto const digests = py::make_tuple(item(latest, 3), forward, n.digest.of(settings));
  auto const history = py::hash(digests);
  auto const fields = py::make_tuple(number, settings, forward, history, item(latest, 4));
  auto const arguments = py::make_tuple(fields);
  // not the type's own `__new__`, a function of Python
  auto const next = checked(PyTuple_Type.tp_new(Py_TYPE(latest.ptr()), arguments.ptr(), nullptr));
  n.latest.set(calls, next);
  n.append.append(next, n.recent.of(calls));
  n.refused.set(calls, Py_False);
  return number;
}

// As `RingGroup.begin`, for a call over `symmetric`; its number. None, and nothing begins, if it
// may not begin.
inline std::optional<int64_t> begin_call(py::handle group, py::handle agreed,
                                         at::Tensor const& lse) {
  if (!may_begin(group, agreed)) return std::nullopt;
  auto const& n = Names::get();
  called(n.interruption.of(group));
  auto const calls = n.calls.of(group);
  n.last_transport.set(n.connections.of(group), n.symmetric);
  return count(calls, item(agreed, 0), forward_of(calls, lse));
}

// The launch of call `number`, whose waits it counts as `SymmetricBackend.replay`.
inline ProgramLaunch launch_of(py::handle call, py::handle backend, py::handle program,
                               int64_t number) {
  auto const& n = Names::get();
  auto const held = held_program(program.ptr());
  if (!held) throw_raised();
  ProgramLaunch launch{held, {}, number};
  auto const counts = n.waits.of(backend);
  for (size_t i = 0; i < launch.waits.size(); ++i) {
    launch.waits[i] = static_cast<uint64_t>(integer(PyList_GET_ITEM(counts.ptr(), i)));
  }
  auto const waits = py::reinterpret_borrow<py::tuple>(n.waits.of(call));
  if (waits.empty()) return launch;
  for (py::handle const of_stream : waits) {
    auto const stream = integer(item(of_stream, 0));
    auto const more = static_cast<uint64_t>(PyTuple_GET_SIZE(item(of_stream, 1).ptr()));
    PyList_SetItem(counts.ptr(), stream, PyLong_FromUnsignedLongLong(launch.waits[stream] + more));
  }
  n.append.append(py::make_tuple(number, waits), n.posted.of(backend));
  return launch;
}

// The program of a `ReplayableCall` for a parity, which its first call links.
inline py::object program_of(py::handle call, Py_ssize_t parity) {
  auto const& n = Names::get();
  auto const programs = n.programs.of(call), links = n.links.of(call);
  auto made = py::reinterpret_borrow<py::object>(PyList_GET_ITEM(programs.ptr(), parity));
  PyObject* const given = PyList_GET_ITEM(links.ptr(), parity);
  if (made.is_none() && given != Py_None) {
    made = py::reinterpret_steal<py::object>(program(nullptr, given));
    if (!made) PyErr_Clear();  // Python reports the error
    if (made && !made.is_none()) {
      PyList_SetItem(programs.ptr(), parity, py::object(made).release().ptr());
      return made;
    }
  }
  if (!made || made.is_none()) {  // a symbol has no address yet
    call.attr("program")(parity);
    made = py::reinterpret_borrow<py::object>(PyList_GET_ITEM(programs.ptr(), parity));
  }
  return made;
}

// Begins a `ReplayableCall`. None, and nothing has begun: Python must look at it.
inline std::optional<ProgramLaunch> begin_again(py::handle call, at::Tensor const& lse) {
  auto const& n = Names::get();
  auto const backend = n.backend.of(call);
  if (!n.last_compute.of(backend).is(n.compute.of(call)) ||
      integer(n.cache_version.of(backend)) != integer(n.cache_version.of(call))) {
    return std::nullopt;
  }
  int64_t const calls = integer(n.calls.of(backend));
  auto const program = program_of(call, calls % 2);
  auto const number = begin_call(n.group.of(backend), n.agreed.of(call), lse);
  if (!number) return std::nullopt;
  n.calls.set(backend, py::int_(calls + 1));
  return launch_of(call, backend, program, *number);
}

}  // namespace ringfa3::host
