"""A thread of each rank that polls the group's store for other ranks' trouble."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

from torch._C._distributed_c10d import Store

from ringfa3.ring.entries import Settings
from ringfa3.symmetric.watchdog import JOIN_S

PERIOD_S = 0.25  # between two polls
FAILURE_KEY = "ringfa3/failure"  # message of a rank that has given up


def entry_key(epoch: int, rank: int) -> str:
    """A rank's entry in an agreement."""
    return f"ringfa3/agree/{epoch}/{rank}"


def join_request_key(epoch: int) -> str:
    """Set by a rank in an agreement that has an error to report, or waits for other ranks."""
    return f"ringfa3/join/{epoch}"


def _waiting_key(rank: int) -> str:
    """The call in which a rank waits for messages."""
    return f"ringfa3/waiting/{rank}"


class LatestCall(NamedTuple):
    """The latest ring call of a rank, forward or backward: its number and settings."""

    number: int
    settings: Settings


class GroupView(Protocol):
    """What the monitor reads of one rank's `RingGroup`, while that changes it.

    epoch  number of the latest agreement that the rank has entered
    """

    rank: int
    world: int
    epoch: int
    latest: LatestCall

    def join_for_caller(self) -> None:
        """Joins the next agreement if the host does not wait for the latest call."""


class StoreMonitor(threading.Thread):
    """Ends with the group. As a context manager it also compares the calls that ranks wait in.

    peer_failure  message of a rank that has given up, else None
    join_request  number of an agreement that this rank must join, because a rank in it refuses
                  this rank's call, has not begun it, or waits in another call; 0 for none
    """

    def __init__(self, group: GroupView, store: Store, alive: Callable[[], bool]) -> None:
        super().__init__(daemon=True, name="ringfa3-store-monitor")
        self._group, self._alive = group, alive
        self._store = store.clone()  # type: ignore[attr-defined]
        self._ended = threading.Event()
        self._waiting = False
        self.peer_failure: str | None = None
        self.join_request = 0
        self.start()

    def __enter__(self) -> StoreMonitor:
        self._waiting = True
        return self

    def __exit__(self, *_: object) -> None:
        self._waiting = False

    def asks(self, epoch: int) -> bool:
        """Whether a rank has given up, or asks to join the agreement of that number."""
        return self.peer_failure is not None or self.join_request == epoch

    def end(self) -> None:
        self._ended.set()
        self.join(JOIN_S)

    def run(self) -> None:
        with suppress(RuntimeError):  # the store's host is gone: waits end at their deadline
            while self._alive() and not self._ended.is_set():
                self._poll()
                self._ended.wait(PERIOD_S)

    def _poll(self) -> None:
        group = self._group
        epoch, (call, settings) = group.epoch + 1, group.latest
        if self._store.check([FAILURE_KEY]):
            self.peer_failure = self._store.get(FAILURE_KEY).decode()
        if self._store.check([join_request_key(epoch)]):
            entries = list(self._peers(lambda rank: entry_key(epoch, rank)))
            # such a rank will never send what this call waits for
            void = any(entry["mid_call"] or entry["call"] < call for entry in entries)
            if void or any(entry["error"] is not None for entry in entries):
                self.join_request = epoch
            if void:
                group.join_for_caller()
        if self._waiting:
            own = {"call": call, "settings": settings}
            self._store.set(_waiting_key(group.rank), json.dumps(own))
            for entry in self._peers(_waiting_key):
                if entry["call"] == call and entry["settings"] != own["settings"]:
                    self.join_request = epoch

    def _peers(self, key_of: Callable[[int], str]) -> Iterator[dict[str, Any]]:
        """The values of the peers that have set their keys."""
        for rank in range(self._group.world):
            key = key_of(rank)
            if rank != self._group.rank and self._store.check([key]):
                yield json.loads(self._store.get(key))
