// Kernels of the ops `attention` and `attention_backward`, and the autograd of the former, which
// take precedence over those of Python on their device, as those of `ring_ops.h` do. A call whose
// key is known replays its program. Any other call goes to the kernel in Python, whose exceptions
// pass; see `by_python`.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <array>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "host/autograd.h"
#include "host/ring_ops.h"
#include "host/state.h"

namespace ringfa3::host {

using c10::DispatchKey;
using c10::DispatchKeySet;

using Forward = Outputs(Tensor const&, Tensor const&, Tensor const&, MaybeTensor const&,
                        MaybeTensor const&, MaybeTensor const&, double, c10::SymInt, c10::SymInt,
                        bool, std::string_view);
using Backward = Grads(Tensor const&, MaybeTensor const&, Tensor const&, Tensor const&,
                       Tensor const&, Tensor const&, Tensor const&, MaybeTensor const&,
                       MaybeTensor const&, MaybeTensor const&, double, c10::SymInt, c10::SymInt,
                       bool, std::string_view);

// Of tensors that are nothing but strided.
constexpr DispatchKeySet kPlainOnCuda({DispatchKey::CUDA, DispatchKey::AutogradCUDA,
                                       DispatchKey::AutocastCUDA, DispatchKey::ADInplaceOrView});
constexpr DispatchKeySet kPlainOnCpu({DispatchKey::CPU, DispatchKey::AutogradCPU,
                                      DispatchKey::AutocastCPU, DispatchKey::ADInplaceOrView});

inline auto const& forward_op() {
  static auto const op =
      c10::Dispatcher::singleton().findSchemaOrThrow("ringfa3::attention", "").typed<Forward>();
  return op;
}

inline auto const& backward_op() {
  static auto const op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("ringfa3::attention_backward", "")
                             .typed<Backward>();
  return op;
}

// The key of a call for which Python makes a program.
inline thread_local std::optional<Key> wanted;

struct Wanted {
  explicit Wanted(Key key) { wanted = std::move(key); }
  ~Wanted() { wanted.reset(); }
  Wanted(Wanted const&) = delete;
};

// Adds cumulative lengths: by their values on the CPU, where they may change without a new version,
// else by the tensor and its version. Returns whether a program may be replayed.
inline bool add_lengths(Key& key, MaybeTensor const& cu) {
  if (!cu || !cu->defined()) {
    key.add(int64_t{-1});
    return true;
  }
  Tensor const& x = *cu;
  auto const dtype = x.scalar_type();
  if (x.dim() != 1 || (dtype != at::kInt && dtype != at::kLong)) return false;
  if (x.device().is_cpu() && host().lengths_by_value) {
    if (x.key_set().raw_repr() & ~kPlainOnCpu.raw_repr() || !x.is_contiguous()) return false;
    key.add(x.numel());
    for (int64_t i = 0; i < x.numel(); ++i) {
      key.add(dtype == at::kInt ? int64_t{x.const_data_ptr<int32_t>()[i]}
                                : x.const_data_ptr<int64_t>()[i]);
    }
    return true;
  }
  if (!is_plain(x) || x.is_inference()) return false;
  key.add(int64_t{-2});
  key.add_document(host().programs.document(x));
  return true;
}

// Looks for the program of a call with these tensors and settings. `key` is set where Python should
// make one.
struct Lookup {
  std::shared_ptr<Program const> program;
  Stream stream{};
  std::optional<Key> key;

