// Kernels of the ops `ring_attention` and `ring_attention_backward`, which replay programs, and the
// autograd of the former. Any other call goes to Python: see ringfa3/ring/op.py.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>

#include <array>
#include <cstdlib>
#include <functional>
#include <memory>
#include <optional>
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

// The key of a ring call that Python runs and may let the library replay from now on.
inline thread_local std::optional<Key> wanted_ring;

// A ring call of an op, with the tensors of its program.
struct RingReplay {
  char const* op;
  int64_t plan = 0;
  double scale;
  bool deterministic;
  std::string_view transport;
  std::shared_ptr<ReplayableCall> call;
  Stream stream{};
  std::optional<Key> key;
  size_t layouts = 0;  // words of the key before those of the tensors
  int64_t begun = 0;   // number of the call in its group

  RingReplay(char const* name, int64_t number, std::initializer_list<Tensor const*> tensors,
             c10::SymInt const& plan_of, double scale_of, bool given, std::string_view precision,
             std::string_view transport_of)
      : op(name), scale(scale_of), deterministic(is_deterministic(given)), transport(transport_of) {
    auto const handle = plan_of.maybe_as_int();
    bool const symmetric = transport == "auto" || transport == "symmetric";
    if (!host().enabled.load(std::memory_order_relaxed) || !handle || !symmetric ||
        precision != "native") {
      return;
    }
    at::Device const device = (*tensors.begin())->device();
    for (Tensor const* x : tensors) {
      if (!x->defined()) continue;
      if (!is_plain(*x) || x->numel() == 0 || x->device() != device) return;
    }
    auto const current = host().driver.stream(device.has_index() ? device.index() : 0);
    if (!current) return;
    stream = *current;
    plan = *handle;
    char const* const mode = std::getenv("RINGFA3_FORWARD");
    Key made;
    made.add(number), made.add(plan), made.add(scale);
    made.add(int64_t{deterministic});
    made.add(int64_t{transport == "auto"}), made.add(int64_t{device.index()});
    made.add(static_cast<int64_t>(stream.id));
    made.add(static_cast<int64_t>(std::hash<std::string_view>()(mode ? mode : "")));
    layouts = made.size();
    for (Tensor const* x : tensors) made.add(*x);
    call = host().ring_calls.find(made);
    key = std::move(made);
  }

  // The outputs of a call that replays its program; none if Python must run it.
  //
  // Throws what Python raises for a call that the driver refuses.
  //
  // lse: of a backward; a forward has none.
  std::optional<Tensors> run(Tensors inputs, Tensor const& lse = Tensor()) {
    if (!call) find_prepared(inputs);
    auto const launch = call ? call->begin(lse) : std::nullopt;
    if (!launch) return std::nullopt;
    begun = launch->call;
    ++host().counts.replayed;
    bool issued = false;
    try {
      return host().observer.around(op, [&] {
        issued = true;
        return issue(*launch, std::move(inputs));
      });
    } catch (std::exception const& error) {  // of the observer: the call has begun
      if (!issued) call->failed(false, error.what());
      throw;
    }
  }

  // Also keeps the calls of the plan that will follow.
  void find_prepared(Tensors const& inputs) {
    if (!key || !host().prepared_calls) return;
    for (PreparedCall& each : host().prepared_calls(
             {op, key->from(layouts), inputs, plan, scale, deterministic, transport, stream})) {
      if (!call) call = each.call;
      host().ring_calls.put(key->with(each.op, layouts, each.layouts), std::move(each.call));
    }
  }

  Tensors issue(ProgramLaunch const& launch, Tensors inputs) const {
    at::AutoDispatchBelowADInplaceOrView const below;
    try {
      return launch.program->run(std::move(inputs), stream, launch.waits);
    } catch (Refused const& refused) {
      call->refused(refused.what(), refused.status);
      throw;
    } catch (c10::OutOfMemoryError const& error) {
      call->failed(true, error.what_without_backtrace());
      throw;
    } catch (c10::Error const& error) {
      call->failed(false, error.what_without_backtrace());
      throw;
    } catch (std::exception const& error) {
      call->failed(false, error.what());
      throw;
    }
  }

  // Runs `python`, which may keep the call for its key.
  template <class Call>
  auto otherwise(Call const& python) {
    wanted_ring = std::move(key);
    struct Forget {
      ~Forget() { wanted_ring.reset(); }
    } const forget;
    return python();
  }
};

inline Outputs ring_attention(Tensor const& q, Tensor const& k, Tensor const& v,
                              MaybeTensor const& sink, c10::SymInt plan, double scale,
                              bool deterministic, std::string_view precision,
                              std::string_view transport) {
  c10::DeviceGuard const device(q.device());
  Tensor const& sink_of = tensor_of(sink);
  RingReplay replay("ring_attention", 0, {&q, &k, &v, &sink_of}, plan, scale, deterministic,
                    precision, transport);
  if (auto out = replay.run({q, k, v, sink_of})) {
    if (replay.begun) host().forward_calls.set((*out)[1], replay.begun);
    return {(*out)[0], (*out)[1]};
  }
  return replay.otherwise([&] {
    return ring_forward_op().redispatch(by_python(), q, k, v, sink, plan, scale, deterministic,
                                        precision, transport);
  });
}

inline Grads ring_attention_backward(Tensor const& dout, MaybeTensor const& dlse, Tensor const& q,
                                     Tensor const& k, Tensor const& v, Tensor const& out,
                                     Tensor const& lse, MaybeTensor const& sink, c10::SymInt plan,
                                     double scale, bool deterministic, std::string_view precision,
                                     std::string_view transport) {
  c10::DeviceGuard const device(q.device());
  Tensor const &dlse_of = tensor_of(dlse), &sink_of = tensor_of(sink);
  RingReplay replay("ring_attention_backward", 1,
                    {&dout, &dlse_of, &q, &k, &v, &out, &lse, &sink_of}, plan, scale, deterministic,
                    precision, transport);
  if (auto grads = replay.run({dout, dlse_of, q, k, v, out, lse, sink_of}, lse)) {
    auto& x = *grads;
    if (!sink_of.defined()) x.push_back(at::empty({0}, lse.options()));
    return {x[0], x[1], x[2], x[3]};
  }
  return replay.otherwise([&] {
    return ring_backward_op().redispatch(by_python(), dout, dlse, q, k, v, out, lse, sink, plan,
                                         scale, deterministic, precision, transport);
  });
}

// The arguments of a ring call behind q, k, v and the sink, which is none.
struct RingArguments {
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
    saved["plan's owner"] = host().keep_plan(plan);
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
                        RingArguments{below, *handle, scale, deterministic, precision, transport});
}

}  // namespace ringfa3::host
