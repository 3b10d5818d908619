"""Process groups of any ranks, and how processes meet on a store that others have used."""

from __future__ import annotations

import time
import uuid
import zlib
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import PrefixStore, Store

from ringfa3.ring.entries import listed
from ringfa3.symmetric.self_test import host_name

POLL_S = 0.005


def new_group(
    ranks: Sequence[int],
    rank: int,
    backend: str,
    store: Store,
    name: str,
    timeout: timedelta,
) -> dist.ProcessGroup:
    """A process group of `ranks`, this process the `rank`-th of them; no other rank takes part.

    `new_group(use_local_synchronization=True)` names a group by the number of groups in its process
    and waits for ever where that number differs over the ranks. If the default group is bound to a
    device, NCCL splits its communicator, and all ranks of the job must make their first group
    together. NCCL's kernels have high priority: they go before others that wait for an SM.
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


def on_one_host(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether all ranks of a new group are on one host. All ranks call it, which connects them, by
    tensors on `device`."""
    host = zlib.crc32(host_name().encode())
    extremes = torch.tensor([host, -host], dtype=torch.int64, device=device)
    dist.all_reduce(extremes, dist.ReduceOp.MAX, group)
    highest, negated_lowest = extremes.tolist()
    return bool(highest == -negated_lowest)


class AbsentError(TimeoutError):
    """Ranks did not join a rendezvous: `ranks`, as far as this rank can tell."""

    def __init__(self, ranks: Sequence[int], timeout_s: float) -> None:
        self.ranks = list(ranks)
        super().__init__(f"rank {listed(ranks)} did not join within {timeout_s:g} s")


def rendezvous(store: Store, rank: int, world: int, timeout_s: float) -> Store:
    """A part of `store` that belongs to exactly the processes that meet in this call.

    It has no keys of earlier processes: torchrun restarts a job on the store of the attempt before
    (agents of several hosts may count attempts differently), and a process may make a group anew.
    Rank 0 writes a fresh name; every other rank answers to it with a name of its own; rank 0 lists
    the answers. A rank that is not on the list has read the name of an earlier rendezvous, and
    reads again.

    Raises AbsentError after `timeout_s` seconds.
    """
    own, deadline = uuid.uuid4().hex, time.monotonic() + timeout_s
    if rank == 0:
        answers = [_answer_key(own, peer) for peer in range(1, world)]
        store.set(_NAME_KEY, own)
        while not store.check(answers):
            if time.monotonic() > deadline:
                raise AbsentError(_absent(store, own, rank, world), timeout_s)
            time.sleep(POLL_S)
        store.set(_list_key(own), " ".join(store.get(key).decode() for key in answers))
        return PrefixStore(own, store)
    name = ""
    while time.monotonic() < deadline:
        if store.check([_NAME_KEY]):
            name = store.get(_NAME_KEY).decode()
            store.set(_answer_key(name, rank), own)
            key = _list_key(name)
            if store.check([key]) and own in store.get(key).decode().split():
                return PrefixStore(name, store)
        time.sleep(POLL_S)
    raise AbsentError(_absent(store, name, rank, world), timeout_s)


_NAME_KEY = "rendezvous"


def _answer_key(name: str, rank: int) -> str:
    return f"{name}/{rank}"


def _list_key(name: str) -> str:
    return f"{name}/list"


def _absent(store: Store, name: str, rank: int, world: int) -> list[int]:
    """Ranks that have not answered; rank 0, if it has written no name or its list is complete."""
    if rank and (not name or store.check([_list_key(name)])):
        return [0]
    return [p for p in range(1, world) if not store.check([_answer_key(name, p)])] or [0]


def alive(group: dist.ProcessGroup) -> bool:
    """Whether the group has not been destroyed."""
    return group in c10d._world.pg_map


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """The timeout of the group's CUDA backend, or of its CPU backend where it has no other."""
    for kind in ("cuda", "cpu"):
        with suppress(RuntimeError):  # no such backend
            timeout: timedelta = group._get_backend(torch.device(kind)).options._timeout
            return timeout
    raise ValueError("group: it has a backend neither for cuda nor for cpu tensors")
