"""Ring attention: one functional op that moves K/V between ranks while attention runs.

At hop t rank r attends to the K/V of rank r-t and merges the result into its running (O, LSE) by
online softmax (Ring Attention; FlashAttention's merge, across hops). Two K/V buffers serve any
world size. Over peers' memory one kernel may do all hops, on K/V that arrive while it runs
(`symmetric.forward_mode`); by messages a launch may do several (`p2p_pass`). In the backward dQ
stays. The float32 dK/dV of a hop return to the owner of the keys while the next kernels run.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch

from ringfa3 import host
from ringfa3.attention_op import register_attention
from ringfa3.custom_op import autocast_inputs, custom_op
from ringfa3.kernels.dispatch import select_quantised
from ringfa3.kernels.launch import num_ctas
from ringfa3.kernels.sinks import apply_sink
from ringfa3.kernels.streams import CurrentStream, on
from ringfa3.keywords import check_call, hides_positional
from ringfa3.planning.context_plan import ContextPlan, check_plan
from ringfa3.planning.graph_plan import GraphPlan
from ringfa3.planning.handles import from_handle, graph_handle
from ringfa3.quantisation.key_tiles import KEY_TILE
from ringfa3.ring.graph_op import graph_ring_attention
from ringfa3.ring.group import RingGroup
from ringfa3.ring.prepare_call import (
    PreparedCall,
    agree_prepared,
    bind_to_group,
    default_group,
    prepare_call,
    raise_on_all_ranks,
)
from ringfa3.ring.process_group import is_fake
from ringfa3.ring.quantised_forward import (
    gather_centres,
    local_tiles,
    repeat_attended,
    run_quantised_forward,
)
from ringfa3.schedules.host_code import forward_hops, gradients
from ringfa3.schedules.link import Signature
from ringfa3.straight_through import forward_centres, straight_through
from ringfa3.symmetric.forward_mode import FORWARD_MODE_ENV
from ringfa3.symmetric.ring_pass import prepared_calls
from ringfa3.validation import (
    TRANSPORTS,
    check_bool,
    check_choice,
    check_precision,
    check_sink,
    check_tensors,
    is_deterministic,
    resolve_scale,
)

FORWARDS = "gathered", "forward"


class _Op(NamedTuple):
    """The number of k in the inputs of an op's schedule, and the types of its passes."""

    k: int
    pass_types: tuple[str, ...]


OPS = {"ring_attention": _Op(1, FORWARDS), "ring_attention_backward": _Op(3, ("backward",))}


