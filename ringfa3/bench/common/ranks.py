"""The processes that measure together: in step, of one verdict, never waiting for ever.

They talk over the job's store, whatever has become of their GPUs. A *meeting* is a point that all
come to with what they know. A rank with a problem brings it to its next meeting, which is the one
that the others come to next, so that all of them leave what they were doing at the same place.
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
from torch._C._distributed_c10d import PrefixStore, Store

from ringfa3.ring.process_group import new_group

PATIENCE = 3  # timeouts that a rank may take to come to a meeting: its peers' come one by one
FURTHER_S = 60.0  # and what checks against float64 may take longer on one rank than on another


class ToldError(Exception):
    """A rank had a problem, and every rank of the team knows."""


class LostError(Exception):
    """A rank or its GPU is gone: the team can measure nothing more."""


class Team:
    """The first `world` ranks of a job; without arguments, one process alone.

    timeout  seconds that anything which waits for another rank may take
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
        self._meetings = 0
        self._generation = 0  # of the groups
        self._groups: dict[str, dist.ProcessGroup] = {}

    def first(self, world: int) -> Team:
        """A team of the first `world` ranks of this one."""
        return Team(self.rank, world, self._store, self._device, self.timeout)

    def meet(self, value: Any = None, problem: str | None = None) -> list[Any]:
        """What every rank brings, in order of ranks.

        Raises ToldError on all of them where one brings a problem; LostError.
        """
        if self.world == 1:
            if problem is not None:
                raise ToldError(problem)
            return [value]
        self._bring({"value": value, "problem": problem, "time": time.time()})
        entries = self._entries()
        lost = next((e["lost"] for e in entries if "lost" in e), None)
        if lost is not None:
            raise LostError(lost)
        told = [(e["time"], e["problem"], r) for r, e in enumerate(entries) if e["problem"]]
        if told:  # the first one: those of ranks that wait for that one come later
            _, first, by = min(told)
            same = [e["problem"] for e in entries] == [first] * self.world
            raise ToldError(first if same else f"{first} (rank {by})")
        return [e["value"] for e in entries]

    def leave(self, reason: str) -> None:
        """Tell the others, at their next meeting, that this rank will not come any more."""
        if self.world > 1:
            self._bring({"lost": f"rank {self.rank}: {reason}"})

    def largest(self, values: Sequence[float]) -> list[float]:
        """The largest of each value over the ranks: of times, the slowest rank's."""
        return [max(each) for each in zip(*self.meet(list(values)), strict=True)]

    def group(self, purpose: str) -> dist.ProcessGroup | None:
        """A process group of its own for each purpose; None for one process without a job."""
        if self._store is None:
            return None
        if purpose not in self._groups:
            backend = "nccl" if self._device.type == "cuda" else "gloo"
            name = f"ringfa3.bench/{self.world}/{purpose}/{self._generation}"
            limit = timedelta(seconds=self.timeout)
            ranks = range(self.world)
            store = PrefixStore(name, self._store)
            self._groups[purpose] = new_group(ranks, self.rank, backend, store, name, limit)
        return self._groups[purpose]

    def renew(self) -> None:
        """On all ranks, after a failure: groups in no known state are not used again."""
        self._generation += 1
        self._groups.clear()

    def start(self) -> None:
        """Nobody goes on before all are here: on a GPU its stream, else the process."""
        if self.world > 1:
            dist.all_reduce(torch.zeros(1, device=self._device), group=self.group("start"))

    def waited(self, seconds: float) -> None:
        """Raises a RuntimeError for a wait so long that only a timeout can have ended it."""
        if self.world > 1 and seconds > self.timeout / 2:
            raise RuntimeError(f"the GPU was stuck for {seconds:.0f} s: a rank did not come along")

    def _key(self, meeting: int, rank: int) -> str:
        return f"ringfa3.bench/{self.world}/meeting/{meeting}/{rank}"

    def _bring(self, entry: dict[str, Any]) -> None:
        assert self._store is not None
        self._meetings += 1
        self._store.set(self._key(self._meetings, self.rank), json.dumps(entry))

    def _entries(self) -> list[dict[str, Any]]:
        assert self._store is not None
        keys = [self._key(self._meetings, rank) for rank in range(self.world)]
        patience = PATIENCE * self.timeout + FURTHER_S
        try:
            self._store.wait(keys, timedelta(seconds=patience))
            entries = [json.loads(entry) for entry in self._store.multi_get(keys)]
        except dist.DistError as error:
            raise LostError(f"{self._absent(keys)} within {patience:.0f} s") from error
        if self._meetings > 2:  # all have read it: all have come to the one after it
            self._store.delete_key(self._key(self._meetings - 2, self.rank))
        return entries

    def _absent(self, keys: list[str]) -> str:
        assert self._store is not None
        try:
            absent = [str(rank) for rank, key in enumerate(keys) if not self._store.check([key])]
        except dist.DistError:
            return "the store did not answer"
        return f"no word from rank {', '.join(absent)}"


def under_torchrun() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def place() -> tuple[int, int, int]:
    """(rank, world, local rank) in the job; (0, 1, 0) without torchrun."""
    if not under_torchrun():
        return 0, 1, 0
    rank, world, local = (int(os.environ[n]) for n in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    return rank, world, local


def join(device: torch.device, timeout: float) -> Store | None:
    """Enter the job and give its store; None without torchrun."""
    if not under_torchrun():
        return None
    # A collective that times out is aborted, and the process lives on to say so.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
    store: Store = dist.distributed_c10d._get_default_store()
    return store.clone()  # type: ignore[attr-defined,no-any-return]  # a wait holds up its client