  Lookup(int64_t op, std::initializer_list<Tensor const*> tensors, MaybeTensor const& cu_q,
         MaybeTensor const& cu_k, double scale, c10::SymInt const& left, c10::SymInt const& right,
         bool deterministic) {
    auto const from = left.maybe_as_int(), to = right.maybe_as_int();
    if (!host().enabled.load(std::memory_order_relaxed) || !from || !to) return;
    at::Device device = (*tensors.begin())->device();
    for (Tensor const* x : tensors) {
      if (!x->defined()) continue;
      if (!is_plain(*x) || x->numel() == 0 || x->device() != device) return;
    }
    auto const current = host().driver.stream(device.has_index() ? device.index() : 0);
    if (!current) return;
    stream = *current;
    Key made;
    made.add(op), made.add(int64_t{is_deterministic(deterministic)}),
        made.add(int64_t{device.index()});
    made.add(static_cast<int64_t>(stream.id));
    made.add(scale);
    made.add(*from), made.add(*to);
    for (Tensor const* x : tensors) made.add(*x);
    if (!add_lengths(made, cu_q) || !add_lengths(made, cu_k)) return;
    Found found = host().programs.find(made);
    if (found) {
      program = std::move(*found);
    } else {
      key = std::move(made);
    }
  }

  // The outputs of the program, which is known, for these inputs.
  Tensors replay(char const* op, Tensors inputs) const {
    ++host().counts.replayed;
    return host().observer.around(op, [&] {
      at::AutoDispatchBelowADInplaceOrView const below;
      return program->run(std::move(inputs), stream);
    });
  }

  // Runs `python`, which makes the program if the key is set.
  template <class Call>
  auto otherwise(Call const& python) {
    if (!key) {
      ++host().counts.python;
      return python();
    }
    ++host().counts.built;
    Wanted const asked(std::move(*key));
    return python();
  }
};

inline Outputs attention(Tensor const& q, Tensor const& k, Tensor const& v, MaybeTensor const& sink,
                         MaybeTensor const& cu_q, MaybeTensor const& cu_k, double scale,
                         c10::SymInt left, c10::SymInt right, bool deterministic,
                         std::string_view precision) {
  auto const python = [&] {
    return forward_op().redispatch(by_python(), q, k, v, sink, cu_q, cu_k, scale, left, right,
                                   deterministic, precision);
  };
  if (precision != "native") {
    ++host().counts.python;
    return python();
  }
  c10::DeviceGuard const device(q.device());
  Tensor const& sink_of = tensor_of(sink);
  Lookup found(0, {&q, &k, &v, &sink_of}, cu_q, cu_k, scale, left, right, deterministic);
  if (!found.program) return found.otherwise(python);
  Tensors out = found.replay("attention", {q, k, v, sink_of});
  return {std::move(out[0]), std::move(out[1])};
}

inline Grads attention_backward(Tensor const& dout, MaybeTensor const& dlse, Tensor const& q,
                                Tensor const& k, Tensor const& v, Tensor const& out,
                                Tensor const& lse, MaybeTensor const& sink, MaybeTensor const& cu_q,
                                MaybeTensor const& cu_k, double scale, c10::SymInt left,
                                c10::SymInt right, bool deterministic, std::string_view precision) {
  auto const python = [&] {
    return backward_op().redispatch(by_python(), dout, dlse, q, k, v, out, lse, sink, cu_q, cu_k,
                                    scale, left, right, deterministic, precision);
  };
  if (precision != "native") {
    ++host().counts.python;
    return python();
  }
  c10::DeviceGuard const device(q.device());
  Tensor const &dlse_of = tensor_of(dlse), &sink_of = tensor_of(sink);
  Lookup found(1, {&dout, &dlse_of, &q, &k, &v, &out, &lse, &sink_of}, cu_q, cu_k, scale, left,
               right, deterministic);
  if (!found.program) return found.otherwise(python);
  Tensors grads = found.replay("attention_backward", {dout, dlse_of, q, k, v, out, lse, sink_of});
  if (!sink_of.defined()) grads.push_back(at::empty({0}, lse.options()));
  return {std::move(grads[0]), std::move(grads[1]), std::move(grads[2]), std::move(grads[3])};
}

// The arguments of a call behind q, k, v and the sink, which is none.
struct AttentionArguments {
  static constexpr char const* kName = "attention";
  DispatchKeySet below;
  MaybeTensor const &cu_q, &cu_k;
  double scale;
  int64_t left, right;
  bool deterministic;
  std::string_view precision;

