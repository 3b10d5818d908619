// Shows replayed calls to an observer of ops, as ringfa3/custom_op.py shows those that Python runs:
// `with observer(name):` around each.
#pragma once

#include <pybind11/pybind11.h>
#include <torch/csrc/Exceptions.h>

#include <atomic>
#include <exception>
#include <optional>
#include <utility>

namespace ringfa3::host {

namespace py = pybind11;

class Observer {
 public:
  // The caller holds the GIL. None: nobody observes.
  void set(PyObject* observer) {
    observer_ = py::reinterpret_borrow<py::object>(observer);
    observed_ = !observer_.is_none();
  }

  // The result of `run`, which runs without the GIL. Its errors pass through the observer.
  template <class Run>
  auto around(char const* op, Run const& run) {
    if (!observed_.load(std::memory_order_relaxed)) return run();
    py::gil_scoped_acquire const gil;
    py::object const observer = observer_;
    if (observer.is_none()) {  // another thread has ended it meanwhile
      py::gil_scoped_release const released;
      return run();
    }
    py::object const context = observer(op);
    context.attr("__enter__")();
    std::optional<decltype(run())> result;
    std::exception_ptr problem;
    {
      py::gil_scoped_release const released;
      try {
        result = run();
      } catch (...) {
        problem = std::current_exception();
      }
    }
    py::object const exit = context.attr("__exit__");
    if (problem) {
      set_python_error(problem);
      py::error_already_set error;
      py::object const trace = error.trace() ? error.trace() : py::none();
      exit(error.type(), error.value(), trace);
      throw error;
    }
    exit(py::none(), py::none(), py::none());
    return std::move(*result);
  }

 private:
  static PyObject* set_python_error(std::exception_ptr const& problem) {
    HANDLE_TH_ERRORS
    std::rethrow_exception(problem);
    END_HANDLE_TH_ERRORS
  }

  py::object observer_;  // its members need the GIL
  std::atomic<bool> observed_{false};
};

}  // namespace ringfa3::host
