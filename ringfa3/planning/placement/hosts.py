"""Hosts: which ranks of a context-parallel group share one, and so NVLink."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from typing import SupportsIndex, TypeAlias

import numpy as np
import torch
import torch.distributed as dist

from ringfa3.validation import whole_number, whole_numbers

VARIABLE = "RINGFA3_HOSTS"
Hosts: TypeAlias = "SupportsIndex | Sequence[int] | None"


def find_hosts(hosts: Hosts, world: int, group: dist.ProcessGroup | None) -> tuple[int, ...]:
    """(world,) the number of each rank's host, from 0 in the order of ranks; one host if unknown.

    Args:
        hosts: as in `plan_context`.
        world: ranks of the CP group.
        group: its process group, None if the plan is made from (rank, world).

    Raises ValueError, TypeError: `hosts` or RINGFA3_HOSTS does not fit the group.
    """
    if isinstance(hosts, (np.ndarray, torch.Tensor)):
        hosts = hosts.tolist()  # an array of several numbers has `__index__`, too
    if isinstance(hosts, SupportsIndex):
        return _equal("hosts", whole_number("hosts", hosts), world)
    if hosts is not None:
        numbers = whole_numbers("hosts", hosts)
        if len(numbers) != world:
            raise ValueError(
                f"hosts has {len(numbers)} ranks, the group {world}: give each rank's host"
            )
        return _numbered(numbers)
    return _hosts_of_group(group) or (0,) * world


def _hosts_of_group(group: dist.ProcessGroup | None) -> tuple[int, ...] | None:
    """As the environment says; None: nothing does, or there is no group."""
    if group is None or not dist.is_initialized():
        return None
    job = hosts_of_job(dist.get_world_size())
    if job is None:
        return None
    return _numbered([job[rank] for rank in dist.get_process_group_ranks(group)])


def hosts_of_job(world: int) -> tuple[int, ...] | None:
    """(world,) the host of each rank of a job, as the environment says; None: nothing does.

    Raises ValueError: RINGFA3_HOSTS does not divide the ranks.
    """
    if given := os.environ.get(VARIABLE):
        return _equal(VARIABLE, int(given) if given.isdecimal() else given, world)
    per_host = _processes_per_host(world)
    return tuple(rank // per_host for rank in range(world)) if per_host else None


def _numbered(hosts: Sequence[int]) -> tuple[int, ...]:
    """The same hosts, numbered from 0 in the order in which they occur."""
    number = {host: i for i, host in enumerate(dict.fromkeys(hosts))}
    return tuple(number[host] for host in hosts)


def _equal(name: str, hosts: int | str, world: int) -> tuple[int, ...]:
    """So many hosts with equally many ranks each, in order."""
    if isinstance(hosts, str) or hosts < 1 or world % hosts:
        raise ValueError(
            f"{name}={hosts}: it must divide {world} ranks; or give hosts=(...), one for each rank"
        )
    return tuple(rank * hosts // world for rank in range(world))


def _processes_per_host(world: int) -> int:
    """As torchrun and train/slurm.py say, if each host has as many; else 0."""
    names = "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "WORLD_SIZE"
    per_host, hosts, ranks = (int(os.environ.get(name) or 0) for name in names)
    given = per_host and per_host * hosts == ranks == world
    return per_host if given else 0


def warn_of_hosts(hosts: tuple[int, ...], group: dist.ProcessGroup) -> None:
    """Warns if a plan was made for other hosts than its process group is known to have."""
    found = _hosts_of_group(group)
    if found is not None and found != hosts:
        warnings.warn(
            f"a plan for hosts={hosts} runs on hosts {found}, so more K/V than needed crosses "
            f"between hosts: give plan_context(..., hosts={found})",
            stacklevel=4,
        )
