"""An orderly end on SIGTERM, Ctrl-C or a deadline, at any moment, with nothing lost.

A step may last minutes, and a signal handler of Python's runs only when the main thread comes back
to the interpreter. So a thread of its own takes the signals. It shuts the gate before the next
change of the parameters, agrees with its like on the other ranks on the last step that all have
finished, has that state saved beside the step in progress, and ends the process.

This module imports nothing that starts threads: they would have to inherit the blocked signals.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from train.run.update_lock import UpdateLock

GLANCE_S = 0.25  # between two looks at what the other ranks say
ARMING_S = 20.0  # that a signal during start-up waits for the run to begin
PEERS_S = 8.0  # that a stopping rank waits for the others to join in
SIGNALS = {signal.SIGTERM: "SIGTERM", signal.SIGINT: "Ctrl-C"}


class PeerGoneError(RuntimeError):
    """A rank does not take part in stopping."""


@dataclass
class Run:
    """What there is to stop.

    ``store`` is a connection of the stopper's own, None for one process. ``save`` writes the
    present state and returns what to tell people; ``fail`` says why that was not possible;
    ``close`` ends what would lose buffered data. ``deadline`` is on ``time.monotonic``'s clock.
    """

    rank: int
    world: int
    store: Any
    gate: UpdateLock
    save: Callable[[], str]
    say: Callable[[str], None]
    fail: Callable[[str], None]
    close: Callable[[], None]
    deadline: float | None = None


class Stopper(threading.Thread):
    """Takes SIGTERM and SIGINT from now on. Make it before any other thread."""

    def __init__(self) -> None:
        super().__init__(daemon=True, name="stopper")
        self.stopping = threading.Event()
        self._armed = threading.Event()
        self._retired = threading.Event()
        self._main_failed = threading.Event()
        self._run: Run | None = None
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        self.start()

    def arm(self, run: Run) -> None:
        """From here on there is something to save."""
        self._run = run
        self._armed.set()

    def retire(self) -> None:
        """Take no more signals: they stay blocked, and pending for whoever waits for them."""
        self._retired.set()
        if not self.stopping.is_set():
            self.join(1 + GLANCE_S)

    def give_way(self) -> None:
        """Called by a main thread that has failed: returns, unless this run is being stopped.

        Nobody leaves a stop before all have saved. So a failure in the middle of one is real, or
        comes from peers that are already done, and the stopper is too.
        """
        if self.stopping.is_set():
            self._main_failed.set()
            time.sleep(PEERS_S + 2)

    def run(self) -> None:
        """Wait for a reason to stop, then stop."""
        found = self._await_reason()
        if found is None or not self._await_run(found[0]):
            return
        _, reason = found
        run = self._run
        assert run is not None
        self.stopping.set()
        code = 1
        try:  # whatever happens, the process ends: nobody else takes signals any more
            said = self._stop_all(run, reason)
            code = 130 if reason == SIGNALS[signal.SIGINT] else 0
            run.say(f"{reason}: {said}")
            run.close()
        except BaseException as error:
            if code == 1:
                run.fail(f"{reason}, but nothing was saved: {error}")
        finally:
            _leave(code)

    def _await_run(self, number: int | None) -> bool:
        """Wait for something to stop; a start-up that takes too long just ends."""
        deadline = time.monotonic() + ARMING_S
        while not self._armed.wait(0.05):
            if self._retired.is_set():
                return False
            if number == signal.SIGINT or time.monotonic() > deadline:
                _leave(128 + (number or signal.SIGTERM))
        return True

    def _await_reason(self) -> tuple[int | None, str] | None:
        while not self._retired.is_set():
            taken = signal.sigtimedwait(SIGNALS, GLANCE_S)
            if taken is not None:
                return taken.si_signo, SIGNALS[signal.Signals(taken.si_signo)]
            run = self._run
            if run is None:
                continue
            if run.deadline is not None and time.monotonic() > run.deadline:
                return None, "train.max_wall_time is over"
            if run.store is not None and (asked := _asked(run.store)):
                return None, asked
        return None

    def _stop_all(self, run: Run, reason: str) -> str:
        made = run.gate.shut()
        if run.store is not None:
            run.store.set("stop/reason", reason)
            last = max(int(made) for made in self._everyone(run, "made", str(made)))
            if not run.gate.shut_after(last, PEERS_S):
                raise PeerGoneError(f"the step before was not finished within {PEERS_S:.0f} s")
        said = run.save()
        if run.store is not None:
            self._everyone(run, "saved", "")
            self._leave_in_order(run)
        return said

    def _leave_in_order(self, run: Run) -> None:
        """Rank 0 last: it may host the store."""
        if run.rank != 0:
            run.store.set(f"stop/left/{run.rank}", "")
            return
        with contextlib.suppress(PeerGoneError):  # all have saved: nothing can be lost any more
            self._everyone(run, "left", "")

    def _everyone(self, run: Run, what: str, mine: str) -> list[str]:
        """What every rank says under ``what``, once all have said it."""
        run.store.set(f"stop/{what}/{run.rank}", mine)
        keys = [f"stop/{what}/{rank}" for rank in range(run.world)]
        deadline, failed = time.monotonic() + PEERS_S, False
        while missing := [key for key in keys if not run.store.check([key])]:
            ranks = ", ".join(key.rpartition("/")[2] for key in missing)
            if time.monotonic() > deadline:
                raise PeerGoneError(f"no answer from rank {ranks} within {PEERS_S:.0f} s")
            if failed:
                raise PeerGoneError(f"this rank has failed, before an answer of rank {ranks}")
            failed = self._main_failed.wait(0.02)
        return [run.store.get(key).decode() for key in keys]


def _asked(store: Any) -> str | None:
    """Why another rank asks for a stop; None if none does, or nobody can be asked any more."""
    try:
        return store.get("stop/reason").decode() if store.check(["stop/reason"]) else None
    except RuntimeError:  # the store's host has ended; the main thread will notice as well
        return None


def _leave(code: int) -> NoReturn:
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)
