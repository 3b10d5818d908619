"""Process groups of any ranks."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import Backend, PrefixStore, Store

from ringfa3.numa import host_name


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


def on_one_host(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether all ranks of a new group are on one host. All ranks call it, which connects them, by
    tensors on `device`."""
    host = zlib.crc32(host_name().encode())
    extremes = torch.tensor([host, -host], dtype=torch.int64, device=device)
    group.allreduce([extremes], dist.ReduceOp.MAX).wait()
    highest, negated_lowest = extremes.tolist()
    return bool(highest == -negated_lowest)


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
