"""How a ring call begins: each rank checks its own arguments, then all agree or all raise.

Transport and forward mode are decided here, once a call. A call signature that a plan has had
before is neither checked nor agreed on again. Exceptions: ranks agree on a first capture in a CUDA
graph, and every capture checks its memory.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, NoReturn, TypeAlias

import torch
import torch.distributed as dist

from ringfa3 import host
from ringfa3.errors import RingError
from ringfa3.kernels.dispatch import select_backward, select_forward, select_quantised
from ringfa3.kernels.streams import CurrentStream
from ringfa3.pass_interface import RingPass
from ringfa3.planning.context_plan import ContextPlan
from ringfa3.quantisation.dequantised import backward_keys
from ringfa3.ring.connect import connection, two_levels_of
from ringfa3.ring.group import RingGroup
from ringfa3.ring.p2p import FakeTransport, Transport
from ringfa3.ring.p2p_pass import P2PRingPass
from ringfa3.ring.process_group import is_fake
from ringfa3.schedules.encoded import EncodedSchedule
from ringfa3.schedules.settings import SINK, Heads, Settings, ring_settings
from ringfa3.symmetric.backend import SymmetricBackend
from ringfa3.symmetric.cuda_graphs import capture_error
from ringfa3.symmetric.forward_mode import (
    FORWARD_MODE_ENV,
    budget_error,
    select_forward_mode,
)
from ringfa3.symmetric.ipc_memory import IpcMemory
from ringfa3.symmetric.stream_ops import BufferSpec
from ringfa3.validation import (
    check_local_tokens,
    check_qkv,
    check_ring_precision,
    check_transport,
)

MAX_VALIDATED = 128  # entries of a plan: of arguments, and of call signatures


def raise_on_all_ranks(group: dist.ProcessGroup | None, error: Exception) -> NoReturn:
    """Raises `error` on every rank of the group, or here alone if the others do not come.

    Here alone also while a compiler traces: every rank traces the same.
    """
    if torch.compiler.is_compiling():
        raise error
    if group is not None and dist.get_world_size(group) > 1 and not is_fake(group):
        try:
            RingGroup.of(group).agree(Settings(), error)
        except RingError as lost:
            raise error from lost
    raise error


def default_group() -> dist.ProcessGroup | None:
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def bind_to_group(plan: ContextPlan, group: dist.ProcessGroup | None = None) -> ContextPlan:
    """The plan with a group to run in: its own, else `group`, else the default group."""
    if plan.group is not None or (plan.world == 1 and not plan.implicit):
        return plan
    group = group or default_group()
    if plan.world == 1 and (group is None or dist.get_world_size(group) == 1):
        return plan
    if group is None:
        raise ValueError(
            f"plan is for {plan.world} ranks, but torch.distributed is not initialised: call "
            "torch.distributed.init_process_group first"
        )
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    if (rank, world) != (plan.rank, plan.world):
        raise_on_all_ranks(
            group,
            ValueError(
                f"plan is for rank {plan.rank} of {plan.world}, but this is rank {rank} of a group "
                f"of {world}: make it with group=({rank}, {world})"
            ),
        )
    return plan.bound_to(group)


class PreparedCall(NamedTuple):
    """A call that is valid and that all ranks have agreed on.

    pass_type  "forward", "gathered" or "backward"
    make_pass  make_pass(plan, pass_type): a pass over the call's transport
    messages   between ranks; None for a world of one rank, and in "native" over `symmetric`
    precision  of the call
    """

    plan: ContextPlan
    pass_type: str
    make_pass: Callable[[ContextPlan, str], RingPass]
    messages: Transport | None = None
    precision: str = "native"

    def ring_pass(self) -> RingPass:
        made = self.make_pass(self.plan, self.pass_type)
        made.precision = self.precision
        return made


def pass_type_of(direction: str, forward_mode: str) -> str:
    """The type of a pass over `symmetric`; direction: "forward" or "backward"."""
    return "gathered" if (direction, forward_mode) == ("forward", "gathered") else direction


class _Validated(NamedTuple):
    """What is known of calls with the same arguments, or with one signature: the same arguments and
    direction.

    settings       on which ranks agree
    call_settings  the same with the call's direction
    """

    settings: Settings
    call_settings: Settings
    forward_mode: str


_CallKey: TypeAlias = tuple[object, ...]
_validated: weakref.WeakKeyDictionary[ContextPlan, dict[_CallKey, _Validated]]
_validated = weakref.WeakKeyDictionary()


def prepare_call(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: ContextPlan,
    scale: float,
    deterministic: bool,
    precision: str,
    transport: str,
    direction: str,
    sink: bool = False,
    lse: torch.Tensor | None = None,
) -> PreparedCall:
    """Checks a call, agrees on it with all ranks and chooses its transport and forward mode.

    Args:
        q, k, v: (t, h, d), (t, h_kv, d) and (t, h_kv, d_v), this rank's tokens.
        direction: "forward" or "backward".
        sink: whether the call has sinks.
        lse: of a backward, that of its forward call.

    Raises:
        ValueError, TypeError: on all ranks, if an argument of one is not allowed or differs.
        RingError: a rank has given up, or does not answer within the timeout.
        RuntimeError: the transport cannot be made, or a kernel cannot be built.
    """
    error: Exception | None = None
    known = _validated.setdefault(plan, {})
    arguments = (
        *(q.shape, q.dtype, q.device, q.stride()),
        *(k.shape, k.dtype, k.device, k.stride()),
        *(v.shape, v.dtype, v.device, v.stride()),
        *(scale, deterministic, precision, transport, os.environ.get(FORWARD_MODE_ENV)),
    )
    key = *arguments, direction, sink
    validated = known.get(key)
    first = validated is None
    if validated is None:
        validated = _Validated(Settings(), Settings(), "hops")
        try:
            if q.is_cuda:
                host.ensure()
            if len(known) >= MAX_VALIDATED:
                known.clear()
            valid = known.get(arguments)  # those of a backward are its forward's
            if valid is None:
                _validate(q, k, v, plan, transport, precision)
                mode = select_forward_mode(plan, q, k)
                heads, more = Heads.of(q, k, v), (scale, deterministic, precision, transport, mode)
                settings = ring_settings(plan, heads, q.device.type, *more)
                known[arguments] = valid = _Validated(settings, settings, mode)
            settings, _, mode = valid  # another thread may have cleared `known`
            if sink:
                settings = settings.with_values(SINK)
            validated = _Validated(settings, settings, mode)
            _build_kernels(q, v.shape[2], plan, direction, precision, deterministic)
            if direction == "forward" and precision != "native":  # the order of V in records
                kernel = type(select_quantised(q, precision)).__name__
                settings = settings.with_values({"8-bit forward": kernel})
            validated = _Validated(settings, settings.of_pass(direction), mode)
            known[key] = validated
        except Exception as problem:  # raised below, on all ranks
            error = problem
    if plan.world == 1:
        if error is not None:
            raise error
        return PreparedCall(plan, direction, host.ProgramPass, precision=precision)
    assert plan.group is not None
    if is_fake(plan.group):
        if error is not None:
            raise error
        nobody = FakeTransport()
        return PreparedCall(plan, direction, partial(P2PRingPass, nobody), nobody, precision)
    group = RingGroup.of(plan.group)
    connections = group.connections
    pass_type = pass_type_of(direction, validated.forward_mode)
    by_messages = transport == "nccl" or (direction == "forward" and precision != "native")
    settings, call_settings, _ = validated
    hosts = None if by_messages else two_levels_of(transport, q.device, plan.hosts)
    symmetric = not by_messages and q.is_cuda and connections.may_use_symmetric(transport)
    symmetric = symmetric and hosts is None
    if error is None and hosts is not None:
        memory = connections.memory_of_levels(hosts)
        error = _device_error(q.device, memory) or _level_error(plan)
    if error is None and symmetric:
        error = _device_error(q.device, connections.shared_memory) or budget_error(plan)
    if error is None and symmetric and torch.cuda.is_current_stream_capturing():
        keys = k if precision == "native" else backward_keys(k)
        spec = BufferSpec(plan, pass_type, keys)
        error = capture_error(connections.shared_memory, spec, not first)
        settings, call_settings = _captured(settings), _captured(call_settings)
    try:
        group.agree(settings, error)
    except (TypeError, ValueError):
        if first:
            known.pop(key, None)  # it has not run
        raise
    group.begin(call_settings, group.calls.forward_of(lse))
    make_pass, messages = connection(group, q.device, transport, by_messages, hosts)
    pass_type = direction if messages else pass_type
    if messages is None and precision != "native":  # statistics go by messages
        messages = connection(group, q.device, transport, by_messages=True)[1]
    return PreparedCall(plan, pass_type, make_pass, messages, precision)


def agree_prepared(
    plan: ContextPlan,
    device: torch.device,
    stream: CurrentStream,
    schedule: EncodedSchedule,
    settings: Settings,
) -> SymmetricBackend | None:
    """As `prepare_call`, for a call over `symmetric` that has the signature of a prepared schedule,
    which implies that its arguments are allowed.

    settings: of the call, without its direction.

    None: `prepare_call` must look at it, as the ranks are not connected, other ranks are in
    trouble, or its memory or stream is not that of the latest call.

    Raises as `prepare_call`.
    """
    group = RingGroup.known(plan.group)
    if group is None or (backend := group.connections.backend) is None:
        return None
    if backend.device != device or not backend.is_ready(schedule, stream):
        return None
    group.agree(settings)
    return backend


def _device_error(device: torch.device, memory: IpcMemory | None) -> ValueError | None:
    """Why a call over `symmetric` cannot run on a device: the group's streams are on another."""
    if memory is None or memory.device == device:
        return None
    return ValueError(
        f"q is on {device}; this group's ring over 'symmetric' runs on {memory.device}: give "
        f"tensors on {memory.device}, transport='nccl' or a plan of another group"
    )


