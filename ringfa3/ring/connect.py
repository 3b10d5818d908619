"""Connects the ranks of a CP group: at their first ring call, or earlier by `connect`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import torch

from ringfa3.kernels.dispatch import log_once
from ringfa3.pass_interface import RingPass
from ringfa3.planning.context_plan import ContextPlan
from ringfa3.planning.placement.hosts import find_hosts
from ringfa3.planning.process_groups import Group, resolve_group
from ringfa3.ring.group import RingGroup
from ringfa3.ring.levels.two_level_pass import TwoLevelPass
from ringfa3.ring.p2p import Transport
from ringfa3.ring.p2p_pass import P2PRingPass
from ringfa3.ring.process_group import backend_of, is_fake
from ringfa3.schedules.settings import Settings
from ringfa3.symmetric.ring_pass import SymmetricRingPass
from ringfa3.validation import check_transport

Hosts: TypeAlias = tuple[int, ...]  # of each rank


def connect(
    group: Group = None, device: torch.device | str | None = None, transport: str = "auto"
) -> str | None:
    """Connects the ranks of a CP group before their first ring call, which then only computes.

    All ranks of the group call it at the same point, no other rank takes part. Call it after
    `init_process_group`, where ranks would otherwise reach their first ring call at different
    times: in a pipeline, or before a timed step.

    Args:
        group: as in `plan_context`, but not (rank, world).
        device: of the tensors of later calls; default: the current GPU if the group has NCCL, else
            the CPU.
        transport: as in `ring_attn_func`. Calls in 8 bits use "nccl" also where "auto" connects
            over "symmetric": connect both.

    Returns:
        The transport that calls will use; None for a group of one rank or of backend `fake`.

    Raises:
        ValueError, TypeError: on all ranks, if an argument of one is not allowed or differs.
        RingError: a rank did not call it within the group's timeout.
        RuntimeError: the transport cannot be made.
    """
    _, world, process_group = resolve_group(group)
    if world > 1 and process_group is None:
        raise ValueError(f"group={group!r}: connect needs a ProcessGroup or a DeviceMesh")
    if world == 1 or process_group is None or is_fake(process_group):
        return None
    error: Exception | None = None
    on = "?"
    hosts: Hosts | None = None
    try:
        if device is None:
            nccl = backend_of(process_group) == "nccl" and torch.cuda.is_available()
            device = "cuda" if nccl else "cpu"
        device = torch.device(device)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        check_transport(transport, device)
        on = device.type
        hosts = two_levels_of(transport, device, find_hosts(None, world, process_group))
    except Exception as problem:  # raised below, on all ranks
        error = problem
    ring = RingGroup.of(process_group)
    settings = Settings({"connect": f"transport={transport!r} on {on}, hosts={hosts}"})
    ring.agree(settings, error, anew=True)
    assert isinstance(device, torch.device)
    ring.begin(settings)
    connection(ring, device, transport, transport == "nccl", hosts)
    return ring.connections.last_transport


def two_levels_of(transport: str, device: torch.device, hosts: tuple[int, ...]) -> Hosts | None:
    """The hosts of a call whose ranks copy inside each host and send messages between them: where
    `symmetric` is asked for by name, on several hosts of several ranks. None for other calls."""
    asked = transport == "symmetric" and device.type == "cuda"
    several = len(set(hosts)) > 1 and 1 not in Counter(hosts).values()
    return hosts if asked and several else None


def connection(
    group: RingGroup,
    device: torch.device,
    transport: str,
    by_messages: bool,
    hosts: Hosts | None = None,
) -> tuple[Callable[[ContextPlan, str], RingPass], Transport | None]:
    """(make_pass, messages) of `PreparedCall`, of a call on which all ranks have agreed.

    The first such call connects the ranks.

    by_messages: the call does not use `symmetric`
    hosts: from `two_levels_of`

    Raises ValueError on all ranks: `symmetric` is asked for by name and not possible.
    """
    connections = group.connections
    if hosts is not None and not by_messages:
        with group:
            levels = connections.two_levels(hosts, device)
        if isinstance(levels, str):
            raise _not_possible(levels)
        return partial(TwoLevelPass, levels), levels
    if device.type == "cuda" and not by_messages:
        with group:
            backend = connections.symmetric_backend(device)
        if backend is not None:
            return partial(SymmetricRingPass, backend), None
        if transport == "symmetric":  # on all ranks alike, so none tells the others
            raise _not_possible(connections.unsupported)
        if group.rank == 0:
            log_once(f"using transport nccl; symmetric is not available: {connections.unsupported}")
    with group:
        p2p = connections.transport("nccl" if device.type == "cuda" else "gloo", device)
    return partial(P2PRingPass, p2p), p2p


def _not_possible(reason: str | None) -> ValueError:
    return ValueError(
        f"transport='symmetric' is not possible here ({reason}): use 'nccl' or 'auto'"
    )
