"""Where the time of a step goes on the GPU: attention, matrix products, communication, the rest.

Events on the compute stream mark where a stretch of one kind of work begins. They are read at the
next moment at which the host has waited for the device anyway.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch

KINDS = ("attention", "matmul", "communication", "rest", "idle")
IDLE_MS = 0.05  # a mark that the device reaches so soon after the host has issued it found no work
MATMULS = ("matmul", "add_matmul", "linear", "linear_backward")  # ops of train.model.matmul


class Event(Protocol):
    """As ``torch.cuda.Event(enable_timing=True)``."""

    def record(self) -> None: ...

    def elapsed_time(self, later: Event) -> float: ...


class Mark(NamedTuple):
    """A point of the stream: the kind of work behind it, and when the host issued it, seconds."""

    kind: str
    event: Event
    issued: float


class TimeSplit:
    """Splits periods by kinds of work.

    A period lasts from ``begin`` to ``end``; what is issued outside of one is not looked at.
    ``enter`` and ``leave`` may nest: the inner kind counts. What no kind claims is "rest", and a
    stretch of it is "idle" if the device had finished it when the host issued what follows. Small
    kernels of a starved device so count as idle.

    ``new_event`` makes events, ``synchronise`` waits for the device; ``clock`` is the host's, in
    seconds.
    """

    def __init__(
        self,
        new_event: Callable[[], Event],
        synchronise: Callable[[], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._new_event, self._synchronise, self._clock = new_event, synchronise, clock
        self._open: list[str] = []
        self._marks: list[Mark] = []  # of the present period; empty outside of one
        self._ended: list[Mark] = []  # of the period before
        self._free: list[Event] = []

    def begin(self) -> None:
        """Begin a period. The device has finished all earlier work."""
        self.pause()
        self._mark()

    def pause(self) -> None:
        """Drop the present period, for work that is no part of a step."""
        self._free += [mark.event for mark in self._marks]
        self._marks, self._open = [], []

    def begin_outside_a_step(self) -> None:
        """``begin``, after a wait for the device."""
        self._synchronise()
        self.begin()

    def enter(self, kind: str) -> None:
        """Work that is issued from here on is of ``kind``, one of the first three of ``KINDS``."""
        if self._marks:
            self._open.append(kind)
            self._mark()

    def leave(self) -> None:
        """End what the latest ``enter`` began."""
        if self._open:  # else the period is younger than that
            self._open.pop()
            self._mark()

    @contextmanager
    def of(self, kind: str) -> Iterator[None]:
        """``enter`` and ``leave`` around a block."""
        self.enter(kind)
        try:
            yield
        finally:
            self.leave()

    @contextmanager
    def op(self, name: str) -> Iterator[None]:
        """Around an op of ``ringfa3.custom_op``: attention, or a product of the model.

        An op of another name, the SwiGLU in chunks, calls products itself.
        """
        if name not in MATMULS and "attention" not in name:
            yield
            return
        with self.of("matmul" if name in MATMULS else "attention"):
            yield

    def end(self) -> None:
        """End the period; ``seconds`` needs the device to have reached this point."""
        self._mark()
        self._free += [mark.event for mark in self._ended]
        self._ended, self._marks, self._open = self._marks, [], []

    def seconds(self) -> dict[str, float]:
        """Seconds of the latest period that has ended, by ``KINDS``; their sum is its length."""
        split = dict.fromkeys(KINDS, 0.0)
        first = self._ended[0]
        for mark, following in pairwise(self._ended):
            kind = mark.kind
            if kind == "rest":
                since_issued = first.event.elapsed_time(following.event)
                since_issued -= 1e3 * (following.issued - first.issued)
                kind = "idle" if since_issued < IDLE_MS else kind
            split[kind] += mark.event.elapsed_time(following.event) / 1e3
        return split

    def _mark(self) -> None:
        event = self._free.pop() if self._free else self._new_event()
        issued = self._clock()
        event.record()
        self._marks.append(Mark(self._open[-1] if self._open else "rest", event, issued))


def time_split_on(device: torch.device) -> TimeSplit | None:
    """A split by CUDA events; None on the CPU, which has no stream to look at."""
    if device.type != "cuda":
        return None
    return TimeSplit(
        lambda: torch.cuda.Event(enable_timing=True), lambda: torch.cuda.synchronize(device)
    )