@hides_positional
def ring_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: ContextPlan,
    *positional: object,
    softmax_scale: float | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    precision: str = "native",
    transport: str = "auto",
    sink: torch.Tensor | None = None,
    **neutral: object,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Exact attention over documents that are spread over a context-parallel (CP) group.

    Args:
        q: (t, h, d); k: (t_k, h_kv, d); v: (t_k, h_kv, d_v), d_v as in `flash_attn_func`: the
            rank's tokens, t = plan.local_tokens and t_k = plan.local_keys, which differs in
            cross-attention only. Ranks exchange V with d columns, those beyond d_v zeros.
        plan: from `plan_context`. Made from (rank, world), it runs in the default group.
        softmax_scale: positive, from 2^-64 to 2^64; default d ** -0.5.
        deterministic: as in `flash_attn_func`, the same on all ranks.
        return_lse: also return the log-sum-exp of each row, differentiable.
        precision: "native", "fp8" or "int8", as in `flash_attn_func`. Ranks exchange K and, in
            "fp8", V in 8 bits; the forward moves them by messages, not over "symmetric".
        transport: "gloo" for CPU tensors; for CUDA tensors "nccl" or, between GPUs of one host,
            "symmetric", which "auto" prefers where it is possible.
        sink: as in `flash_attn_func`, the same on all ranks. Its gradient on a rank is that of the
            rank's tokens: sum it over the ranks, as those of weights.
        neutral: as in `flash_attn_func`.

    Returns:
        out (t, h, d_v); with `return_lse` (out, lse), lse (h, t) float32 (float64 for float64).

    Raises:
        ValueError, TypeError: on every rank of the group, naming the rank, the argument, its
            value and what is allowed. Ranks agree on new settings before anything is sent. If one
            rank deviates from settings that were agreed on earlier, all raise during the call; a
            rank that receives nothing in it raises at its next call.
        RuntimeError: on every rank, if one has no room for the shared memory; the group can be used
            afterwards.
        RingError: a peer died or stopped: within the group's timeout, naming hop and peer.
    """
    try:
        check_plan(plan)
    except TypeError as problem:
        raise_on_all_ranks(default_group(), problem)
    plan = bind_to_group(plan)
    try:
        if positional or neutral:
            check_call(ring_attn_func, positional, neutral)
        check_tensors(q, k, v)
        scale = resolve_scale(softmax_scale, q)
        if q.dim() == 3:  # else prepare_call raises
            check_sink(sink, autocast_inputs(q)[0])
        deterministic = check_bool("deterministic", deterministic)
        return_lse = check_bool("return_lse", return_lse)
        check_precision(precision)
        check_choice("transport", transport, TRANSPORTS)
    except Exception as problem:
        raise_on_all_ranks(plan.group, problem)
    q, k, v = autocast_inputs(q, k, v)
    settings = scale, deterministic, precision, transport
    if isinstance(plan, GraphPlan):
        out, lse = graph_ring_attention(q, k, v, sink, *plan.arguments(), *settings)
    else:
        out, lse = ring_attention(q, k, v, sink, graph_handle(plan), *settings)
    return (out, lse) if return_lse else out


def _report_errors(plan: ContextPlan) -> AbstractContextManager[None]:
    """Around all that follows `prepare_call`: reports an error on this rank to its peers, which
    may wait for its messages, or have them all and go on to their next call."""
    if plan.world == 1 or plan.group is None or is_fake(plan.group):
        return nullcontext()
    return RingGroup.of(plan.group)


def _without_autocast(device: torch.device) -> AbstractContextManager[object]:
    if not torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


@custom_op
def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sink: torch.Tensor | None,
    plan: int,
    scale: float,
    deterministic: bool,
    precision: str,
    transport: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of this rank's tokens, the whole ring in one op; `plan` is a plan's handle."""
    context = ContextPlan.from_handle(plan)
    settings = scale, is_deterministic(deterministic), precision, transport
    call = prepare_call(q, k, v, context, *settings, "forward", sink=sink is not None)
    if precision == "native":
        return run_forward(q, k, v, scale, call, sink)
    with _report_errors(call.plan), on(q.device), _without_autocast(q.device):
        k, v = repeat_attended(call.plan, k, v)
        out, lse, centres = run_quantised_forward(
            q, k, v, call.plan, scale, precision, call.messages
        )
        if sink is not None:
            lse = apply_sink(out, lse, sink)
        _returns(lse, call.plan)
        if call.plan.world == 1:
            forward_centres.set(lse, centres)
    return out, lse


def _prepared_calls(
    op: str,
    layouts: bytes,
    inputs: tuple[torch.Tensor | None, ...],
    plan: int,
    scale: float,
    deterministic: bool,
    transport: str,
    stream: int,
    stream_id: int,
) -> Sequence[tuple[int, bytes, object]]:
    """For an op that the C++ launcher does not know: calls of its plan that it may begin from now
    on, of which the first is this one. The ranks have agreed on them. Each has the number of its
    op, the layouts of its inputs and a `ReplayableCall`.

    Empty: the launcher calls the op in Python.

    inputs: of the schedule. layouts: theirs. stream: the current one, and its id.
    """
    context: ContextPlan = from_handle(plan)
    prepared: Any = context.prepared
    if not prepared or context.world == 1 or torch.is_inference_mode_enabled():
        return []
    k_number, pass_types = OPS[op]
    device = inputs[k_number].device  # type: ignore[union-attr]  # k is given
    sms, of_backward = num_ctas(device), (scale, deterministic, "native")
    for pass_type in pass_types:
        of_type = of_backward if pass_type == "backward" else scale
        signature = Signature(pass_type, sms, of_type, layouts)
        schedule = prepared.get(signature)
        if schedule is not None and schedule.forward_mode == os.environ.get(FORWARD_MODE_ENV):
            break
    else:
        return []
    on_stream = CurrentStream(device, stream, False, stream_id)
    values = {"deterministic": str(deterministic), "transport": transport}
    settings = schedule.settings.with_values(values)
    backend = agree_prepared(context, device, on_stream, schedule, settings)
    if backend is None:
        return []
    signatures = [signature]
    for x in prepared if pass_type != "backward" else ():
        if x.pass_type == "backward" and x.settings == of_backward and x.num_sms == sms:
            signatures.append(x)
    try:
        return prepared_calls(backend, host.library(), context, signatures, settings, on_stream)
    except Exception:  # entered here, not before: a first call has few frames of Python to spend
        with _report_errors(context):
            raise


