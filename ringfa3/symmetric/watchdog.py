"""A watch over streams that wait for other ranks: what they wait for, and whether they go on."""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

POLL_S = 0.1
END_S = 1.0  # a thread that does not end by then hangs in a call


class Watch(threading.Thread):
    """Looks at what streams of ring calls wait for, and whether it has come.

    It calls nothing of CUDA, which may hold a thread up as long as a stream waits.

    If nothing comes for `timeout_s`, or another rank has given up, it calls lost(message), once,
    and then release() until the last wait is over. Idle while nothing is awaited, unless it also
    looks at what graphs wait for.

    reached  reached(stream, n): whether the n-th wait of a stream, counted from 1, is over
    alarm    what another rank said that gave up, or None
    """

    def __init__(
        self,
        timeout_s: float,
        reached: Callable[[Hashable, int], bool],
        alarm: Callable[[], str | None],
        lost: Callable[[str], None],
        release: Callable[[], None],
    ) -> None:
        super().__init__(daemon=True, name="ringfa3-watch")
        self.timeout_s, self.lost = timeout_s, lost
        self._reached, self._alarm, self._release = reached, alarm, release
        self._posted = threading.Event()
        self._look: Callable[[], tuple[bool, Sequence[str]]] | None = None
        self._streams: dict[Hashable, _Waits] = {}
        self._given_up = self._over = False
        self.start()

    def post(self, stream: Hashable, what: Sequence[str]) -> None:
        """What the stream waits for next, one after the other."""
        waits = self._streams.get(stream)
        if waits is None:
            waits = self._streams[stream] = _Waits()
        waits.ahead.append(what)
        if not self._posted.is_set():
            self._posted.set()

    def look_at(self, look: Callable[[], tuple[bool, Sequence[str]]]) -> None:
        """Waits that nobody posts, from now on. It is never idle then: at any time a graph may be
        replayed.

        look  whether one is over since the last look, and what is awaited now
        """
        self._look = look
        self._posted.set()

    def give_up(self) -> None:
        """From now on it only releases."""
        self._given_up = True

    def end(self) -> None:
        self._over = True
        self._posted.set()
        self.join(END_S)

    def run(self) -> None:
        while not self._over:
            self._posted.wait()
            self._posted.clear()
            self._attend()

    def _attend(self) -> None:
        """Until nothing is awaited."""
        moved = time.monotonic()
        while not self._over:
            time.sleep(POLL_S)
            streams = list(self._streams.items())
            passed = [self._drop_passed(stream, waits) for stream, waits in streams]
            ahead = [waits.ahead[0][waits.at] for _, waits in streams if waits.ahead]
            if self._look is not None:
                came, awaited = self._look()
                passed.append(came)
                ahead += awaited
            elif not ahead:
                return
            if any(passed) or not ahead:
                moved = time.monotonic()
            if not ahead:
                continue
            if self._given_up:
                self._release()
            elif (said := self._alarm()) is not None:
                self._lose(f"{'; '.join(ahead)}: gave up because {said}")
            elif time.monotonic() > moved + self.timeout_s:
                self._lose(
                    f"{'; '.join(ahead)}: nothing within {self.timeout_s:g} s; is that rank "
                    "stopped?"
                )

    def _drop_passed(self, stream: Hashable, waits: _Waits) -> bool:
        before = waits.passed
        while waits.ahead and self._reached(stream, waits.passed + 1):
            waits.passed, waits.at = waits.passed + 1, waits.at + 1
            if waits.at == len(waits.ahead[0]):
                waits.ahead.popleft()
                waits.at = 0
        return waits.passed > before

    def _lose(self, message: str) -> None:
        self._given_up = True
        self.lost(message)


@dataclass
class _Waits:
    """Of one stream.

    ahead   runs of waits, the first of which is at its `at`-th; none is empty
    passed  how many were before
    """

    ahead: deque[Sequence[str]] = field(default_factory=deque)
    at: int = 0
    passed: int = 0


def raise_in_main_thread(error: Exception) -> None:
    """Raises an error of the same kind and text where the main thread is, once it runs Python.

    So a caller that waits for its device gets the error instead of what the device has computed.
    """

    def again(self: Exception) -> None:
        Exception.__init__(self, str(error))

    kind = type(type(error).__name__, (type(error),), {"__init__": again})
    main = threading.main_thread().ident
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(main or 0), ctypes.py_object(kind))
