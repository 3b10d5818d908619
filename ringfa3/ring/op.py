"""Ring attention: one functional op that passes K/V from rank to rank while attention runs.

At hop t rank r works on the K/V of rank r-t and merges what it finds into its running (O, LSE) by
their online-softmax statistics (Ring Attention; the merge is FlashAttention's, across hops). Two
K/V buffers serve any number of ranks. Over peers' memory one kernel may do all hops, on K/V that
gather beside it (`gathering.py` says when). In the backward dQ stays; what a kernel finds of a
block's float32 dK/dV goes home to the block's owner while the next kernels run: over peers' memory
at once (`course.py`), by messages with the partial that travels from neighbour to neighbour
(`buffers.py`).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from ringfa3.custom_op import autocast_inputs, custom_op, register_autograd, register_fake
from ringfa3.kernels.dispatch import select_backward, select_forward
from ringfa3.kernels.reference import statistics_dtype
from ringfa3.planning.context_plan import ContextPlan, check_plan
from ringfa3.ring.group import RingGroup
from ringfa3.ring.p2p import Transport
from ringfa3.ring.p2p_pass import Relay
from ringfa3.ring.prepare_call import bind, default_group, enter, refuse
from ringfa3.symmetric.backend import CudaMachine
from ringfa3.symmetric.forward_mode import kind_of_forward
from ringfa3.symmetric.ring_pass import Course
from ringfa3.validation import check_tensors, check_type, resolve_scale


def ring_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: ContextPlan,
    softmax_scale: float | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    precision: str = "native",
    transport: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Exact attention over documents that are spread over a context group.

    Args:
        q: (t, h, d); k, v: (t, h_kv, d): the rank's tokens, t = plan.local_tokens.
        plan: from `plan_context`. Made from (rank, world), it runs in the default group.
        softmax_scale: positive; default d ** -0.5.
        deterministic: bitwise equal gradients from run to run.
        return_lse: also return the log-sum-exp of each row, differentiable.
        precision: "native" computes in the dtype of q.
        transport: "gloo" for CPU tensors; for CUDA tensors "nccl" or, between GPUs of one host,
            "symmetric", which "auto" prefers where it is possible.

    Returns:
        out (t, h, d); with `return_lse` (out, lse), lse (h, t) float32 (float64 for float64).

    Raises:
        ValueError, TypeError: on every rank of the group, naming the rank, the argument, its
            value and what is allowed. New settings are agreed on before anything is sent; a rank
            that deviates from known ones is found out in mid-call, or, by a rank that waits for
            nothing in it, at its next call.
        RuntimeError: on every rank, if one has no room for the memory that they share; the group
            can be used afterwards.
        RingError: a peer died or stopped: within the group's timeout, naming hop and peer.
    """
    try:
        check_plan(plan)
    except TypeError as problem:
        refuse(default_group(), problem)
    plan = bind(plan)
    try:
        check_tensors(q, k, v)
        scale = resolve_scale(softmax_scale, q)
        check_type("deterministic", deterministic, bool)
        check_type("precision", precision, str)
        check_type("transport", transport, str)
    except (TypeError, ValueError) as problem:
        refuse(plan.group, problem)
    q, k, v = autocast_inputs(q, k, v)
    out, lse = ring_attention(q, k, v, plan.handle, scale, deterministic, precision, transport)
    return (out, lse) if return_lse else out


def _telling_peers(plan: ContextPlan) -> AbstractContextManager[None]:
    """Around the hops of a call: the peers hear of any error."""
    return nullcontext() if plan.group is None else RingGroup.of(plan.group)


def _on(device: torch.device) -> AbstractContextManager[object]:
    here = device.type != "cuda" or device.index == torch.cuda.current_device()
    return nullcontext() if here else torch.cuda.device(device)


def _without_autocast(device: torch.device) -> AbstractContextManager[object]:
    if not torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def _begin(
    plan: ContextPlan,
    moved_by: Transport | CudaMachine | None,
    direction: str,
    k: torch.Tensor,
    v: torch.Tensor,
    waits: bool = False,
) -> Relay | Course:
    """Starts the first transfers of a call, whose `run` does the rest.

    waits: `attend` of a gathered forward takes words to wait for.
    """
    if isinstance(moved_by, CudaMachine):
        return Course(moved_by, plan, direction, k, v, waits)
    return Relay(plan, moved_by, direction, k, v)


