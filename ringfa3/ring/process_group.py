"""Process groups of any ranks, and how processes meet on a store that others have used."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import Backend, PrefixStore, Store

from ringfa3.errors import listed

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

    It is unknown to `torch.distributed`, whose functions neither find nor destroy it: its own
    methods take ranks in the group, and `end_group` ends it. NCCL's kernels have high priority:
    they go before others that wait for an SM.

    `torch.distributed.new_group` does not serve. Where the default group is bound to a device, it
    splits NCCL's communicator, which all ranks of the job must do together. With
    `use_local_synchronization=True` it hangs if ranks have made different numbers of groups before.
    """
    store = PrefixStore(name, store)
    group = dist.ProcessGroup(store, rank, len(ranks))
    communicator: Backend
    if backend == "nccl":
        backend_type, device = dist.ProcessGroup.BackendType.NCCL, torch.device("cuda")
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = timeout
        options.global_ranks_in_group = list(ranks)  # for NCCL's log and flight recorder
        options.group_name = name  # type: ignore[assignment]
        communicator = dist.ProcessGroupNCCL(store, rank, len(ranks), options)
    else:
        backend_type, device = dist.ProcessGroup.BackendType.GLOO, torch.device("cpu")
        communicator = dist.ProcessGroupGloo(store, rank, len(ranks), timeout)
    group._set_default_backend(backend_type)
    group._register_backend(device, backend_type, communicator)
    group._set_group_name(name)  # type: ignore[arg-type]
    return group


def end_group(group: dist.ProcessGroup, lost: bool) -> None:
    """Ends a group of `new_group`; NCCL's kernels finish first, or, if it is `lost`, are aborted.

    Its threads and sockets end with the last reference to the group.
    """
    if lost:
        group.abort()
    else:
        group.shutdown()


def connect_ranks(group: dist.ProcessGroup, device: torch.device) -> None:
    """Connects all ranks of a new group by a sum of tensors on `device`. All ranks call it."""
    x = torch.zeros(1, dtype=torch.float32, device=device)
    group.allreduce([x]).wait()
    x.item()  # over NCCL `wait` blocks only the stream, and an error would surface later


class AbsentError(TimeoutError):
    """Ranks did not join a rendezvous: `ranks`, as far as this rank can tell."""

    def __init__(self, ranks: Sequence[int], timeout_s: float) -> None:
        self.ranks = list(ranks)
        super().__init__(
            f"rank {listed(ranks)} did not join within {timeout_s:g} s: see that rank's log"
        )


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


BACKENDS = ("nccl", "gloo")  # whose groups the ring runs in, in this order of preference


def backend_of(group: dist.ProcessGroup) -> str:
    """The backend of a group that counts for the ring: "nccl", "gloo", or "fake" for a dry run.

    Raises ValueError: the group has none of them.
    """
    config = c10d._world.pg_backend_config.get(group, "")
    names = dict(part.partition(":")[::2] for part in str(config).split(","))
    for backend in (*BACKENDS, "fake"):
        if backend in names.values():
            return backend
    raise ValueError(
        f"group: its backend is {dist.get_backend(group)!r}: allowed are 'nccl', 'gloo' and, for "
        "runs without communication, 'fake'"
    )


def is_fake(group: dist.ProcessGroup) -> bool:
    """Whether the group's backend is `fake`: its ranks run alone, without communication."""
    return "fake" in str(c10d._world.pg_backend_config.get(group, "")) and (
        backend_of(group) == "fake"
    )


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """The timeout of the group's backend for the ring. Raises ValueError as `backend_of`."""
    backend = backend_of(group)
    device = torch.device("cuda" if backend == "nccl" else "cpu")
    timeout: timedelta = group._get_backend(device).options._timeout
    return timeout
