"""The ring calls of one rank: their settings, their numbers, and how they are compared."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch

from ringfa3.schedules.settings import Settings
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
    """The ring calls of one rank. Only its own threads change it; the monitor's thread reads it.

    The C++ launcher begins calls, too (csrc/host/begin_again.h), and has the LSE of its own.

    latest   the call under way, or the last one: one object, so that readers need no lock
    recent   the latest calls since the last refusal
    refused  whether the latest call was refused on all ranks
    """

    def __init__(self, launched: Callable[[torch.Tensor], int] = lambda _: 0) -> None:
        """launched: number of the forward call that the launcher has begun, by its LSE, else 0."""
        self._launched = launched
        self.latest = LatestCall(0, Settings())
        self.recent: deque[LatestCall] = deque(maxlen=RECENT_CALLS)
        self.refused = False
        self._anew = False  # ranks begin a new history of calls at their next agreement
        self._forward_calls: MemoryCache[int] = MemoryCache()  # numbers by LSE

    def begin(self, settings: Settings, forward: int) -> None:
        """The next call. forward: as in `LatestCall`."""
        self.latest = self.latest.next(settings, forward)
        self.recent.append(self.latest)
        self.refused = False

    def returned(self, lse: torch.Tensor) -> None:
        """The forward call under way returns this LSE."""
        self._forward_calls.set(lse, self.latest.number)

    def forward_of(self, lse: torch.Tensor | None) -> int:
        """Number of the forward call that returned the LSE of a backward; 0: unknown, or none."""
        return 0 if lse is None else self._forward_calls.get(lse) or self._launched(lse)

    def refuse(self, number: int) -> None:
        """All ranks have refused call `number` or one before it."""
        self.latest = self.latest.refused(number)
        self.recent.clear()
        self.refused = self._anew = True

    def agreed(self, number: int) -> None:
        """All ranks have agreed; none has begun a call after `number`. After a refusal an
        interrupted caller may have begun one."""
        if self._anew:
            self.latest = self.latest.refused(number)
            self._anew = False
