"""A thread of each rank that looks at the group's store for other ranks' trouble."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Protocol

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from ringfa3.symmetric.watchdog import END_S

GLANCE_S = 0.25  # how often it looks


def entry_key(epoch: int, rank: int) -> str:
    """Of what a rank says in an agreement."""
    return f"ringfa3/agree/{epoch}/{rank}"


def summons_key(epoch: int) -> str:
    """Set where a rank in an agreement is in trouble, or waits for the others."""
    return f"ringfa3/summons/{epoch}"


class Party(Protocol):
    """One rank's view of its group.

    epoch     of the latest agreement
    call      number of the latest ring call, and its settings
    """

    rank: int
    world: int
    epoch: int
    call: int

    @property
    def settings(self) -> dict[str, str]: ...


class Lookout(threading.Thread):
    """Ends with the group. As a context manager, with an eye on where the others wait.

    alarm     what a rank said that gave up, None so far
    summons   number of an agreement that this rank has to join: a rank in it refuses the call
              that this one is in, or has not begun it, or waits in another one
    """

    def __init__(self, party: Party, store: Store, alive: Callable[[], bool]) -> None:
        super().__init__(daemon=True, name="ringfa3-lookout")
        self._party, self._alive = party, alive
        self._store = store.clone()  # type: ignore[attr-defined]
        self._over = threading.Event()
        self._waiting = False
        self.alarm: str | None = None
        self.summons = 0
        self.start()

    def __enter__(self) -> Lookout:
        self._waiting = True
        return self

    def __exit__(self, *_: object) -> None:
        self._waiting = False

    def end(self) -> None:
        self._over.set()
        self.join(END_S)

    def run(self) -> None:
        with suppress(dist.DistError):  # the store's host is gone: waits end at their deadline
            while self._alive() and not self._over.is_set():
                self._glance()
                self._over.wait(GLANCE_S)

    def _glance(self) -> None:
        party = self._party
        epoch, call = party.epoch + 1, party.call
        if self._store.check(["ringfa3/failure"]):
            self.alarm = self._store.get("ringfa3/failure").decode()
        if self._store.check([summons_key(epoch)]):
            for entry in self._of_peers(lambda rank: entry_key(epoch, rank)):
                # such a rank will never send what this call waits for
                if entry["error"] is not None or entry["inside"] or entry["call"] < call:
                    self.summons = epoch
        if self._waiting:
            mine = {"call": call, "settings": party.settings}
            self._store.set(f"ringfa3/waiting/{party.rank}", json.dumps(mine))
            for entry in self._of_peers(lambda rank: f"ringfa3/waiting/{rank}"):
                if entry["call"] == call and entry["settings"] != mine["settings"]:
                    self.summons = epoch

    def _of_peers(self, key_of: Callable[[int], str]) -> Iterator[dict[str, Any]]:
        for rank in range(self._party.world):
            key = key_of(rank)
            if rank != self._party.rank and self._store.check([key]):
                yield json.loads(self._store.get(key))
