// Kernels of the ops `attention` and `attention_backward`, which take precedence over those of
// Python on their device. A call whose key is known replays its program. Any other call goes to the
// kernel in Python, whose exceptions pass; see `by_python`.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <memory>
#include <optional>
#include <string_view>
#include <tuple>
#include <vector>

#include "host/state.h"

namespace ringfa3::host {

using at::Tensor;
using c10::DispatchKey;
using c10::DispatchKeySet;
using MaybeTensor = std::optional<Tensor>;
using Outputs = std::tuple<Tensor, Tensor>;
using Grads = std::tuple<Tensor, Tensor, Tensor, Tensor>;

using Forward = Outputs(Tensor const&, Tensor const&, Tensor const&, MaybeTensor const&,
                        MaybeTensor const&, MaybeTensor const&, double, c10::SymInt, c10::SymInt,
                        bool, std::string_view);
using Backward = Grads(Tensor const&, MaybeTensor const&, Tensor const&, Tensor const&,
                       Tensor const&, Tensor const&, Tensor const&, MaybeTensor const&,
                       MaybeTensor const&, MaybeTensor const&, double, c10::SymInt, c10::SymInt,
                       bool);

// Of tensors that are nothing but strided.
constexpr DispatchKeySet kPlainOnCuda({DispatchKey::CUDA, DispatchKey::AutogradCUDA,
                                       DispatchKey::AutocastCUDA, DispatchKey::ADInplaceOrView});
constexpr DispatchKeySet kPlainOnCpu({DispatchKey::CPU, DispatchKey::AutogradCPU,
                                      DispatchKey::AutocastCPU, DispatchKey::ADInplaceOrView});

// Whether a tensor is nothing but a strided tensor on the device of `start`: no subclass, no
// wrapper of a transform.
inline bool is_plain(Tensor const& x) {
  return !(x.key_set().raw_repr() & ~host().plain.raw_repr()) && x.device().type() == host().device;
}

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

// Python's kernels serve every other device, too. So the dispatch key of one leads to them.
inline DispatchKeySet by_python() {
  return DispatchKeySet(host().device == at::kCUDA ? DispatchKey::CPU : DispatchKey::CUDA);
}
inline DispatchKeySet autograd_by_python(DispatchKeySet keys) {
  return (keys & c10::after_autograd_keyset) | DispatchKeySet(DispatchKey::AutogradOther);
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
// make one: from the second call of a kind on, as a call that comes once is not worth a program.
struct Lookup {
  std::shared_ptr<Program const> program;
  Stream stream{};
  std::optional<Key> key;
  bool first = false;  // of its kind

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
    made.add(op), made.add(int64_t{deterministic}), made.add(int64_t{device.index()});
    made.add(static_cast<int64_t>(stream.id));
    made.add(scale);
    made.add(*from), made.add(*to);
    for (Tensor const* x : tensors) made.add(*x);
    if (!add_lengths(made, cu_q) || !add_lengths(made, cu_k)) return;
    Found found = host().programs.find(made);
    if (found) {
      program = std::move(*found);
    } else if (host().programs.seen(made)) {
      key = std::move(made);
    } else {
      first = true;
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
      ++(first ? host().counts.first : host().counts.python);
      return python();
    }
    ++host().counts.recorded;
    Wanted const asked(std::move(*key));
    return python();
  }
};

inline Tensor const& tensor_of(MaybeTensor const& x) {
  static Tensor const none;
  return x ? *x : none;
}

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
                                c10::SymInt right, bool deterministic) {
  c10::DeviceGuard const device(q.device());
  Tensor const &dlse_of = tensor_of(dlse), &sink_of = tensor_of(sink);
  Lookup found(1, {&dout, &dlse_of, &q, &k, &v, &out, &lse, &sink_of}, cu_q, cu_k, scale, left,
               right, deterministic);
  if (!found.program) {
    return found.otherwise([&] {
      return backward_op().redispatch(by_python(), dout, dlse, q, k, v, out, lse, sink, cu_q, cu_k,
                                      scale, left, right, deterministic);
    });
  }
  Tensors grads = found.replay("attention_backward", {dout, dlse_of, q, k, v, out, lse, sink_of});
  if (!sink_of.defined()) grads.push_back(at::empty({0}, lse.options()));
  return {std::move(grads[0]), std::move(grads[1]), std::move(grads[2]), std::move(grads[3])};
}

// Whether a tensor has a tangent of forward-mode derivatives, which Python refuses.
inline bool has_tangent(Tensor const& x) { return x.defined() && x._fw_grad(0).defined(); }

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

// Gradients that cannot be differentiated again.
struct DifferentiatedOnce : Function<DifferentiatedOnce> {
  static constexpr bool is_traceable = true;
  static variable_list forward(AutogradContext*, Tensor const& dq, Tensor const& dk,
                               Tensor const& dv) {
    return {dq.detach(), dk.detach(), dv.detach()};
  }
  static variable_list backward(AutogradContext*, variable_list const&) {
    TORCH_CHECK(false, "ringfa3.attention.default can be differentiated once, not twice");
  }
};

