"""Lets a recorder see what a call launches, and which memory its launches read."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from ringfa3.build.units import Unit


class Recorder(Protocol):
    def launched(self, unit: Unit, name: str, args: bytes) -> None:
        """Called after the launch of ringfa3_NAME of a unit."""

    def uses(self, memory: object) -> None:
        """Called with the memory that launches of other calls read, too.

        memory: a tensor, or a tuple that has some among its members.
        """

    def called(
        self, call: tuple[Any, tuple[Any, ...]], counts: Sequence[tuple[int, ctypes.Structure]]
    ) -> None:
        """Called before a call of the CUDA driver, an entry point and its arguments in C.

        counts: memory operations, some of them the call's, whose values are numbers of waits, and
        the numbers of their streams
        """

    def posted(self, stream: int, names: Sequence[str]) -> None:
        """Called with the names of waits of a stream, in order."""

    def keeps(self, plan: object) -> None:
        """Called with the plan of the call, whose uploads a captured call reads."""


class _Thread(threading.local):
    recorder: Recorder | None = None


_thread = _Thread()


def current_recorder() -> Recorder | None:
    """The recorder of this thread's call."""
    return _thread.recorder


@contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Shows what this thread launches to a recorder."""
    _thread.recorder = recorder
    try:
        yield
    finally:
        _thread.recorder = None
