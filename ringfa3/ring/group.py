"""One rank's view of a CP group: agreement before a call, connections during it.

No rank raises before it has read the entries of all ranks, and then all raise or none.

A rank that waits for a peer also polls the store. So an error reaches every rank with its cause,
even if only one rank has entered an agreement. Where the host goes on while the device waits, a
thread enters for the caller and interrupts it before its streams are released.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import HashStore, Store

from ringfa3 import host
from ringfa3.errors import RingError, StepError, first_line, gave_up, timed_out
from ringfa3.planning.process_groups import GroupRef, is_alive, require_alive
from ringfa3.ring.agreement import (
    BEFORE,
    Agreements,
    AgreementSnapshot,
    NoAgreementError,
    check_entries,
    described,
)
from ringfa3.ring.calls import CallHistory
from ringfa3.ring.connections import Connections
from ringfa3.ring.process_group import timeout_of
from ringfa3.ring.store_monitor import FAILURE_KEY, PERIOD_S, StoreMonitor
from ringfa3.schedules.settings import Settings
from ringfa3.threads import JOIN_S, Interruption

ABORT_S = 0.05  # all abort at once: NCCL's watchdog ends a process whose peer aborted earlier
POLL_S = 0.005  # between two looks at whether earlier calls have ended
EXIT_S = 10.0  # for a group to close when the process ends


class RingGroup:
    """One rank's view of a CP group. `RingGroup.of(group)` makes it once per group.

    The C++ launcher begins calls like an earlier one by its attributes: `begin_call` of
    csrc/host/begin_again.h is `begin` without frames of Python.
    """

    _known: dict[GroupRef, RingGroup] = {}  # noqa: RUF012

    def __init__(self, group: dist.ProcessGroup) -> None:
        """Raises ValueError: the group has no backend for the ring."""
        self.ranks = dist.get_process_group_ranks(group)  # global ranks, for messages
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self.failure: str | None = None
        self.calls = CallHistory(host.forward_call)
        self._entering = threading.RLock()  # held by the thread that is in an agreement
        self.interruption = Interruption()
        # the group's threads and sockets end when it is destroyed
        self.process_group = weakref.ref(group)
        self.process_groups = c10d._world.pg_map  # those that have not been destroyed
        self._timeout = timeout_of(group)
        self.monitor: StoreMonitor | None = None
        self._joining: threading.Thread | None = None
        store = group.get_group_store()
        self.connections = Connections(self, group.group_name, self._start_monitor)
        given = lambda: self.timeout_s, self._known_failure, lambda: self.connections.words
        self.agreements = Agreements(self.ranks, self.rank, store, *given)

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
    def known(cls, group: dist.ProcessGroup | None) -> RingGroup | None:
        """The view of a group that has one."""
        return None if group is None else cls._known.get(weakref.ref(group))

    @classmethod
    def close_ended(cls) -> None:
        """Closes the views of destroyed process groups, maybe before their monitors do."""
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
        return is_alive(self.process_group())

    def close(self, seconds: float = JOIN_S) -> None:
        """Closes the connections, on the monitor's thread: waits so long for that."""
        if self.monitor is None:
            self.disconnect()
        else:
            self.monitor.end(seconds)

    def disconnect(self) -> None:
        """Closes the connections. Ranks destroy a process group together; where it still exists,
        this process ends, maybe before its peers."""
        self.agreements.end()
        together = not self.alive and self._known_failure() is None
        try:
            self.connections.close(partial(self.agreements.meet, "closed") if together else None)
        finally:
            # this object and its parts refer to each other, which would keep the store's socket
            self.agreements.store = HashStore()
            self._known.pop(self.process_group, None)

    @property
    def store(self) -> Store:
        return self.agreements.store

    @property
    def agreement_id(self) -> int:
        """Number of the latest agreement."""
        return self.agreements.agreement_id

    def _start_monitor(self) -> None:
        if self.monitor is None:  # early: once it is needed, the store may not answer
            self.monitor = StoreMonitor(self, self.store, lambda: self.alive)

    @property
    def timeout(self) -> timedelta:
        """Now: users may change the process group's at any time."""
        with suppress(ValueError, RuntimeError):  # a thread asks while the group is destroyed
            if (group := self.process_group()) is not None and self.alive:
                self._timeout = timeout_of(group)
        return self._timeout

    @property
    def timeout_s(self) -> float:
        return self.timeout.total_seconds()

    def peer_failure(self) -> str | None:
        """The message of a rank that has given up, else None."""
        return self.monitor.peer_failure if self.monitor is not None else None

    def _known_failure(self) -> str | None:
        """Why this rank or another has given up, as far as is known."""
        return self.failure or self.peer_failure()

    def gather(self, line: str) -> list[str]:
        """Passes a line, returns those of all ranks; all call it at the same point of a call."""
        entry = {"settings": self.calls.latest.at("its memory"), "error": None, "mid_call": False}
        return [str(e["line"]) for e in self._enter({**entry, "line": line})]

    @property
    def call_id(self) -> int:
        """28 bits that identify the call under way, the same on all ranks in it."""
        return self.calls.latest.id

    def begin(self, settings: Settings, forward: int = 0) -> None:
        """Begins a ring call with settings that were agreed on; a backward names its forward call.

        Raises:
            RingError: an earlier call failed; the group's connections are in no known state.
            ValueError, TypeError: another rank refuses this call or the one before.
        """
        self._require_peers()
        self.interruption.called()
        self.calls.begin(settings, forward)
        if self._asked():
            self._join_agreement("before its first hop", self.call)

    @property
    def call(self) -> int:
        """Number of the call under way."""
        return self.calls.latest.number

    def _asked(self) -> bool:
        """Whether a rank in trouble asks this one to join the next agreement."""
        return self.monitor is not None and self.monitor.join_request == self.agreement_id + 1

    def returned(self, lse: torch.Tensor) -> None:
        """The forward call under way returns this LSE."""
        self.calls.returned(lse)

    def agreement_snapshot(self) -> AgreementSnapshot:
        """For later calls like the one under way."""
        return AgreementSnapshot(self.calls.latest.settings, self.agreements.cache_version)

    def agreed(self, settings: Settings, direction: str) -> AgreementSnapshot | None:
        """For calls in a direction with settings, without it; None if ranks must agree again."""
        version = self.agreements.cache_version  # read first: another thread may clear the cache
        agreed = settings in self.agreements
        return AgreementSnapshot(settings.of_pass(direction), version) if agreed else None

    def _require_peers(self) -> None:
        """Raises an error that the caller has not got yet, and RingError if this rank or another
        has given up, as far as is known."""
        self.interruption.check()
        if self.failure is not None:
            raise RingError(
                f"this CP group is unusable after an earlier failure: {self.failure}; create a new "
                "process group or restart the job"
            )
        if (cause := self.peer_failure()) is not None:
            raise self.fail(gave_up(BEFORE, cause))

    def _join_agreement(self, point: str, void: int, for_caller: bool = False) -> None:
        """Joins an agreement that a rank in trouble has entered; raises on all ranks.

        void: this rank's first call without results; for_caller: its host has gone on
        """
        settings = self.calls.latest.at(point)
        self._enter(
            {"settings": settings, "error": None, "mid_call": True, "void": void}, for_caller
        )

    @property
    def asynchronous(self) -> bool:
        """Whether the host of the latest call does not wait for its messages."""
        return self.connections.last_transport in ("nccl", "symmetric")

    def join_for_caller(self) -> None:
        """Joins such an agreement, as the caller's host has gone on; interrupts the caller."""

        def join() -> None:
            if self._asked():
                self._join_agreement("on its device", self.call + 1, for_caller=True)

        self._for_caller(join)

    def refuse(self, difference: str) -> None:
        """Refuses the calls under way on all ranks, and interrupts the caller."""
        calls, error = self.calls.latest.refusals, ["ValueError", difference]

        def enter() -> None:
            if self.calls.latest.refusals == calls:
                entry = {"settings": Settings(), "error": error, "mid_call": True, "void": 0}
                self._enter(entry, for_caller=True)

        self._for_caller(enter)

    def _for_caller(self, enter: Callable[[], None]) -> None:
        """On a thread of its own: the monitor goes on, and sees other ranks give up."""

        def run() -> None:
            with self._entering, suppress(RingError, TypeError, ValueError):  # the caller gets it
                enter()

        if self._joining is None or not self._joining.is_alive():  # one enters for all polls
            self._joining = threading.Thread(target=run, daemon=True, name="ringfa3-join")
            self._joining.start()

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
            told = None if error is None else described(error)
            self._enter({"settings": settings, "error": told, "mid_call": False})
        except RingError as lost:
            if error is not None:
                raise error from lost
            raise
        except (TypeError, ValueError) as refused:
            raise refused from error
        self.agreements.add(settings)

    def _enter(self, entry: Mapping[str, object], for_caller: bool = False) -> list[dict[str, Any]]:
        """The entries of all ranks; raises on all of them if one has an error or they differ."""
        with self._entering:
            if not for_caller:
                self.interruption.check()  # another thread has entered meanwhile
            entries = self._exchange({"void": self.call + 1, **entry}, for_caller)
            try:
                check_entries(self.ranks, entries)
            except (TypeError, ValueError) as refused:
                self.calls.refuse(max(e["call"] for e in entries))
                void = any(e["mid_call"] for e in entries)  # messages will never be answered
                if void:  # before the caller goes on: its next call waits for this thread
                    self.agreements.clear()
                if for_caller:
                    self.interruption.interrupt(refused)
                if void:
                    self._abandon(min(e["void"] for e in entries), for_caller)
                raise
            self.calls.agreed(max(e["call"] for e in entries))
        return entries

    def _exchange(self, entry: Mapping[str, object], for_caller: bool) -> list[dict[str, Any]]:
        try:
            return self.agreements.exchange({**entry, "call": self.call})
        except NoAgreementError as problem:
            raise self.fail(str(problem), for_caller) from None

    def _abandon(self, void: int, for_caller: bool) -> None:
        """Ends calls from number `void` on, and the connections, which have their messages.

        Results of earlier calls are valid, so all ranks wait until these have all their messages.
        """
        deadline = time.monotonic() + self.timeout_s
        while not self.connections.completed_before(void) and time.monotonic() < deadline:
            if self._known_failure() is not None:
                break
            time.sleep(POLL_S)
        ready = {"error": None, "mid_call": False, "at": time.time() + ABORT_S}
        left = max(e["at"] for e in self._exchange(ready, for_caller)) - time.time()
        time.sleep(min(max(left, 0), 2 * ABORT_S))  # no longer, if clocks of hosts differ
        self.connections.abandon()

    def lose(self, message: str) -> None:
        """As `fail`, by a thread that watches the device: the caller gets the error."""
        if self.failure is None:
            self.fail(message, for_caller=True)

    def fail(self, message: str, for_caller: bool = False) -> RingError:
        """Makes the group unusable, reports it to the other ranks, and returns the error to raise.

        Streams that wait for peers are released; beforehand `for_caller` interrupts the caller.
        """
        full = f"rank {self.ranks[self.rank]}: {message}"
        self.failure = full
        if for_caller:
            self.interruption.interrupt(RingError(full))
        self.connections.release()

        def report() -> None:
            with suppress(RuntimeError):  # the store is gone
                self.store.set(FAILURE_KEY, full)

        thread = threading.Thread(target=report, daemon=True, name="ringfa3-failure")
        thread.start()
        thread.join(2 * PERIOD_S)  # not longer: the store's host may be stopped
        return RingError(full)

    def __enter__(self) -> None:
        """Around this rank's part of a ring call: reports an error that ends it to other ranks."""

    def __exit__(self, _: object, problem: BaseException | None, __: object) -> None:
        if isinstance(problem, Exception):
            self.interruption.check()  # the cause: its connections were aborted
            self.report_failure(problem)

    def report_failure(self, problem: Exception) -> None:
        """Reports to the other ranks that an error ends a ring call, unless they know."""
        if self.failure is None and not self.calls.refused and not isinstance(problem, StepError):
            self.fail(f"{type(problem).__name__}: {first_line(problem)}")

    def wait_for(self, done: threading.Event, what: Callable[[], str]) -> None:
        """Waits for `done` and polls for other ranks' trouble; `what` names the wait.

        Raises:
            RingError: after the timeout, or as soon as another rank has given up.
            ValueError, TypeError: another rank has refused this call, or is in another one.
        """
        if done.wait(PERIOD_S):
            return
        assert self.monitor is not None
        with self.monitor as monitor:
            deadline = time.monotonic() + self.timeout_s - PERIOD_S
            while not done.wait(PERIOD_S / 5):
                if self._asked():
                    self._join_agreement(what(), self.call)
                if monitor.peer_failure is not None:
                    raise self.fail(gave_up(what(), monitor.peer_failure))
                if time.monotonic() > deadline:
                    raise self.fail(timed_out(what(), self.timeout_s))


atexit.register(RingGroup.close_all)  # a thread that is in C++ when Python ends would abort it
