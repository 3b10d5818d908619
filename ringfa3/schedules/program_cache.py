"""The programs of a plan's calls."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from ringfa3.schedules.encoded import EncodedSchedule
from ringfa3.schedules.link import Signature

MAX_PROGRAMS = 64  # of a plan; beyond that all are forgotten

T = TypeVar("T")


class ProgramCache(Generic[T]):
    """Programs by call signature and by what they are linked for: device, stream, parity.

    All programs of a signature share one schedule.
    """

    def __init__(self) -> None:
        self._schedules: dict[Signature, EncodedSchedule | None] = {}
        self._programs: dict[Hashable, T] = {}

    def __len__(self) -> int:
        return len(self._programs)

    def schedule(
        self, signature: Signature, find: Callable[[], EncodedSchedule | None]
    ) -> EncodedSchedule | None:
        """The schedule of a signature, found the first time."""
        if signature not in self._schedules:
            self._schedules[signature] = find()
        return self._schedules[signature]

    def get(self, key: Hashable, link: Callable[[], T]) -> T:
        """The program of a signature and what it is linked for, made the first time."""
        found = self._programs.get(key)
        if found is None:
            if len(self._programs) >= MAX_PROGRAMS:
                self._programs.clear()
                self._schedules.clear()
            found = self._programs[key] = link()
        return found