host.on_first_call(_prepared_calls)


def run_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    call: PreparedCall,
    sink: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`ring_attention` in the dtype of q, after `prepare_call`."""
    with _report_errors(call.plan), on(q.device), _without_autocast(q.device):
        ring_pass = call.ring_pass()
        code = partial(forward_hops, scale, call, ring_pass)
        inputs = q, k, v, sink
        out, lse = ring_pass.run_schedule(k, inputs, scale, code) or code(*inputs)
        _returns(lse, call.plan)
    return out, lse


def _returns(lse: torch.Tensor, plan: ContextPlan) -> None:
    """Names the forward call under way to its backward."""
    if plan.world > 1 and plan.group is not None and not is_fake(plan.group):
        RingGroup.of(plan.group).returned(lse)


@custom_op
def ring_attention_backward(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    sink: torch.Tensor | None,
    plan: int,
    scale: float,
    deterministic: bool,
    precision: str,
    transport: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq, dk, dv, dsink) of this rank's tokens in the dtypes of q, k, v, lse.

    sink and dsink as in `functional.attention_backward`.
    """
    context, deterministic = ContextPlan.from_handle(plan), is_deterministic(deterministic)
    settings = scale, deterministic, precision, transport
    inputs = dout, dlse, q, k, v, out, lse, sink
    if precision == "native":
        call = prepare_call(q, k, v, context, *settings, "backward", sink=sink is not None, lse=lse)
        grads = run_backward(*inputs[:7], scale, deterministic, call, sink)
    else:  # tiles of keys have a factor each, also those that other ranks attend to
        context = context.aligned(KEY_TILE)
        call = prepare_call(q, k, v, context, *settings, "backward", sink=sink is not None, lse=lse)
        with _report_errors(call.plan), on(q.device), _without_autocast(q.device):
            kernel = select_quantised(q, precision)
            k, v = repeat_attended(call.plan, k, v)
            inputs = dout, dlse, q, k, v, out, lse, sink
            centres = forward_centres.get(lse) if call.plan.world == 1 else None
            if centres is None:
                centres = gather_centres(kernel, k, v, call.plan, call.messages)
            grads = straight_through(
                partial(run_backward, scale=scale, deterministic=deterministic, call=call),
                *inputs,
                scale,
                kernel,
                local_tiles(call.plan),
                centres,
            )
    dq, dk, dv, dsink = grads if sink is not None else (*grads, lse.new_empty((0,)))
    return dq, dk, dv, dsink


def run_backward(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    deterministic: bool,
    call: PreparedCall,
    sink: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """`ring_attention_backward` after `prepare_call`; without a sink (dq, dk, dv) alone."""
    inputs = dout, dlse, q, k, v, out, lse, sink
    with _report_errors(call.plan), on(q.device), _without_autocast(q.device):
        ring_pass = call.ring_pass()
        settings = scale, deterministic, call.precision
        code = partial(gradients, scale, deterministic, call, ring_pass)
        grads = ring_pass.run_schedule(k, inputs, settings, code)
        return code(*inputs) if grads is None else grads


def _split(ctx: Any, *settings: Any) -> tuple[tuple[()], tuple[Any, ...]]:
    if isinstance(settings[0], int):  # a compiler traces with a symbol
        ctx.plan = ContextPlan.from_handle(settings[0])  # alive until the backward
    return (), settings


register_attention(ring_attention, ring_attention_backward, _split)
