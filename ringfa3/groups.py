"""Process groups: made by their own members alone, and what they say of themselves."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import Store


def new_group(
    ranks: Sequence[int],
    rank: int,
    backend: str,
    store: Store,
    name: str,
    timeout: timedelta,
) -> dist.ProcessGroup:
    """A process group of `ranks`, this process the `rank`-th of them, made by them alone.

    `new_group(use_local_synchronization=True)` names a group by how many its process has, and
    waits for ever where that is not the same on all ranks. If the default group is bound to a
    device, NCCL splits its communicator, and all ranks of the job must make their first group
    together.
    """
    group, _ = c10d._new_process_group_helper(
        len(ranks),
        rank,
        list(ranks),
        dist.Backend(backend),
        store,
        name,  # type: ignore[arg-type]
        timeout=timeout,
    )
    assert isinstance(group, dist.ProcessGroup)
    c10d._world.pg_group_ranks[group] = {r: i for i, r in enumerate(ranks)}
    return group


def alive(group: dist.ProcessGroup) -> bool:
    """Whether nobody has destroyed it yet."""
    return group in c10d._world.pg_map


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """The group's own timeout: of its CUDA backend, or of its CPU one where it has no other."""
    for kind in ("cuda", "cpu"):
        with suppress(RuntimeError):  # no such backend
            timeout: timedelta = group._get_backend(torch.device(kind)).options._timeout
            return timeout
    raise ValueError("group: it has a backend neither for cuda nor for cpu tensors")