@custom_op
def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: int,
    scale: float,
    deterministic: bool,
    precision: str,
    transport: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of this rank's tokens, the whole ring in one op; `plan` is a plan's handle."""
    context = ContextPlan.from_handle(plan)
    moved_by = enter(q, k, v, context, scale, deterministic, precision, transport, "forward")
    return run_forward(q, k, v, context, scale, moved_by)


def run_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    context: ContextPlan,
    scale: float,
    moved_by: Transport | CudaMachine | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`ring_attention` that has been agreed on."""
    with _telling_peers(context), _on(q.device), _without_autocast(q.device):
        kernel = select_forward(q)
        direction, hops = "forward", context.hops
        if isinstance(moved_by, CudaMachine) and kind_of_forward(context, q, k) == "gathered":
            direction, hops = "gathered", context.gathered
        tilings = hops.forward(kernel.tile_m)
        once = hops.single_hop(kernel.tile_m)
        statistics = statistics_dtype(q.dtype)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        running = q.new_empty((0 if once else len(q), *q.shape[1:]), dtype=statistics)
        lse = q.new_empty((q.shape[1], q.shape[0]), dtype=statistics)

        def attend(hop: int, k: torch.Tensor, v: torch.Tensor, *words: torch.Tensor) -> None:
            kernel.attend(q, k, v, tilings[hop], scale, out, running, lse, *words)

        _begin(context, moved_by, direction, k, v, kernel.takes_arrivals).run(attend)
    return out, lse


@register_fake(ring_attention)
def _(q, k, v, plan, scale, deterministic, precision, transport):  # type: ignore[no-untyped-def]
    lse = q.new_empty((q.shape[1], q.shape[0]), dtype=statistics_dtype(q.dtype))
    return q.new_empty(q.shape), lse


@custom_op
def ring_attention_backward(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    plan: int,
    scale: float,
    deterministic: bool,
    precision: str,
    transport: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq, dk, dv) of this rank's tokens in the dtypes of q, k, v."""
    context = ContextPlan.from_handle(plan)
    moved_by = enter(q, k, v, context, scale, deterministic, precision, transport, "backward")
    return run_backward(dout, dlse, q, k, v, out, lse, context, scale, deterministic, moved_by)


def run_backward(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    context: ContextPlan,
    scale: float,
    deterministic: bool,
    moved_by: Transport | CudaMachine | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`ring_attention_backward` that has been agreed on."""
    with _telling_peers(context), _on(q.device), _without_autocast(q.device):
        kernel = select_backward(q)
        call = _begin(context, moved_by, "backward", k, v)
        tilings = context.hops.backward(kernel.tile_n, kernel.tile_m, deterministic)
        run = kernel.make_pass(dout, dlse, q, out, lse, context.hops, scale, deterministic)

        group = q.shape[1] // k.shape[1]

        def attend(
            hop: int,
            k: torch.Tensor,
            v: torch.Tensor,
            dk: torch.Tensor,
            dv: torch.Tensor,
            first_head: int = 0,
        ) -> None:
            heads = group * first_head, group * k.shape[1]
            run.hop(k, v, tilings[hop], dk, dv, *heads)

        call.run(attend)
    dk, dv = (
        call.home[:, i].to(k.dtype, copy=True, memory_format=torch.contiguous_format)
        for i in range(2)
    )
    del call  # dQ may have the memory of its float32 dK and dV
    return run.dq(), dk, dv


@register_fake(ring_attention_backward)
def _(dout, dlse, q, k, v, *_):  # type: ignore[no-untyped-def]
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx, inputs, outputs):  # type: ignore[no-untyped-def]
    q, k, v, *ctx.settings = inputs
    if isinstance(inputs[3], int):  # a compiler traces with a symbol
        ctx.plan = ContextPlan.from_handle(inputs[3])  # alive until the backward
    ctx.save_for_backward(q, k, v, *outputs)


def _gradients(ctx, dout, dlse):  # type: ignore[no-untyped-def]
    saved = ctx.saved_tensors
    dout = torch.zeros_like(saved[3]) if dout is None else dout  # of out
    return ring_attention_backward(dout, dlse, *saved, *ctx.settings)


register_autograd(ring_attention, _save, _gradients)