struct Attention : Function<Attention> {
  static constexpr bool is_traceable = true;  // for compiled autograd

  struct Call {
    DispatchKeySet below;
    MaybeTensor const &cu_q, &cu_k;
    double scale;
    c10::SymInt left, right;
    bool deterministic;
    std::string_view precision;
  };

  static variable_list forward(AutogradContext* ctx, Tensor const& q, Tensor const& k,
                               Tensor const& v, Call const& call) {
    at::AutoDispatchBelowAutograd const below;
    auto [out, lse] =
        forward_op().redispatch(call.below, q, k, v, std::nullopt, call.cu_q, call.cu_k, call.scale,
                                call.left, call.right, call.deterministic, call.precision);
    ctx->set_materialize_grads(false);
    ctx->save_for_backward({q, k, v, out, lse, tensor_of(call.cu_q), tensor_of(call.cu_k)});
    ctx->saved_data["scale"] = call.scale;
    ctx->saved_data["settings"] = std::vector<int64_t>{
        call.left.expect_int(), call.right.expect_int(), int64_t{call.deterministic}};
    return {out, lse};
  }

  static variable_list backward(AutogradContext* ctx, variable_list const& grads) {
    auto const saved = ctx->get_saved_variables();
    double const scale = ctx->saved_data["scale"].toDouble();
    auto const settings = ctx->saved_data["settings"].toIntVector();
    auto const given = [](Tensor const& x) { return x.defined() ? MaybeTensor(x) : std::nullopt; };
    TORCH_CHECK_NOT_IMPLEMENTED(
        !has_tangent(grads[0]) && !has_tangent(grads[1]),
        "ringfa3.attention.default has no forward-mode derivative: use reverse mode, backward() or "
        "torch.autograd");
    Grads results;
    {
      c10::AutoGradMode const off(false);
      Tensor const dout = grads[0].defined() ? grads[0] : at::zeros_like(saved[3]);
      std::optional<at::AutoDispatchBelowAutograd> below;
      if (is_plain(dout) && is_plain(saved[0])) below.emplace();
      results = backward_op().call(dout, given(grads[1]), saved[0], saved[1], saved[2], saved[3],
                                   saved[4], std::nullopt, given(saved[5]), given(saved[6]), scale,
                                   settings[0], settings[1], settings[2] != 0);
    }
    auto& [dq, dk, dv, _] = results;
    if (!c10::GradMode::is_enabled()) return {dq, dk, dv, Tensor()};
    auto const leaf = [](Tensor const& x) { return x.detach().requires_grad_(); };
    auto once = DifferentiatedOnce::apply(leaf(dq), leaf(dk), leaf(dv));
    once.emplace_back();
    return once;
  }
};

inline Outputs attention_autograd(DispatchKeySet keys, Tensor const& q, Tensor const& k,
                                  Tensor const& v, MaybeTensor const& sink, MaybeTensor const& cu_q,
                                  MaybeTensor const& cu_k, double scale, c10::SymInt left,
                                  c10::SymInt right, bool deterministic,
                                  std::string_view precision) {
  bool const usual = host().enabled.load(std::memory_order_relaxed) && is_plain(q) && is_plain(k) &&
                     is_plain(v) && !tensor_of(sink).defined() && !keys.has(DispatchKey::Python) &&
                     left.maybe_as_int() && right.maybe_as_int() && !has_tangent(q) &&
                     !has_tangent(k) && !has_tangent(v);
  if (!usual) {
    return forward_op().redispatch(autograd_by_python(keys), q, k, v, sink, cu_q, cu_k, scale, left,
                                   right, deterministic, precision);
  }
  auto const below = keys & c10::after_autograd_keyset;
  if (c10::GradMode::is_enabled() &&
      (q.requires_grad() || k.requires_grad() || v.requires_grad())) {
    auto const results = Attention::apply(
        q, k, v, Attention::Call{below, cu_q, cu_k, scale, left, right, deterministic, precision});
    return {results[0], results[1]};
  }
  at::AutoDispatchBelowAutograd const guard;
  return forward_op().redispatch(below, q, k, v, sink, cu_q, cu_k, scale, left, right,
                                 deterministic, precision);
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
  add(cuda ? DispatchKey::AutogradCUDA : DispatchKey::AutogradCPU)
      .impl("attention", TORCH_FN(attention_autograd));
}

// Removes them, and forgets all programs and counts.
inline void stop() {
  libraries().clear();
  host().programs.clear();
  Counts& counts = host().counts;
  counts.replayed = counts.recorded = counts.first = counts.python = 0;
}

}  // namespace ringfa3::host
