"""One rank's view of a context group: agreement before a call, connections during it.

No rank raises before it has read the entries of all ranks, and then all raise or none.

A rank that waits for a peer also polls the store. So an error reaches every rank with its cause,
even if only one rank has entered an agreement.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
import zlib
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store

from ringfa3.errors import RingError, StepError, first_line, gave_up, timed_out
from ringfa3.planning.process_groups import GroupRef, alive, require_alive
from ringfa3.ring.agreement import BEFORE, Agreements, NoAgreementError
from ringfa3.ring.connections import Connections
from ringfa3.ring.entries import (
    CallMark,
    Settings,
    described,
    raise_on_difference,
    raise_on_error,
)
from ringfa3.ring.process_group import timeout_of
from ringfa3.ring.store_monitor import FAILURE_KEY, PERIOD_S, LatestCall, StoreMonitor
from ringfa3.symmetric.watchdog import JOIN_S

EXIT_S = 10.0  # for messages under way when the process ends


class RingGroup:
    """One rank's view of a context group. `RingGroup.of(group)` makes it once per group."""

    _known: dict[GroupRef, RingGroup] = {}  # noqa: RUF012

    def __init__(self, group: dist.ProcessGroup) -> None:
        """Raises ValueError: the group has no backend for the ring."""
        self.ranks = dist.get_process_group_ranks(group)  # global ranks, for messages
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self.timeout: timedelta = timeout_of(group)
        self.failure: str | None = None
        self.latest = LatestCall(0, Settings())  # one object: the monitor's thread reads it
        self._refused = False  # the latest call was refused on all ranks
        self._ref = weakref.ref(group)  # the group's threads and sockets end when it is destroyed
        self._monitor: StoreMonitor | None = None
        store = group.get_group_store()
        self.agreements = Agreements(
            self.ranks, self.rank, store, lambda: self.timeout_s, self._known_failure
        )
        self.connections = Connections(self, group.group_name, self._start_monitor)

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> RingGroup:
        """Raises ValueError: the group has been destroyed, or has no backend for the ring."""
        require_alive(group)
        ref = weakref.ref(group)
        if ref not in cls._known:
            cls.close_ended()
            cls._known[ref] = cls(group)
        return cls._known[ref]

    @classmethod
    def close_ended(cls) -> None:
        """Closes those whose process group has been destroyed, also before their monitors do."""
        for old in [g for g in list(cls._known.values()) if not g.alive]:
            old.close()

    @classmethod
    def close_all(cls) -> None:
        """At the end of the process."""
        for group in list(cls._known.values()):
            group.close(EXIT_S)

    @property
    def alive(self) -> bool:
        """Whether the process group has not been destroyed."""
        return alive(self._ref())

    def close(self, seconds: float = JOIN_S) -> None:
        """Closes the connections, on the monitor's thread: waits so long for that."""
        if self._monitor is None:
            self.disconnect()
        else:
            self._monitor.end(seconds)

    def disconnect(self) -> None:
        """Closes the connections. Ranks destroy a process group together; where it still exists,
        this process ends, maybe before its peers."""
        self.agreements.forget()
        together = not self.alive and self._known_failure() is None
        self.connections.close(self._meet if together else None)
        # this object and its parts refer to each other, which would keep the store's socket
        self.agreements.store = HashStore()
        self._known.pop(self._ref, None)

    def _meet(self) -> bool:
        """Whether all ranks have got here, before the timeout."""
        try:
            return self.agreements.meet("closed")
        except RuntimeError:  # the store's host has gone
            return False

    @property
    def store(self) -> Store:
        return self.agreements.store

    @property
    def epoch(self) -> int:
        """Number of the latest agreement."""
        return self.agreements.epoch

    def _start_monitor(self) -> None:
        if self._monitor is None:  # early: once it is needed, the store may not answer
            self._monitor = StoreMonitor(self, self.store, lambda: self.alive)

    @property
    def timeout_s(self) -> float:
        return self.timeout.total_seconds()

    def peer_failure(self) -> str | None:
        """The message of a rank that has given up, else None."""
        return self._monitor.peer_failure if self._monitor is not None else None

    def _known_failure(self) -> str | None:
        """Why this rank or another has given up, as far as is known."""
        return self.failure or self.peer_failure()

    def gather(self, line: str) -> list[str]:
        """Passes a line, returns those of all ranks; all call it at the same point of a call."""
        call, settings = self.latest
        settings = Settings({**settings, "place": f"call {call}, its memory"})
        entry: dict[str, object] = {
            "settings": settings,
            "error": None,
            "mid_call": False,
            "line": line,
        }
        return [str(e["line"]) for e in self._enter(entry)]

    @property
    def call_id(self) -> int:
        """28 bits that identify the call under way, the same on all ranks in it."""
        call, settings = self.latest
        return zlib.crc32(f"{call} {settings.key}".encode()) >> 4

    def begin(self, settings: Settings) -> None:
        """Begins a ring call with settings that were agreed on.

        Raises:
            RingError: an earlier call failed; the group's connections are in no known state.
            ValueError, TypeError: another rank refuses this call or the one before.
        """
        self._require_peers()
        self.latest = LatestCall(self.latest.number + 1, settings)
        self._refused = False
        if self._monitor is not None and self._monitor.join_request == self.epoch + 1:
            self._join_agreement("before its first hop")

    def mark(self) -> CallMark:
        return CallMark(self.latest.settings, self.agreements.forgotten)  # of the call under way

    def begin_again(self, mark: CallMark) -> bool:
        """As `begin`, for a call over `symmetric` like an earlier one. False, and nothing begins,
        if ranks have to agree first, or this one or another is in trouble."""
        asked = self._monitor is not None and self._monitor.asks(self.epoch + 1)
        moved = self.agreements.forgotten != mark.forgotten or not self.alive
        if asked or moved or self.failure is not None:
            return False
        self.latest = LatestCall(self.latest.number + 1, mark.settings)
        self._refused = False
        self.connections.last_transport = "symmetric"
        return True

    def _require_peers(self) -> None:
        """Raises RingError if this rank or another has given up, as far as is known."""
        if self.failure is not None:
            raise RingError(f"the context group is lost since: {self.failure}")
        if (cause := self.peer_failure()) is not None:
            raise self.fail(gave_up(BEFORE, cause))

    def _join_agreement(self, place: str) -> None:
        """Joins an agreement that a rank in trouble has entered; raises on all ranks."""
        call, settings = self.latest
        settings = Settings({**settings, "place": f"call {call}, {place}"})
        self._enter({"settings": settings, "error": None, "mid_call": True})

    def agree(self, settings: Settings, error: Exception | None = None, anew: bool = False) -> None:
        """Returns if every rank passes equal settings and no error, else raises on all.

        Costs nothing if these settings were agreed on before, unless ranks agree `anew`. Every rank
        must call it at the same point.

        Raises:
            ValueError, TypeError: naming the rank, the argument and its value.
            RingError: a rank did not enter within the timeout.
        """
        if error is None and not anew and settings in self.agreements:
            return
        try:
            self._require_peers()
            self._enter({"settings": settings, "error": described(error), "mid_call": False})
        except RingError as lost:
            if error is not None:
                raise error from lost
            raise
        except (TypeError, ValueError) as refused:
            raise refused from error
        self.agreements.add(settings)

    def _enter(self, entry: dict[str, object]) -> list[dict[str, Any]]:
        """The entries of all ranks; raises on all of them if one has an error or they differ."""
        try:
            entries = self.agreements.exchange({**entry, "call": self.latest.number})
        except NoAgreementError as problem:
            raise self.fail(str(problem)) from None
        try:
            raise_on_error(self.ranks, entries)
            raise_on_difference(self.ranks, entries)
            return entries
        except (TypeError, ValueError):
            self._refused = True
            number = max(e["call"] for e in entries)
            self.latest = LatestCall(number, self.latest.settings)
            if any(e["mid_call"] for e in entries):  # their messages will never be answered
                self.agreements.forget()
                self.connections.abandon()
            raise

    def fail(self, message: str) -> RingError:
        """Marks the group lost, tells the other ranks, and returns the error to raise.

        Streams that wait for peers are released.
        """
        full = f"rank {self.ranks[self.rank]}: {message}"
        self.failure = full
        self.connections.release()

        def tell() -> None:
            with suppress(RuntimeError):  # the store is gone
                self.store.set(FAILURE_KEY, full)

        thread = threading.Thread(target=tell, daemon=True, name="ringfa3-failure")
        thread.start()
        thread.join(2 * PERIOD_S)  # not longer: the store's host may be stopped
        return RingError(full)

    def __enter__(self) -> None:
        """Around this rank's part of a ring call: tells the other ranks if an error ends it."""

    def __exit__(self, _: object, problem: BaseException | None, __: object) -> None:
        if isinstance(problem, Exception):
            self.tell(problem)

    def tell(self, problem: Exception) -> None:
        """Tells the other ranks that an error ends a ring call, unless they know."""
        if self.failure is None and not self._refused and not isinstance(problem, StepError):
            self.fail(f"{type(problem).__name__}: {first_line(problem)}")

    def wait_for(self, done: threading.Event, what: Callable[[], str]) -> None:
        """Waits for `done` and polls for other ranks' trouble; `what` names the wait.

        Raises:
            RingError: after the timeout, or as soon as another rank has given up.
            ValueError, TypeError: another rank has refused this call, or is in another one.
        """
        if done.wait(PERIOD_S):
            return
        assert self._monitor is not None
        with self._monitor as monitor:
            deadline = time.monotonic() + self.timeout_s - PERIOD_S
            while not done.wait(PERIOD_S / 5):
                if monitor.join_request == self.epoch + 1:
                    self._join_agreement(what())
                if monitor.peer_failure is not None:
                    raise self.fail(gave_up(what(), monitor.peer_failure))
                if time.monotonic() > deadline:
                    raise self.fail(timed_out(what(), self.timeout_s))


atexit.register(RingGroup.close_all)  # a thread that is in C++ when Python ends would abort it
