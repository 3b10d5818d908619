"""The ring calls of a rank, by which ranks find that theirs differ."""

from __future__ import annotations

import zlib
from collections import deque
from typing import NamedTuple

import torch

from ringfa3.agreement.entries import Settings
from ringfa3.tensor_cache import MemoryCache

RECENT_CALLS = 4096  # that ranks compare, more than a host makes between two looks


class LatestCall(NamedTuple):
    """The latest ring call of a rank.

    forward   number of the forward call of which it is the backward; 0 for a forward call
    history   digest of this call and those before it, the same on all ranks
    refusals  how many calls were refused before: then ranks begin a new history
    """

    number: int
    settings: Settings
    forward: int = 0
    history: int = 0
    refusals: int = 0

    def next(self, settings: Settings, forward: int) -> LatestCall:
        """The call that follows."""
        history = hash((self.history, forward, settings.digest))  # of whole numbers: no seed
        return LatestCall(self.number + 1, settings, forward, history, self.refusals)

    def refused(self, number: int) -> LatestCall:
        """After the refusal of call `number`, or of one before it."""
        return LatestCall(number, self.settings, 0, 0, self.refusals + 1)

    @property
    def id(self) -> int:
        """28 bits that identify the call, the same on all ranks in it."""
        return zlib.crc32(f"{self.number} {self.forward} {self.settings.key}".encode()) >> 4

    def at(self, point: str) -> Settings:
        """Its settings, with what ranks compare that have come so far."""
        of = {"forward of this backward": f"call {self.forward}"} if self.forward else {}
        return Settings({**self.settings, **of, "progress": f"call {self.number}, {point}"})

    @property
    def what(self) -> str:
        """For messages."""
        return f"backward of call {self.forward}" if self.forward else "forward"


class CallHistory:
    """Of one rank; other threads read it.

    latest  the call under way, or the last one: one object, so that a reader gets all of it
    recent  the latest calls since the last refused one
    """

    def __init__(self) -> None:
        self.latest = LatestCall(0, Settings())
        self.recent: deque[LatestCall] = deque(maxlen=RECENT_CALLS)
        self._forward_calls: MemoryCache[int] = MemoryCache()  # numbers by LSE

    def begin(self, settings: Settings, forward: int) -> None:
        """The next call; forward: number of its forward call, 0 if it is none's backward."""
        self.latest = self.latest.next(settings, forward)
        self.recent.append(self.latest)

    def refuse(self, number: int) -> None:
        """All ranks refuse calls up to a number, and begin a new history."""
        self.latest = self.latest.refused(number)
        self.recent.clear()

    def returned(self, lse: torch.Tensor) -> None:
        """The forward call under way returns this LSE."""
        self._forward_calls.set(lse, self.latest.number)

    def forward_of(self, lse: torch.Tensor | None) -> int:
        """Number of the forward call that returned the LSE of a backward; 0: unknown, or none."""
        return 0 if lse is None else self._forward_calls.get(lse) or 0
