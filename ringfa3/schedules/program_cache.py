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
        self._programs: dict[tuple[Signature, Hashable], T] = {}

    def __len__(self) -> int:
        return len(self._programs)

    def get(
        self,
        signature: Signature,
        linked_for: Hashable,
        find: Callable[[], EncodedSchedule | None],
        link: Callable[[EncodedSchedule | None], T],
    ) -> T:
        """The program, made the first time. find: the signature's schedule, as `schedule_of`."""
        key = signature, linked_for
        if key not in self._programs:
            if len(self._programs) >= MAX_PROGRAMS:
                self._programs.clear()
                self._schedules.clear()
            if signature not in self._schedules:
                self._schedules[signature] = find()
            self._programs[key] = link(self._schedules[signature])
        return self._programs[key]
