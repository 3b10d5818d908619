"""A watch over streams that wait for other ranks: what they wait for, and whether they go on."""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable

POLL_S = 0.1

Mark = Callable[[], bool]  # a point in a stream: whether it is passed


class Watch(threading.Thread):
    """Looks at the marks behind the waits of ring calls, in the order of each stream.

    It calls nothing of CUDA, which may hold a thread up as long as a stream waits.

    If none is passed for `timeout_s`, or another rank has given up, it calls lost(message), once,
    and then release() until the last mark is passed. Idle while there are no marks.

    alarm    what another rank said that gave up, or None
    """

    def __init__(
        self,
        timeout_s: float,
        alarm: Callable[[], str | None],
        lost: Callable[[str], None],
        release: Callable[[], None],
    ) -> None:
        super().__init__(daemon=True, name="ringfa3-watch")
        self.timeout_s, self.lost = timeout_s, lost
        self._alarm, self._release = alarm, release
        self._posted = threading.Event()
        self._streams: dict[object, deque[tuple[Mark, str]]] = {}
        self._given_up = False
        self.start()

    def post(self, stream: object, mark: Mark, what: str) -> None:
        """The next mark of a stream, and what the stream waits for before it."""
        self._streams.setdefault(stream, deque()).append((mark, what))
        if not self._posted.is_set():
            self._posted.set()

    def give_up(self) -> None:
        """From now on it only releases."""
        self._given_up = True

    def run(self) -> None:
        while True:
            self._posted.wait()
            self._posted.clear()
            self._attend()

    def _attend(self) -> None:
        """Until no marks are left."""
        moved = time.monotonic()
        while True:
            time.sleep(POLL_S)
            streams = list(self._streams.values())
            passed = [self._drop_passed(marks) for marks in streams]
            ahead = [marks[0][1] for marks in streams if marks]
            if not ahead:
                return
            if any(passed):
                moved = time.monotonic()
            if self._given_up:
                self._release()
            elif (said := self._alarm()) is not None:
                self._lose(f"{'; '.join(ahead)}: gave up because {said}")
            elif time.monotonic() > moved + self.timeout_s:
                self._lose(
                    f"{'; '.join(ahead)}: nothing within {self.timeout_s:g} s; is that rank "
                    "stopped?"
                )

    @staticmethod
    def _drop_passed(marks: deque[tuple[Mark, str]]) -> bool:
        before = len(marks)
        while marks and marks[0][0]():
            marks.popleft()
        return len(marks) < before

    def _lose(self, message: str) -> None:
        self._given_up = True
        self.lost(message)


def raise_in_main_thread(error: Exception) -> None:
    """Raises an error of the same kind and text where the main thread is, once it runs Python.

    So a caller that waits for its device gets the error instead of what the device has computed.
    """

    def again(self: Exception) -> None:
        Exception.__init__(self, str(error))

    kind = type(type(error).__name__, (type(error),), {"__init__": again})
    main = threading.main_thread().ident
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(main or 0), ctypes.py_object(kind))