  Outputs forward(Tensor const& q, Tensor const& k, Tensor const& v) const {
    return forward_op().redispatch(below, q, k, v, std::nullopt, cu_q, cu_k, scale, left, right,
                                   deterministic, precision);
  }
  std::array<Tensor, 2> tensors() const { return {tensor_of(cu_q), tensor_of(cu_k)}; }
  void save(Saved& saved) const {
    saved["scale"] = scale;
    saved["settings"] = std::vector<int64_t>{left, right, int64_t{deterministic}};
    saved["precision"] = std::string(precision);
  }
  static Grads backward(Tensor const& dout, MaybeTensor const& dlse, variable_list const& x,
                        Saved& saved) {
    auto const settings = saved["settings"].toIntVector();
    return backward_op().call(dout, dlse, x[0], x[1], x[2], x[3], x[4], std::nullopt, given(x[5]),
                              given(x[6]), saved["scale"].toDouble(), settings[0], settings[1],
                              settings[2] != 0, saved["precision"].toStringView());
  }
};

inline Outputs attention_autograd(DispatchKeySet keys, Tensor const& q, Tensor const& k,
                                  Tensor const& v, MaybeTensor const& sink, MaybeTensor const& cu_q,
                                  MaybeTensor const& cu_k, double scale, c10::SymInt left,
                                  c10::SymInt right, bool deterministic,
                                  std::string_view precision) {
  auto const from = left.maybe_as_int(), to = right.maybe_as_int();
  if (!from || !to || !runs_here(keys, q, k, v, sink)) {
    return forward_op().redispatch(autograd_by_python(keys), q, k, v, sink, cu_q, cu_k, scale, left,
                                   right, deterministic, precision);
  }
  auto const below = keys & c10::after_autograd_keyset;
  return differentiable(
      q, k, v, AttentionArguments{below, cu_q, cu_k, scale, *from, *to, deterministic, precision});
}

inline std::vector<torch::Library>& libraries() {
  static auto* const made = new std::vector<torch::Library>;
  return *made;
}

// Registers kernels for tensors of a type of device. Tests use the CPU, with a driver of their own,
// and without `lengths_by_value`, so that lengths count as on a GPU. Raises: kernels are
// registered.
inline void start(at::DeviceType device, Driver driver, bool lengths_by_value) {
  TORCH_CHECK(libraries().empty(), "the host library has registered its kernels: stop it first");
  bool const cuda = device == at::kCUDA;
  host().device = device;
  host().plain = cuda ? kPlainOnCuda : kPlainOnCpu;
  host().driver = driver;
  host().lengths_by_value = lengths_by_value;
  auto add = [](DispatchKey key) -> torch::Library& {
    return libraries().emplace_back(torch::Library::IMPL, "ringfa3", key, __FILE__, __LINE__);
  };
  auto& kernels = add(cuda ? DispatchKey::CUDA : DispatchKey::CPU);
  kernels.impl("attention", TORCH_FN(attention));
  kernels.impl("attention_backward", TORCH_FN(attention_backward));
  kernels.impl("ring_attention", TORCH_FN(ring_attention));
  kernels.impl("ring_attention_backward", TORCH_FN(ring_attention_backward));
  auto& autograd = add(cuda ? DispatchKey::AutogradCUDA : DispatchKey::AutogradCPU);
  autograd.impl("attention", TORCH_FN(attention_autograd));
  autograd.impl("ring_attention", TORCH_FN(ring_attention_autograd));
}

// Removes them, and forgets all programs and counts.
inline void stop() {
  libraries().clear();
  host().programs.clear();
  host().ring_calls.clear();
  host().forward_calls.clear();
  Counts& counts = host().counts;
  counts.replayed = counts.built = counts.python = 0;
}

}  // namespace ringfa3::host
