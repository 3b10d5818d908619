"""The ranks that measure together: they exchange values and errors, and no wait is unbounded.

All exchanges go through the job's store, which works whatever state the GPUs are in. An *exchange*
is a point that every rank reaches with a value or an error. A rank with an error posts it to its
next exchange; the other ranks raise it when they reach theirs, so all ranks abandon a measurement
at the same exchange.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import PrefixStore, Store

TIMEOUTS_PER_EXCHANGE = 3  # a rank may run into this many of its peers' timeouts before it arrives
CHECK_SECONDS = 60.0  # by which the float64 check of one rank may outlast another's


class RankFailedError(Exception):
    """Some rank posted an error; every rank raises it."""


class RankLostError(Exception):
    """A rank or its GPU is gone: this communicator can measure nothing more."""


class Communicator:
    """The first `world` ranks of a job; without arguments, one process alone.

    timeout  seconds that a wait for another rank may take
    """

    def __init__(
        self,
        rank: int = 0,
        world: int = 1,
        store: Store | None = None,
        device: torch.device | None = None,
        timeout: float = 60.0,
    ) -> None:
        self.rank, self.world, self.timeout = rank, world, timeout
        self._store, self._device = store, device or torch.device("cpu")
        self._exchanges = 0
        self._generation = 0  # of the process groups
        self._groups: dict[str, dist.ProcessGroup] = {}

    def first(self, world: int) -> Communicator:
        """A communicator of the first `world` ranks of this one."""
        return Communicator(self.rank, world, self._store, self._device, self.timeout)

    def all_gather_object(self, value: Any = None, error: str | None = None) -> list[Any]:
        """Every rank's JSON-serialisable `value`, by rank.

        Raises:
            RankFailedError: some rank passed an `error`; raised on all ranks.
            RankLostError: a rank reported its loss or did not arrive.
        """
        if self.world == 1:
            if error is not None:
                raise RankFailedError(error)
            return [value]
        self._post({"value": value, "error": error, "time": time.time()})
        entries = self._collect()
        lost = next((e["lost"] for e in entries if "lost" in e), None)
        if lost is not None:
            raise RankLostError(lost)
        errors = [(e["time"], e["error"], r) for r, e in enumerate(entries) if e["error"]]
        if errors:  # the earliest: ranks that waited for that rank fail later
            _, first, by = min(errors)
            same = [e["error"] for e in entries] == [first] * self.world
            raise RankFailedError(first if same else f"{first} (rank {by})")
        return [e["value"] for e in entries]

    def report_loss(self, reason: str) -> None:
        """Make the other ranks raise RankLostError at their next exchange."""
        if self.world > 1:
            self._post({"lost": f"rank {self.rank}: {reason}"})

    def maximum(self, values: Sequence[float]) -> list[float]:
        """The largest of each value over the ranks; of times, the slowest rank's."""
        return [max(each) for each in zip(*self.all_gather_object(list(values)), strict=True)]

    def process_group(self, purpose: str) -> dist.ProcessGroup | None:
        """A process group for each purpose; None for one process without a job."""
        if self._store is None:
            return None
        if purpose not in self._groups:
            backend = "nccl" if self._device.type == "cuda" else "gloo"
            name = f"ringfa3.bench/{self.world}/{purpose}/{self._generation}"
            limit = timedelta(seconds=self.timeout)
            ranks = range(self.world)
            store = PrefixStore(name, self._store)
            self._groups[purpose] = _new_group(ranks, self.rank, backend, store, name, limit)
        return self._groups[purpose]

    def renew_process_groups(self) -> None:
        """Discard all process groups, on all ranks, after a failure: their state is unknown."""
        self._generation += 1
        self._groups.clear()

    def barrier(self) -> None:
        """Hold the GPU's stream, or on a CPU the process, until all ranks arrive."""
        if self.world > 1:
            group = self.process_group("barrier")
            dist.all_reduce(torch.zeros(1, device=self._device), group=group)

    def check_wait(self, seconds: float) -> None:
        """Raises a RuntimeError for a wait so long that only a timeout can have ended it."""
        if self.world > 1 and seconds > self.timeout / 2:
            raise RuntimeError(
                f"the GPU was stuck for {seconds:.0f} s: another rank did not get here"
            )

    def _key(self, exchange: int, rank: int) -> str:
        return f"ringfa3.bench/{self.world}/exchange/{exchange}/{rank}"

    def _post(self, entry: dict[str, Any]) -> None:
        assert self._store is not None
        self._exchanges += 1
        self._store.set(self._key(self._exchanges, self.rank), json.dumps(entry))

    def _collect(self) -> list[dict[str, Any]]:
        assert self._store is not None
        keys = [self._key(self._exchanges, rank) for rank in range(self.world)]
        limit = TIMEOUTS_PER_EXCHANGE * self.timeout + CHECK_SECONDS
        try:
            self._store.wait(keys, timedelta(seconds=limit))
            entries = [json.loads(entry) for entry in self._store.multi_get(keys)]
        except dist.DistError as error:
            raise RankLostError(f"{self._missing(keys)} within {limit:.0f} s") from error
        if self._exchanges > 2:  # every rank has posted to the next exchange, so has read this one
            self._store.delete_key(self._key(self._exchanges - 2, self.rank))
        return entries

    def _missing(self, keys: list[str]) -> str:
        assert self._store is not None
        try:
            missing = [str(rank) for rank, key in enumerate(keys) if not self._store.check([key])]
        except dist.DistError:
            return "the store did not answer"
        return f"no answer from rank {', '.join(missing)}"


def _new_group(
    ranks: Sequence[int], rank: int, backend: str, store: Store, name: str, timeout: timedelta
) -> dist.ProcessGroup:
    """A group for the functions of `torch.distributed`, which other libraries call. Only its ranks
    take part in making it, unless the default group is bound to a device: `join_job` binds none."""
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


def under_torchrun() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def job_ranks() -> tuple[int, int, int]:
    """(rank, world, local rank) in the torchrun job; (0, 1, 0) without torchrun."""
    if not under_torchrun():
        return 0, 1, 0
    rank, world, local = (int(os.environ[n]) for n in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    return rank, world, local


def join_job(device: torch.device, timeout: float) -> Store | None:
    """Initialise the default process group and return its store; None without torchrun."""
    if not under_torchrun():
        return None
    # 2: NCCL aborts a collective that times out, and the process survives to report it.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
    store: Store = dist.distributed_c10d._get_default_store()
    # A clone: a wait blocks every other use of the same client.
    return store.clone()  # type: ignore[attr-defined,no-any-return]
