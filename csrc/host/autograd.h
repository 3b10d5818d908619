// Gradients of ops with outputs (out, LSE), as `register_attention` of ringfa3/attention_op.py
// defines them, without Python's frames.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <optional>
#include <tuple>

#include "host/state.h"

namespace ringfa3::host {

using at::Tensor;
using MaybeTensor = std::optional<Tensor>;
using Outputs = std::tuple<Tensor, Tensor>;
using Grads = std::tuple<Tensor, Tensor, Tensor, Tensor>;
using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;
using Saved = decltype(AutogradContext::saved_data);

// Whether a tensor is nothing but a strided tensor on the device of `start`: no subclass, no
// wrapper of a transform.
inline bool is_plain(Tensor const& x) {
  return !(x.key_set().raw_repr() & ~host().plain.raw_repr()) && x.device().type() == host().device;
}

inline Tensor const& tensor_of(MaybeTensor const& x) {
  static Tensor const none;
  return x ? *x : none;
}

inline MaybeTensor given(Tensor const& x) { return x.defined() ? MaybeTensor(x) : std::nullopt; }

// Whether a tensor has a tangent of forward-mode derivatives, which Python refuses.
inline bool has_tangent(Tensor const& x) { return x.defined() && x._fw_grad(0).defined(); }

// Gradients that cannot be differentiated again.
template <class Op>
struct DifferentiatedOnce : Function<DifferentiatedOnce<Op>> {
  static constexpr bool is_traceable = true;
  static variable_list forward(AutogradContext*, Tensor const& dq, Tensor const& dk,
                               Tensor const& dv) {
    return {dq.detach(), dk.detach(), dv.detach()};
  }
  static variable_list backward(AutogradContext*, variable_list const&) {
    TORCH_CHECK(false, "ringfa3.", Op::kName, ".default can be differentiated once, not twice");
  }
};

// The node of a call. An `Op` has the arguments of a call behind q, k and v:
//   forward(q, k, v)                      the op, below autograd
//   tensors()                             which the backward needs, in an array
//   save(Saved&)                          the other arguments, for the backward
//   backward(dout, dlse, saved, Saved&)   the backward's op; saved: q, k, v, out, LSE, `tensors`
template <class Op>
struct Differentiable : Function<Differentiable<Op>> {
  static constexpr bool is_traceable = true;  // for compiled autograd

  static variable_list forward(AutogradContext* ctx, Tensor const& q, Tensor const& k,
                               Tensor const& v, Op const& op) {
    at::AutoDispatchBelowAutograd const below;
    auto [out, lse] = op.forward(q, k, v);
    ctx->set_materialize_grads(false);
    variable_list saved{q, k, v, out, lse};
    for (Tensor const& x : op.tensors()) saved.push_back(x);
    ctx->save_for_backward(std::move(saved));
    op.save(ctx->saved_data);
    return {out, lse};
  }

  static variable_list backward(AutogradContext* ctx, variable_list const& grads) {
    auto const saved = ctx->get_saved_variables();
    TORCH_CHECK_NOT_IMPLEMENTED(
        !has_tangent(grads[0]) && !has_tangent(grads[1]), "ringfa3.", Op::kName,
        ".default has no forward-mode derivative: use reverse mode, backward() or torch.autograd");
    Grads results;
    {
      c10::AutoGradMode const off(false);
      Tensor const dout = grads[0].defined() ? grads[0] : at::zeros_like(saved[3]);
      std::optional<at::AutoDispatchBelowAutograd> below;
      if (is_plain(dout) && is_plain(saved[0])) below.emplace();
      results = Op::backward(dout, given(grads[1]), saved, ctx->saved_data);
    }
    auto& [dq, dk, dv, _] = results;
    if (!c10::GradMode::is_enabled()) return {dq, dk, dv, Tensor()};
    auto const leaf = [](Tensor const& x) { return x.detach().requires_grad_(); };
    auto once = DifferentiatedOnce<Op>::apply(leaf(dq), leaf(dk), leaf(dv));
    once.emplace_back();
    return once;
  }
};

// Whether autograd of a call runs here: q, k, v are plain, and neither the host's choice nor a mode
// sends it to Python.
inline bool runs_here(c10::DispatchKeySet keys, Tensor const& q, Tensor const& k, Tensor const& v,
                      MaybeTensor const& sink) {
  return host().enabled.load(std::memory_order_relaxed) && is_plain(q) && is_plain(k) &&
         is_plain(v) && !tensor_of(sink).defined() && !keys.has(c10::DispatchKey::Python) &&
         !has_tangent(q) && !has_tangent(k) && !has_tangent(v);
}

// The outputs of a call that `runs_here`.
template <class Op>
Outputs differentiable(Tensor const& q, Tensor const& k, Tensor const& v, Op const& op) {
  if (c10::GradMode::is_enabled() &&
      (q.requires_grad() || k.requires_grad() || v.requires_grad())) {
    auto const results = Differentiable<Op>::apply(q, k, v, op);
    return {results[0], results[1]};
  }
  at::AutoDispatchBelowAutograd const below;
  return op.forward(q, k, v);
}

// Python's kernels serve every other device, too. So the dispatch key of one leads to them.
inline c10::DispatchKeySet by_python() {
  return c10::DispatchKeySet(host().device == at::kCUDA ? c10::DispatchKey::CPU
                                                        : c10::DispatchKey::CUDA);
}
inline c10::DispatchKeySet autograd_by_python(c10::DispatchKeySet keys) {
  return (keys & c10::after_autograd_keyset) | c10::DispatchKeySet(c10::DispatchKey::AutogradOther);
}

}  // namespace ringfa3::host
