"""A thread that checks whether streams which wait for other ranks make progress."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ringfa3.errors import gave_up, timed_out
from ringfa3.threads import JOIN_S

POLL_S = 0.1


class Watchdog(threading.Thread):
    """Knows what the streams of ring calls wait for, and polls whether the waits are over.

    It calls nothing of CUDA, which may block a thread for as long as a stream waits.

    If no wait ends for `timeout_s()`, or another rank has given up, it calls lost(message), once,
    and then release() until the last wait is over.

    posted        what calls have posted since the last poll: number of the call, and pairs of a
                  stream and its waits. The C++ launcher appends, too: csrc/host/begin_again.h
    timeout_s     in seconds; called at each poll, since users change a group's timeout
    reached       reached(stream, n): whether n waits of the stream are over
    peer_failure  message of another rank that has given up, or None
    describe      describe(wait): its name in messages
    """

    def __init__(
        self,
        timeout_s: Callable[[], float],
        reached: Callable[[Hashable, int], bool],
        peer_failure: Callable[[], str | None],
        lost: Callable[[str], None],
        release: Callable[[], None],
        describe: Callable[[Any], str] = str,
    ) -> None:
        super().__init__(daemon=True, name="ringfa3-watchdog")
        self.timeout_s, self.lost = timeout_s, lost
        self._reached, self._peer_failure, self._release = reached, peer_failure, release
        self._describe = describe
        self._poll: Callable[[], tuple[bool, Sequence[str]]] | None = None
        self.posted: deque[tuple[int, Sequence[tuple[Hashable, Sequence[object]]]]] = deque()
        self._streams: dict[Hashable, _Waits] = {}
        self._taking = threading.Lock()  # of `posted`, into `_streams`
        self._given_up, self._ended = False, threading.Event()
        self.start()

    def post(self, stream: Hashable, more: Sequence[object], call: int = 0) -> None:
        """The stream's next waits, one after the other, at least one. call: its number."""
        self.posted.append((call, ((stream, more),)))

    def poll_graphs(self, poll: Callable[[], tuple[bool, Sequence[str]]]) -> None:
        """Also watches waits that nobody posts: a graph may be replayed at any time.

        poll: whether a wait has ended since the last poll, and the names of those under way
        """
        self._poll = poll

    def completed_before(self, call: int) -> bool:
        """Whether the waits of all calls before `call` are over."""
        self._take_posted()
        ahead = [
            first for waits in self._streams.copy().values() for first in list(waits.ahead)[:1]
        ]
        return all(number >= call for number, _ in ahead)

    def give_up(self) -> None:
        """From now on it only releases."""
        self._given_up = True

    def end(self) -> None:
        self._ended.set()
        self.join(JOIN_S)

    def _take_posted(self) -> None:
        with self._taking:
            while self.posted:
                call, of_streams = self.posted.popleft()
                for stream, more in of_streams:
                    self._streams.setdefault(stream, _Waits()).ahead.append((call, more))

    def run(self) -> None:
        progress, names = time.monotonic(), list[str]()
        while not self._ended.wait(POLL_S):
            if not names:  # nothing has waited at the last poll
                progress = time.monotonic()
            self._take_posted()
            streams = list(self._streams.items())
            passed = [self._drop_passed(stream, waits) for stream, waits in streams]
            ahead = [waits.ahead[0][1][waits.at] for _, waits in streams if waits.ahead]
            names = [self._describe(wait) for wait in ahead]
            if self._poll is not None:
                passed_in_graphs, awaited = self._poll()
                passed.append(passed_in_graphs)
                names += awaited
            if any(passed):
                progress = time.monotonic()
            if not names:
                continue
            if self._given_up:
                self._release()
            elif (failure := self._peer_failure()) is not None:
                self._lose(gave_up("; ".join(names), failure))
            elif time.monotonic() > progress + (limit := self.timeout_s()):
                self._lose(timed_out("; ".join(names), limit))

    def _drop_passed(self, stream: Hashable, waits: _Waits) -> bool:
        before = waits.passed
        while waits.ahead and self._reached(stream, waits.passed + 1):
            waits.passed, waits.at = waits.passed + 1, waits.at + 1
            if waits.at == len(waits.ahead[0][1]):
                waits.ahead.popleft()
                waits.at = 0
        return waits.passed > before

    def _lose(self, message: str) -> None:
        self._given_up = True
        self.lost(message)


@dataclass
class _Waits:
    """The waits of one stream.

    ahead   call and waits, as they were posted; the stream is at number `at` of the first
    passed  how many waits are over
    """

    ahead: deque[tuple[int, Sequence[object]]] = field(default_factory=deque)
    at: int = 0
    passed: int = 0
