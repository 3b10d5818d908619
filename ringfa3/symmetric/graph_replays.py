"""What the replays of captured calls wait for: their streams say it themselves.

A replay is launched by the graph's owner, and the host posts nothing. So before a stream awaits a
word in a graph it writes the number of that wait to where the watch looks, and behind a few waits
that they are over. Numbers mean the same in all graphs of a group.
"""

from __future__ import annotations

from collections.abc import Sequence

from ringfa3.symmetric import cuda_driver
from ringfa3.symmetric.signals import AWAITED, OVER, Words
from ringfa3.symmetric.stream_ops import Stream


class Replays:
    """Of one rank."""

    def __init__(self, words: Words) -> None:
        self._words = words
        self._said: list[str] = []  # numbers from 1 on
        self._number: dict[str, int] = {}
        self._seen = [0] * len(Stream)

    def awaiting(self, stream: Stream, what: str) -> cuda_driver.WordOperation:
        if what not in self._number:
            self._said.append(what)
            self._number[what] = len(self._said)
        return cuda_driver.write(self._words.counter(stream, AWAITED), self._number[what])

    def over(self, stream: Stream) -> list[cuda_driver.WordOperation]:
        """Behind waits of which each has another number."""
        values = {OVER: 1, AWAITED: 0}
        return [
            cuda_driver.write(self._words.counter(stream, x), value) for x, value in values.items()
        ]

    def look(self) -> tuple[bool, Sequence[str]]:
        """Whether a wait is over since the last look, and what is awaited now."""
        over = [self._words.over(stream) for stream in Stream]
        before, self._seen = self._seen, [self._words.awaited(stream) for stream in Stream]
        waits = [self._said[number - 1] for number in self._seen if number]
        return any(over) or self._seen != before, waits
