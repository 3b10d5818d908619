"""How a ring call begins: each rank checks its own arguments, all agree, or all raise.

What a plan has been called with before is neither checked nor agreed on again, but for the first
capture in a CUDA graph, which ranks agree on, and the room that any capture needs.
"""

from __future__ import annotations

import os
import sys
import weakref
from functools import lru_cache
from typing import NoReturn, TypeAlias

import torch
import torch.distributed as dist

from ringfa3.kernels.dispatch import select_backward, select_forward
from ringfa3.planning.context_plan import ContextPlan
from ringfa3.ring.group import RingGroup, Settings
from ringfa3.ring.p2p import Transport
from ringfa3.symmetric import graph_capture
from ringfa3.symmetric.backend import CudaMachine
from ringfa3.symmetric.forward_mode import FORWARD, kind_of_forward
from ringfa3.validation import (
    check_local_tokens,
    check_precision,
    check_qkv,
    check_transport,
)

ACCEPTED_KEPT = 64  # kinds of calls of a plan that were found right


def refuse(group: dist.ProcessGroup | None, error: Exception) -> NoReturn:
    """Raises `error` on every rank of the group."""
    if group is not None and dist.get_world_size(group) > 1:
        RingGroup.of(group).agree(Settings(), error)
    raise error


def default_group() -> dist.ProcessGroup | None:
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def bind(plan: ContextPlan, group: dist.ProcessGroup | None = None) -> ContextPlan:
    """The plan with a group to run in: its own, else `group`, else the default group."""
    if plan.group is not None or (plan.world == 1 and not plan.implicit):
        return plan
    group = group or default_group()
    if plan.world == 1 and (group is None or dist.get_world_size(group) == 1):
        return plan
    if group is None:
        raise ValueError(
            f"plan is for {plan.world} ranks, but torch.distributed is not initialised"
        )
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    if (rank, world) != (plan.rank, plan.world):
        refuse(
            group,
            ValueError(
                f"plan is for rank {plan.rank} of {plan.world}, but this is rank {rank} of a group "
                f"of {world}: make it with group=({rank}, {world})"
            ),
        )
    return plan.bound_to(group)


_Asked: TypeAlias = tuple[object, ...]
_accepted: weakref.WeakKeyDictionary[ContextPlan, dict[_Asked, tuple[Settings, Settings]]]
_accepted = weakref.WeakKeyDictionary()


def enter(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: ContextPlan,
    scale: float,
    deterministic: bool,
    precision: str,
    transport: str,
    direction: str,
) -> Transport | CudaMachine | None:
    """Checks a call, agrees on it and gives what moves its tensors; None on one rank."""
    error: Exception | None = None
    known = _accepted.setdefault(plan, {})
    asked = (
        *(q.shape, q.dtype, q.device, q.stride()),
        *(k.shape, k.dtype, k.device, k.stride()),
        *(v.shape, v.dtype, v.device, v.stride()),
        *(scale, deterministic, precision, transport, direction, os.environ.get(FORWARD)),
    )
    accepted = known.get(asked)
    first = accepted is None
    if accepted is None:
        settings = Settings()
        try:
            check_precision(precision)
            _check(q, k, v, plan, transport)
            settings = _settings(q, k, plan, scale, deterministic, transport)
            select = select_forward if direction == "forward" else select_backward
            select(q)  # a kernel is built, if it must be, while no rank waits in a hop
            if len(known) == ACCEPTED_KEPT:
                known.clear()
            known[asked] = settings, Settings({**settings, "pass": direction})
        except (TypeError, ValueError) as problem:
            error = problem
        accepted = known.get(asked, (settings, settings))
    if plan.world == 1:
        if error is not None:
            raise error
        return None
    assert plan.group is not None
    group = RingGroup.of(plan.group)
    pulls = error is None and q.is_cuda and group.may_pull(transport)
    if pulls and torch.cuda.is_current_stream_capturing():
        error = graph_capture.refusal(group.opened, plan, direction, q, k, not first)
        accepted = of_captured(accepted[0]), of_captured(accepted[1])
    try:
        group.agree(accepted[0], error)
    except (TypeError, ValueError):
        if first:
            known.pop(asked, None)  # it has not run
        raise
    group.begin(accepted[1])
    if q.is_cuda and transport != "nccl":
        machine = group.machine(q.device)
        if isinstance(machine, CudaMachine):
            return machine
        if transport == "symmetric":
            raise ValueError(f"transport='symmetric' is not possible here ({machine}): use 'nccl'")
        if group.rank == 0:
            say_transport(machine)
    return group.transport("nccl" if q.is_cuda else "gloo", q.device)


@lru_cache(None)
def say_transport(reason: str) -> None:
    """Once per process and reason, in one line: that "auto" is NCCL here."""
    print(f"ringfa3: the ring runs over nccl: {reason}", file=sys.stderr, flush=True)


def of_captured(settings: Settings) -> Settings:
    """Settings that ranks agree on only if all of them capture the call."""
    return Settings({**settings, "CUDA graph": "captured"})


def _check(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: ContextPlan, transport: str
) -> None:
    check_qkv(q, k, v, dims=3)
    check_local_tokens(q, k, plan.local_tokens, plan.total_tokens)
    check_transport(transport, q.device)


def _settings(
    q: torch.Tensor,
    k: torch.Tensor,
    plan: ContextPlan,
    scale: float,
    deterministic: bool,
    transport: str,
) -> Settings:
    """What must be equal on all ranks of a call."""
    return Settings(
        {
            "plan.layout": plan.layout,
            "plan.window": f"(left, right) = {plan.band}",
            "plan.cu_seqlens": f"{len(plan.lengths)} documents, {plan.total_tokens} tokens, "
            f"digest {plan.digest}",
            "q": f"{q.shape[1]} heads, head_dim {q.shape[2]}, {q.dtype} on {q.device.type}",
            "k": f"{k.shape[1]} heads",
            "softmax_scale": repr(scale),
            "deterministic": str(deterministic),
            "transport": transport if q.is_cuda else "gloo",
            "forward": kind_of_forward(plan, q, k),  # of backwards, too: they agree on nothing new
        }
    )
