"""Graceful stop on a signal or at a deadline, at any moment, without losing a finished step.

A step may last minutes, and Python runs a signal handler only when the main thread returns to the
interpreter. A dedicated thread, the stopper, therefore receives the signals:

1. it blocks further updates of the parameters;
2. it agrees with the stoppers of the other ranks on the last update that any of them has begun;
3. it saves the state after that update, concurrently with the main thread's next step;
4. it ends the process.

The stoppers communicate over the store and over ``save_group``, never over the groups of the step.

This module imports nothing that starts threads: such a thread would not inherit the blocked
signals.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NoReturn

from train.run.update_lock import UpdateLock

POLL_S = 0.25  # between two checks for a stop requested by another rank
ARMING_S = 20.0  # how long a signal during start-up waits for the run to begin
PEERS_S = 8.0  # how long a stopping rank waits for the other ranks
# The warnings of batch systems (SIGUSR1, SIGUSR2) and of a terminal that closes (SIGHUP) stop a run
# as SIGTERM does.
SIGNALS = {
    signal.SIGTERM: "SIGTERM",
    signal.SIGINT: "Ctrl-C",
    signal.SIGHUP: "SIGHUP",
    signal.SIGUSR1: "SIGUSR1",
    signal.SIGUSR2: "SIGUSR2",
}
MAY_BE_IGNORED = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def signals_to_take(signals: Iterable[signal.Signals]) -> list[signal.Signals]:
    """``signals`` without those that the process ignores from its start, as SIGHUP under nohup."""
    return [
        number
        for number in signals
        if number not in MAY_BE_IGNORED or signal.getsignal(number) != signal.SIG_IGN
    ]


class PeerGoneError(RuntimeError):
    """A rank does not answer while the run stops."""


@dataclass
class Run:
    """The run that the stopper can save and end.

    ``store`` is a connection that only the stopper uses, None for a single process. ``save`` writes
    the current state and returns a message for the user; ``log`` prints and records it. ``fail``
    reports why the state could not be saved; ``close`` flushes buffered files. A stop waits
    ``update_s`` seconds for an update that a rank has begun. ``deadline`` is in the time of
    ``time.monotonic``.
    """

    rank: int
    world: int
    store: Any
    updates: UpdateLock
    save: Callable[[], str]
    log: Callable[[str], None]
    fail: Callable[[str], None]
    close: Callable[[], None]
    update_s: float
    deadline: float | None = None


class Stopper(threading.Thread):
    """Receives ``SIGNALS`` in a thread. Create it before any other thread."""

    def __init__(self) -> None:
        super().__init__(daemon=True, name="stopper")
        self.stopping = threading.Event()
        self._armed = threading.Event()
        self._disabled = threading.Event()
        self._main_failed = threading.Event()
        self._run: Run | None = None
        # Blocked, a signal would be received even if it is ignored.
        self._signals = signals_to_take(SIGNALS)
        signal.pthread_sigmask(signal.SIG_BLOCK, self._signals)
        self.start()

    def arm(self, run: Run) -> None:
        """Set the run that a stop saves and ends."""
        self._run = run
        self._armed.set()

    def disable(self) -> None:
        """Receive no more signals. They stay blocked and pending for another ``sigtimedwait``."""
        self._disabled.set()
        if not self.stopping.is_set():
            self.join(1 + POLL_S)

    def wait_if_stopping(self) -> None:
        """Called by a main thread that has failed. Returns at once unless the run is stopping.

        No rank ends before all have saved. A failure during a stop therefore has one of two causes:
        an error of this rank, or peers that have ended. In the second case this rank's stopper ends
        the process while this waits.
        """
        if self.stopping.is_set():
            self._main_failed.set()
            time.sleep(PEERS_S + 2)

    def run(self) -> None:
        """Wait for a reason to stop, then stop."""
        stop = self._await_reason()
        if stop is None or not self._await_run(stop[0]):
            return
        _, reason = stop
        run = self._run
        assert run is not None
        self.stopping.set()
        code = 1
        try:  # the process always ends: no other thread takes signals
            message = self._stop_all(run, reason)
            code = 130 if reason == SIGNALS[signal.SIGINT] else 0
            run.log(f"{reason}: {message}")
            run.close()
        except BaseException as error:
            if code == 1:
                run.fail(f"{reason}, but nothing was saved: {error}")
        finally:
            _leave(code)

    def _await_run(self, number: int | None) -> bool:
        """Wait for ``arm``; end the process without saving if the start-up takes too long."""
        deadline = time.monotonic() + ARMING_S
        while not self._armed.wait(0.05):
            if self._disabled.is_set():
                return False
            if number == signal.SIGINT or time.monotonic() > deadline:
                _leave(128 + (number or signal.SIGTERM))
        return True

    def _await_reason(self) -> tuple[int | None, str] | None:
        while not self._disabled.is_set():
            received = signal.sigtimedwait(self._signals, POLL_S)
            if received is not None:
                return received.si_signo, SIGNALS[signal.Signals(received.si_signo)]
            run = self._run
            if run is None:
                continue
            if run.deadline is not None and time.monotonic() > run.deadline:
                return None, "train.max_wall_time has passed"
            if run.store is not None and (reason := _requested_stop(run.store)):
                return None, reason
        return None

    def _stop_all(self, run: Run, reason: str) -> str:
        last = run.updates.freeze()
        if run.store is not None:
            run.store.set("stop/reason", reason)
            last = max(int(other) for other in self._gather(run, "count", str(last)))
        if not run.updates.freeze_after(last, run.update_s):
            raise PeerGoneError(
                f"the optimiser update did not finish within checkpoint.stop_s={run.update_s:g}; "
                f"if no rank has failed, raise it, and torchrun's --shutdown-timeout"
            )
        message = run.save()
        if run.store is not None:
            self._gather(run, "saved", "")
            self._leave_in_order(run)
        return message

    def _leave_in_order(self, run: Run) -> None:
        """Rank 0 leaves last, because it may host the store."""
        if run.rank != 0:
            run.store.set(f"stop/left/{run.rank}", "")
            return
        with contextlib.suppress(PeerGoneError):  # all have saved: nothing can be lost
            self._gather(run, "left", "")

    def _gather(self, run: Run, name: str, value: str) -> list[str]:
        """All-gather ``value`` through the store; ``PeerGoneError`` after ``PEERS_S`` seconds."""
        run.store.set(f"stop/{name}/{run.rank}", value)
        keys = [f"stop/{name}/{rank}" for rank in range(run.world)]
        deadline, failed = time.monotonic() + PEERS_S, False
        while missing := [key for key in keys if not run.store.check([key])]:
            ranks = ", ".join(key.rpartition("/")[2] for key in missing)
            if time.monotonic() > deadline:
                raise PeerGoneError(f"no answer from rank {ranks} within {PEERS_S:.0f} s")
            if failed:
                raise PeerGoneError(f"this rank has failed, before an answer of rank {ranks}")
            failed = self._main_failed.wait(0.02)
        return [run.store.get(key).decode() for key in keys]


def _requested_stop(store: Any) -> str | None:
    """The reason for which another rank requests a stop; None without one or without the store."""
    try:
        return store.get("stop/reason").decode() if store.check(["stop/reason"]) else None
    except RuntimeError:  # the store's host has ended; the main thread notices too
        return None


def _leave(code: int) -> NoReturn:
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)
