"""Process groups: how members meet, groups made by them alone, what a group says of itself."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import PrefixStore, Store

MEETING_POLL_S = 0.005


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
    together. NCCL's kernels go before others that wait for an SM.
    """
    options = None
    if backend == "nccl":
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = timeout
    group, _ = c10d._new_process_group_helper(
        len(ranks),
        rank,
        list(ranks),
        dist.Backend(backend),
        store,
        name,  # type: ignore[arg-type]
        options,
        timeout=timeout,
    )
    assert isinstance(group, dist.ProcessGroup)
    c10d._world.pg_group_ranks[group] = {r: i for i, r in enumerate(ranks)}
    return group


class AbsentError(TimeoutError):
    """Members did not come: `ranks`, as far as this one can tell."""

    def __init__(self, ranks: Sequence[int], timeout_s: float) -> None:
        self.ranks = list(ranks)
        listed = ", ".join(map(str, self.ranks))
        super().__init__(f"rank {listed} did not join within {timeout_s:g} s")


def meet(store: Store, rank: int, world: int, timeout_s: float) -> Store:
    """A part of `store` that belongs to exactly the processes that meet here now.

    What earlier ones have left in the store is not in it: torchrun restarts a job on the store that
    the attempt before has used (agents of several hosts may count attempts differently), and a
    process may make a group anew. So rank 0 names the meeting, every other rank answers with a name
    of its own, and rank 0 lists those. A rank that is not on the list has read the name of a
    meeting that is over, and looks again.

    Raises AbsentError after `timeout_s` seconds.
    """
    own, deadline = uuid.uuid4().hex, time.monotonic() + timeout_s
    if rank == 0:
        answers = [_answer(own, peer) for peer in range(1, world)]
        store.set(_NAME, own)
        while not store.check(answers):
            if time.monotonic() > deadline:
                raise AbsentError(_absent(store, own, rank, world), timeout_s)
            time.sleep(MEETING_POLL_S)
        store.set(_listed(own), " ".join(store.get(key).decode() for key in answers))
        return PrefixStore(own, store)
    name = ""
    while time.monotonic() < deadline:
        if store.check([_NAME]):
            name = store.get(_NAME).decode()
            store.set(_answer(name, rank), own)
            if store.check([_listed(name)]) and own in store.get(_listed(name)).decode().split():
                return PrefixStore(name, store)
        time.sleep(MEETING_POLL_S)
    raise AbsentError(_absent(store, name, rank, world), timeout_s)


_NAME = "meeting"


def _answer(name: str, rank: int) -> str:
    return f"{name}/{rank}"


def _listed(name: str) -> str:
    return f"{name}/list"


def _absent(store: Store, name: str, rank: int, world: int) -> list[int]:
    """Who has not answered to a name; rank 0, if its meeting is over or it has named none."""
    if rank and (not name or store.check([_listed(name)])):
        return [0]
    return [peer for peer in range(1, world) if not store.check([_answer(name, peer)])] or [0]


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
