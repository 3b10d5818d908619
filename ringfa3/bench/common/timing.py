"""Paired timings: A B A B ..., so that a drift of the device falls on both alike.

A power-limited GPU runs faster beside a slow neighbour, so two implementations are compared only
within pairs of their own. Samples follow each other without a pause and without a flush of the L2
cache, as in the paper's protocol. In a team every sample starts on all ranks together, and the
slowest rank's time is what it took.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from ringfa3.bench.common.machine import BenchError
from ringfa3.bench.common.ranks import Team

Call = Callable[[], object]
Reading = Callable[[], float]  # seconds per call, valid after `Stopwatch.wait`

FEWEST_PAIRS = 10
MOST_CALLS = 200  # of one sample
WARM_UP_CALLS = 3
LONG_S = 0.05  # a call that takes longer is called no more often than it must be
RESAMPLES = 10_000
LONGEST_AHEAD_S = 2.0  # of work that is started before the host waits for it
HERTZ = 2.0e9  # no Hopper GPU's SM clock is above it: a delay lasts at least as long as asked


class Stopwatch(Protocol):
    """Times calls on one device.

    team            the ranks that take a time together
    asynchronous    a call returns before the device has run it
    sample_seconds  what one sample should last at least; always one call or more
    """

    team: Team
    asynchronous: bool
    sample_seconds: float

    def sample(self, call: Call, calls: int, head_start: float) -> Reading:
        """Start `calls` calls in a row; the device does not start before `head_start` seconds."""

    def wait(self) -> None:
        """Wait until everything started has run."""


class CudaStopwatch:
    """Times on the GPU between two events."""

    asynchronous = True
    sample_seconds = 0.02

    def __init__(self, team: Team | None = None) -> None:
        self.team = team or Team()

    def sample(self, call: Call, calls: int, head_start: float) -> Reading:
        begin, end = (
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(2)
        )
        if head_start > 0:
            torch.cuda._sleep(int(head_start * HERTZ))  # type: ignore[no-untyped-call]
        self.team.start()
        begin.record()
        for _ in range(calls):
            call()
        end.record()
        return lambda: begin.elapsed_time(end) / 1e3 / calls

    def wait(self) -> None:
        begin = time.perf_counter()
        torch.cuda.synchronize()
        self.team.waited(time.perf_counter() - begin)


class WallClock:
    """Times on the CPU."""

    asynchronous = False
    sample_seconds = 0.0

    def __init__(self, team: Team | None = None) -> None:
        self.team = team or Team()

    def sample(self, call: Call, calls: int, head_start: float) -> Reading:
        self.team.start()
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        seconds = (time.perf_counter() - begin) / calls
        return lambda: seconds

    def wait(self) -> None:
        pass


def protocol(pairs: int) -> dict[str, Any]:
    """How everything here is timed, in words.

    Raises BenchError for too few pairs.
    """
    if pairs < FEWEST_PAIRS:
        raise BenchError(f"--pairs {pairs}: an interval needs {FEWEST_PAIRS} or more")
    return {
        "pairs": pairs,
        "inputs": "standard normal",
        "l2_cache": "not flushed",
        "flops": "exact visible pairs; backward 2.5 times forward",
    }


@dataclass(frozen=True)
class Paired:
    """Seconds per call of A and of B, pair by pair, and of the host to start one call of each.

    A host slower than its device (`host_bound`) was given a head start, so that `a` and `b` are
    times of the device throughout.
    """

    a: list[float]
    b: list[float]
    calls: int  # in one sample
    host: tuple[float, float]

    @property
    def host_bound(self) -> tuple[bool, bool]:
        return self.host[0] > median(self.a), self.host[1] > median(self.b)


def paired(a: Call, b: Call, pairs: int, stopwatch: Stopwatch) -> Paired:
    """Time A and B in turn, after a warm-up of both and, if they are short, an uncounted pair."""
    both = (a, b)
    slowest = stopwatch.team.largest
    second = [_second_call(call, stopwatch) for call in both]
    first, host = (slowest([times[i] for times in second]) for i in range(2))
    short = max(first) <= LONG_S
    if short:  # so a single call says little
        host = slowest([_host_seconds(call, stopwatch) for call in both])
        first = slowest([_first(c, h, stopwatch) for c, h in zip(both, host, strict=True)])
    calls = max(1, min(MOST_CALLS, math.ceil(stopwatch.sample_seconds / max(*first, 1e-9))))
    # Twice what the host lacks; nothing where it keeps ahead by itself.
    ahead = [2 * calls * max(0.0, h - d) for h, d in zip(host, first, strict=True)]
    readings: list[tuple[Reading, ...]] = []
    uncounted = int(short)
    for _ in range(uncounted + pairs):
        readings.append(
            tuple(stopwatch.sample(c, calls, lead) for c, lead in zip(both, ahead, strict=True))
        )
        if calls * sum(first) > LONGEST_AHEAD_S:
            stopwatch.wait()
    stopwatch.wait()
    times = slowest([reading() for pair in readings[uncounted:] for reading in pair])
    return Paired(times[::2], times[1::2], calls, (host[0], host[1]))


def _second_call(call: Call, stopwatch: Stopwatch) -> tuple[float, float]:
    """Its seconds and the host's to start it, after one that loads and allocates what it needs."""
    call()
    stopwatch.wait()
    begin = time.perf_counter()
    call()
    started = time.perf_counter()
    stopwatch.wait()
    host = started - begin if stopwatch.asynchronous else 0.0
    return time.perf_counter() - begin, host


def _host_seconds(call: Call, stopwatch: Stopwatch) -> float:
    """What the host takes to start one call while nothing holds it up; 0 where it does the work."""
    if not stopwatch.asynchronous:
        return 0.0
    begin = time.perf_counter()
    for _ in range(WARM_UP_CALLS):
        call()
    seconds = (time.perf_counter() - begin) / WARM_UP_CALLS
    stopwatch.wait()
    return seconds


def _first(call: Call, host: float, stopwatch: Stopwatch) -> float:
    """What a call takes the device."""
    reading = stopwatch.sample(call, WARM_UP_CALLS, 2 * WARM_UP_CALLS * host)
    stopwatch.wait()
    return reading()


@dataclass(frozen=True)
class Ratio:
    """Median of the paired ratios b / a (above 1: A is faster), with its 95% interval."""

    median: float
    low: float
    high: float


def compare(a: Sequence[float], b: Sequence[float], work: float = 1.0) -> Ratio:
    """The ratio of paired times with a percentile bootstrap of its median, the same every time.

    `work` is A's over B's where they do not do the same.
    """
    ratios = work * np.asarray(b, np.float64) / np.asarray(a, np.float64)
    draws = np.random.default_rng(0).integers(0, len(ratios), (RESAMPLES, len(ratios)))
    medians: npt.NDArray[np.float64] = np.median(ratios[draws], axis=1)
    low, high = np.quantile(medians, (0.025, 0.975))
    return Ratio(float(np.median(ratios)), float(low), float(high))


def median(values: Sequence[float]) -> float:
    return float(np.median(values))