def _level_error(plan: ContextPlan) -> ValueError | None:
    """Why no call over two levels can run by a plan, or at this point."""
    if plan.kv_budget is not None:
        return ValueError(
            f"kv_budget={plan.kv_budget} with transport='symmetric' on several hosts: what ranks "
            "of a host publish has no budget; use transport='nccl', or a plan without one"
        )
    if torch.cuda.is_current_stream_capturing():
        return ValueError(
            "transport='symmetric' on several hosts cannot be captured in a CUDA graph: use 'nccl'"
        )
    return None


def _captured(settings: Settings) -> Settings:
    """Settings on which ranks agree only if all of them capture the call."""
    return settings.with_values({"CUDA graph": "captured"})


def _validate(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: ContextPlan,
    transport: str,
    precision: str,
) -> None:
    check_qkv(q, k, v, dims=3)
    check_local_tokens(q, k, plan.local_tokens, plan.local_keys, plan.total_tokens)
    check_transport(transport, q.device)
    check_ring_precision(precision, q, v, plan.world, transport)
    if precision != "native" and plan.kv_budget is not None and plan.world > 1:
        raise ValueError(
            f"precision={precision!r} with kv_budget={plan.kv_budget}: buffers of 8 bits "
            "have no budget; make the plan without one, or compute in 16 bits"
        )


def _build_kernels(
    q: torch.Tensor,
    v_dim: int,
    plan: ContextPlan,
    direction: str,
    precision: str,
    deterministic: bool,
) -> None:
    """Builds missing kernels while no rank waits in a hop."""
    ordered = deterministic and direction == "backward"
    forms = {plan.hops.of_backward(precision, ordered)}
    if plan.world > 1:
        forms.add(plan.hops)  # whose unit has the kernels of `select_local_kv`, too
    if precision != "native":
        select_quantised(q, precision)  # also what rounds in a backward
    for hops in forms if direction == "backward" or precision == "native" else ():
        if direction == "forward":
            select_forward(q, hops, v_dim)
        else:
            select_backward(q, precision, hops.clips, v_dim)
