"""How the GPU time of a step splits: attention, matrix products, communication, the rest.

A CUDA event on the compute stream records where the category of work changes. The events are read
only when the host has waited for the device anyway, so that the split costs no synchronisation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch

CATEGORIES = ("attention", "matmul", "communication", "rest", "idle")
IDLE_MS = 0.05  # the device was idle if it reaches an event so soon after the host has issued it
MATMULS = ("matmul", "add_matmul", "linear", "linear_backward")  # ops of train.model.matmul


class Event(Protocol):
    """The methods of ``torch.cuda.Event(enable_timing=True)`` that are used here."""

    def record(self) -> None: ...

    def elapsed_time(self, later: Event) -> float: ...


class Boundary(NamedTuple):
    """A point of the stream where work of ``category`` begins; ``issued`` is the host's time."""

    category: str
    event: Event
    issued: float


class TimeSplit:
    """Splits the device time of periods into ``CATEGORIES``.

    A period lasts from ``begin`` to ``end``; work outside of periods is not measured. ``enter`` and
    ``leave`` may nest: the inner category counts. Work without a category is "rest". An interval
    of it is "idle" if the device had finished it when the host issued the next work. Small kernels
    of a device that waits for the host therefore count as idle.

    ``new_event`` creates events, ``synchronise`` waits for the device; ``clock`` is the host's, in
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
        self._boundaries: list[Boundary] = []  # of the current period; empty outside of one
        self._ended: list[Boundary] = []  # of the period before
        self._free: list[Event] = []

    def begin(self) -> None:
        """Begin a period. The device must have finished all earlier work."""
        self.pause()
        self._record()

    def pause(self) -> None:
        """Drop the current period, for work that is no part of a step."""
        self._free += [boundary.event for boundary in self._boundaries]
        self._boundaries, self._open = [], []

    def begin_outside_a_step(self) -> None:
        """Wait for the device, then ``begin``."""
        self._synchronise()
        self.begin()

    def enter(self, category: str) -> None:
        """Count what is issued from here on as ``category``, one of the first three."""
        if self._boundaries:
            self._open.append(category)
            self._record()

    def leave(self) -> None:
        """End what the latest ``enter`` began."""
        if self._open:  # else that `enter` was before the period
            self._open.pop()
            self._record()

    @contextmanager
    def of(self, category: str) -> Iterator[None]:
        """``enter`` and ``leave`` around a block."""
        self.enter(category)
        try:
            yield
        finally:
            self.leave()

    @contextmanager
    def op(self, name: str) -> Iterator[None]:
        """A context around an op of ``ringfa3.custom_op``: attention, or a product of the model.

        An op of another name, the SwiGLU in chunks, calls products itself and is not counted.
        """
        if name not in MATMULS and "attention" not in name:
            yield
            return
        with self.of("matmul" if name in MATMULS else "attention"):
            yield

    def end(self) -> None:
        """End the period; call ``seconds`` after the device has reached this point."""
        self._record()
        self._free += [boundary.event for boundary in self._ended]
        self._ended, self._boundaries, self._open = self._boundaries, [], []

    def seconds(self) -> dict[str, float]:
        """Seconds of the latest period that has ended, by category; their sum is its length."""
        split = dict.fromkeys(CATEGORIES, 0.0)
        first = self._ended[0]
        for boundary, following in pairwise(self._ended):
            category = boundary.category
            if category == "rest":
                since_issued = first.event.elapsed_time(following.event)
                since_issued -= 1e3 * (following.issued - first.issued)
                category = "idle" if since_issued < IDLE_MS else category
            split[category] += boundary.event.elapsed_time(following.event) / 1e3
        return split

    def _record(self) -> None:
        event = self._free.pop() if self._free else self._new_event()
        issued = self._clock()
        event.record()
        category = self._open[-1] if self._open else "rest"
        self._boundaries.append(Boundary(category, event, issued))


def time_split_on(device: torch.device) -> TimeSplit | None:
    """A split by CUDA events; None on the CPU, which has no streams."""
    if device.type != "cuda":
        return None
    return TimeSplit(
        lambda: torch.cuda.Event(enable_timing=True), lambda: torch.cuda.synchronize(device)
    )
