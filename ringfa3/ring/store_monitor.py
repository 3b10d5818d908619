"""A thread of each rank that polls the group's store for other ranks' trouble."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any, Protocol

from torch._C._distributed_c10d import Store

from ringfa3.ring.calls import CallHistory, LatestCall
from ringfa3.schedules.settings import Settings
from ringfa3.threads import JOIN_S

PERIOD_S = 0.25  # between two polls
FAILURE_KEY = "ringfa3/failure"  # message of a rank that has given up


def entry_key(agreement_id: int, rank: int) -> str:
    """A rank's entry in an agreement."""
    return f"ringfa3/agree/{agreement_id}/{rank}"


def join_request_key(agreement_id: int) -> str:
    """Set by a rank in an agreement that has an error to report, or waits for other ranks."""
    return f"ringfa3/join/{agreement_id}"


def _latest_key(rank: int) -> str:
    """The latest call of a rank, while it waits for messages, or its device may."""
    return f"ringfa3/latest/{rank}"


class GroupView(Protocol):
    """What the monitor reads of one rank's `RingGroup`, while that changes it.

    ranks         global ranks, for messages
    agreement_id  number of the latest agreement that the rank has entered
    """

    ranks: list[int]
    rank: int
    world: int
    calls: CallHistory

    @property
    def agreement_id(self) -> int: ...

    @property
    def asynchronous(self) -> bool:
        """Whether the host does not wait for the messages of the latest call."""

    def join_for_caller(self) -> None:
        """Joins the next agreement, and interrupts the caller."""

    def refuse(self, difference: str) -> None:
        """Refuses the calls under way on all ranks, and interrupts the caller."""

    def disconnect(self) -> None:
        """Closes the group's connections; the monitor calls it last."""


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
        self._published: LatestCall | None = None
        self.peer_failure: str | None = None
        self.join_request = 0
        self.start()

    def __enter__(self) -> StoreMonitor:
        self._waiting = True
        return self

    def __exit__(self, *_: object) -> None:
        self._waiting = False

    def end(self, seconds: float = JOIN_S) -> None:
        """Ends the thread, which closes the connections, and waits so long for it."""
        self._ended.set()
        self.join(seconds)

    def run(self) -> None:
        with suppress(RuntimeError):  # the store's host is gone: waits end at their deadline
            while self._alive() and not self._ended.is_set():
                self._poll()
                self._ended.wait(PERIOD_S)
        while self._alive() and not self._ended.wait(PERIOD_S):
            pass
        self._group.disconnect()
        self.peer_failure = self.peer_failure or "the process group has been destroyed"
        del self._store, self._group  # a socket, and a cycle of references

    def _poll(self) -> None:
        group = self._group
        agreement_id, latest = group.agreement_id + 1, group.calls.latest
        call = latest.number
        if self._store.check([FAILURE_KEY]):
            self.peer_failure = self._store.get(FAILURE_KEY).decode()
        if self._store.check([join_request_key(agreement_id)]):
            entries = [
                e for _, e in self._peers(lambda r: entry_key(agreement_id, r), range(group.world))
            ]
            # such a rank will never send what this call waits for
            void = any(entry["mid_call"] or entry["call"] < call for entry in entries)
            if void or any(entry["error"] is not None for entry in entries):
                self.join_request = agreement_id
            if void and group.asynchronous:
                group.join_for_caller()
        if self._waiting:
            self._publish(latest)
            for _, peer in self._read_peers_latest_calls(range(group.world)):
                if peer.number == call and peer[:3] != latest[:3]:
                    self.join_request = agreement_id
        elif call and group.asynchronous:
            self._publish(latest)
            self._compare()

    def _publish(self, latest: LatestCall) -> None:
        if latest is not self._published:
            self._store.set(_latest_key(self._group.rank), json.dumps(latest))
            self._published = latest

    def _compare(self) -> None:
        """Refuses calls that differ from those of one other rank, which compares with another.

        Hosts wait for no message here, and no message of equal size shows that its call differs.
        """
        group = self._group
        recent = {call.number: call for call in list(group.calls.recent)}
        for rank, peer in self._read_peers_latest_calls([(group.rank - 1) % group.world]):
            own = recent.get(peer.number)
            if own is None or own.refusals != peer.refusals or own.history == peer.history:
                continue
            ranks = {group.rank: own, rank: peer}
            calls = "; ".join(f"rank {group.ranks[r]}: {ranks[r].what}" for r in sorted(ranks))
            group.refuse(
                f"ring calls up to number {own.number} differ between the ranks of the CP group, "
                f"in their settings or their order: {calls}"
            )

    def _read_peers_latest_calls(self, ranks: Iterable[int]) -> Iterator[tuple[int, LatestCall]]:
        """The latest calls of peers, as far as they have published them."""
        for rank, (number, settings, *others) in self._peers(_latest_key, ranks):
            yield rank, LatestCall(number, Settings(settings), *others)

    def _peers(
        self, key_of: Callable[[int], str], ranks: Iterable[int]
    ) -> Iterator[tuple[int, Any]]:
        """The values of the peers that have set their keys."""
        for rank in ranks:
            key = key_of(rank)
            if rank != self._group.rank and self._store.check([key]):
                yield rank, json.loads(self._store.get(key))
