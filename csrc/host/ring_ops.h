// Autograd of the op `ring_attention`, whose kernel stays in Python: see ringfa3/ring/op.py.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <array>
#include <string>
#include <string_view>

#include "host/autograd.h"
#include "host/state.h"

namespace ringfa3::host {

using RingForward = Outputs(Tensor const&, Tensor const&, Tensor const&, MaybeTensor const&,
                            c10::SymInt, double, bool, std::string_view, std::string_view);
using RingBackward = Grads(Tensor const&, MaybeTensor const&, Tensor const&, Tensor const&,
                           Tensor const&, Tensor const&, Tensor const&, MaybeTensor const&,
                           c10::SymInt, double, bool, std::string_view, std::string_view);

inline auto const& ring_forward_op() {
  static auto const op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("ringfa3::ring_attention", "")
                             .typed<RingForward>();
  return op;
}

inline auto const& ring_backward_op() {
  static auto const op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("ringfa3::ring_attention_backward", "")
                             .typed<RingBackward>();
  return op;
}

// The arguments of a ring call behind q, k, v and the sink, which is none.
struct RingCall {
  static constexpr char const* kName = "ring_attention";
  c10::DispatchKeySet below;
  int64_t plan;
  double scale;
  bool deterministic;
  std::string_view precision, transport;

  Outputs forward(Tensor const& q, Tensor const& k, Tensor const& v) const {
    return ring_forward_op().redispatch(below, q, k, v, std::nullopt, plan, scale, deterministic,
                                        precision, transport);
  }
  std::array<Tensor, 0> tensors() const { return {}; }
  void save(Saved& saved) const {
    saved["plan"] = plan;
    saved["plan's life"] = host().keep_plan(plan);
    saved["scale"] = scale;
    saved["deterministic"] = deterministic;
    saved["precision"] = std::string(precision);
    saved["transport"] = std::string(transport);
  }
  static Grads backward(Tensor const& dout, MaybeTensor const& dlse, variable_list const& x,
                        Saved& saved) {
    return ring_backward_op().call(
        dout, dlse, x[0], x[1], x[2], x[3], x[4], std::nullopt, saved["plan"].toInt(),
        saved["scale"].toDouble(), saved["deterministic"].toBool(),
        saved["precision"].toStringView(), saved["transport"].toStringView());
  }
};

inline Outputs ring_attention_autograd(c10::DispatchKeySet keys, Tensor const& q, Tensor const& k,
                                       Tensor const& v, MaybeTensor const& sink, c10::SymInt plan,
                                       double scale, bool deterministic, std::string_view precision,
                                       std::string_view transport) {
  auto const handle = plan.maybe_as_int();
  if (!handle || !runs_here(keys, q, k, v, sink)) {
    return ring_forward_op().redispatch(autograd_by_python(keys), q, k, v, sink, plan, scale,
                                        deterministic, precision, transport);
  }
  auto const below = keys & c10::after_autograd_keyset;
  return differentiable(q, k, v,
                        RingCall{below, *handle, scale, deterministic, precision, transport});
}

}  // namespace ringfa3::host
