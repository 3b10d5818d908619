"""Paired timings: A B A B ..., so that a drift of the device affects both alike.

A power-limited GPU runs faster beside a slow neighbour, so only times of the same pair are
compared. Samples follow each other without a flush of the L2 cache and, unless calls are timed one
by one, without a pause, as in FlashAttention-3's protocol. Over several ranks every sample starts
on all ranks together, and the slowest rank's time counts.
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

from ringfa3.bench.common.communicator import Communicator
from ringfa3.bench.common.machine import BenchError

Call = Callable[[], object]
Reading = Callable[[], float]  # seconds per call, valid after `Stopwatch.wait`

MIN_PAIRS = 10
SAMPLE_MS = 20.0  # minimum length of a sample of a pair's slower call on a GPU
MAX_CALLS = 200  # of one sample
WARM_UP_CALLS = 3
LONG_SECONDS = 0.05  # a longer call gets no warm-up pair and no further call to estimate its time
RESAMPLES = 10_000
MAX_QUEUED_SECONDS = 2.0  # of work that is started before the host waits for it
MAX_HERTZ = 2.0e9  # above any Hopper GPU's SM clock: a delay lasts at least as long as requested


class Stopwatch(Protocol):
    """Times calls on one device.

    comm            the ranks that take a time together
    asynchronous    True: a call returns before the device has run it
    sample_seconds  minimum length of a sample of a pair's slower call; the faster call's samples
                    have as many calls, one or more
    """

    comm: Communicator
    asynchronous: bool
    sample_seconds: float

    def sample(self, call: Call, calls: int, head_start: float) -> Reading:
        """Start `calls` calls in a row; the device begins `head_start` seconds later."""

    def wait(self) -> None:
        """Wait until everything started has run."""


class CudaStopwatch:
    """Times on the GPU, between two events."""

    asynchronous = True

    def __init__(self, comm: Communicator | None = None, sample_ms: float = SAMPLE_MS) -> None:
        self.comm, self.sample_seconds = comm or Communicator(), sample_ms / 1e3

    def sample(self, call: Call, calls: int, head_start: float) -> Reading:
        begin, end = (
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(2)
        )
        if head_start > 0:
            torch.cuda._sleep(int(head_start * MAX_HERTZ))  # type: ignore[no-untyped-call]
        self.comm.barrier()
        begin.record()
        for _ in range(calls):
            call()
        end.record()
        return lambda: begin.elapsed_time(end) / 1e3 / calls

    def wait(self) -> None:
        begin = time.perf_counter()
        torch.cuda.synchronize()
        self.comm.check_wait(time.perf_counter() - begin)


class OneByOne:
    """Times on the host, of calls that each start on idle devices and end with their kernels.

    So the time of the host counts, which a queue of calls hides. All ranks begin together.
    """

    asynchronous = False

    def __init__(self, comm: Communicator | None = None, sample_ms: float = SAMPLE_MS) -> None:
        self.comm, self.sample_seconds = comm or Communicator(), sample_ms / 1e3

    def sample(self, call: Call, calls: int, head_start: float) -> Reading:
        seconds = 0.0
        for _ in range(calls):
            torch.cuda.synchronize()
            self.comm.barrier()
            torch.cuda.synchronize()  # the barrier runs on the devices
            begin = time.perf_counter()
            call()
            torch.cuda.synchronize()
            took = time.perf_counter() - begin
            self.comm.check_wait(took)
            seconds += took
        return lambda: seconds / calls

    def wait(self) -> None:
        torch.cuda.synchronize()


class WallClock:
    """Times on the CPU."""

    asynchronous = False
    sample_seconds = 0.0

    def __init__(self, comm: Communicator | None = None) -> None:
        self.comm = comm or Communicator()

    def sample(self, call: Call, calls: int, head_start: float) -> Reading:
        self.comm.barrier()
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        seconds = (time.perf_counter() - begin) / calls
        return lambda: seconds

    def wait(self) -> None:
        pass


def protocol(pairs: int) -> dict[str, Any]:
    """The settings that every result file has. Raises BenchError for too few pairs."""
    if pairs < MIN_PAIRS:
        raise BenchError(f"--pairs {pairs}: an interval needs {MIN_PAIRS} or more")
    return {
        "pairs": pairs,
        "inputs": "standard normal",
        "l2_cache": "not flushed",
        "flops": "exact visible pairs; backward 2.5 times forward",
    }


@dataclass(frozen=True)
class Paired:
    """Seconds per call of A and of B, pair by pair.

    calls  in one sample
    host   seconds of the host to start one call, of A and of B. Where that is longer than the
           device takes (`host_bound`), samples had a head start: `a` and `b` are device times
    """

    a: list[float]
    b: list[float]
    calls: int
    host: tuple[float, float]

    @property
    def host_bound(self) -> tuple[bool, bool]:
        return self.host[0] > median(self.a), self.host[1] > median(self.b)


def paired(a: Call, b: Call, pairs: int, stopwatch: Stopwatch) -> Paired:
    """Time A and B in turn, after a warm-up of both and, for short calls, one discarded pair."""
    both = (a, b)
    slowest = stopwatch.comm.maximum
    second = [_second_call(call, stopwatch) for call in both]
    device, host = (slowest([times[i] for times in second]) for i in range(2))
    short = max(device) <= LONG_SECONDS
    if short:  # a single call is too noisy
        host = slowest([_host_seconds(call, stopwatch) for call in both])
        device = slowest([_estimate(c, h, stopwatch) for c, h in zip(both, host, strict=True)])
    calls = max(1, min(MAX_CALLS, math.ceil(stopwatch.sample_seconds / max(*device, 1e-9))))
    # Twice the time by which the host falls behind; 0 where it does not.
    ahead = [2 * calls * max(0.0, h - d) for h, d in zip(host, device, strict=True)]
    readings: list[tuple[Reading, ...]] = []
    discarded = int(short)
    for _ in range(discarded + pairs):
        readings.append(
            tuple(stopwatch.sample(c, calls, lead) for c, lead in zip(both, ahead, strict=True))
        )
        if calls * sum(device) > MAX_QUEUED_SECONDS:
            stopwatch.wait()
    stopwatch.wait()
    times = slowest([reading() for pair in readings[discarded:] for reading in pair])
    return Paired(times[::2], times[1::2], calls, (host[0], host[1]))


def _second_call(call: Call, stopwatch: Stopwatch) -> tuple[float, float]:
    """Seconds of a call, and of the host to start it; a call before it loads and allocates."""
    call()
    stopwatch.wait()
    begin = time.perf_counter()
    call()
    started = time.perf_counter()
    stopwatch.wait()
    host = started - begin if stopwatch.asynchronous else 0.0
    return time.perf_counter() - begin, host


def _host_seconds(call: Call, stopwatch: Stopwatch) -> float:
    """Seconds of the host to start one call on an idle device; 0 where calls are synchronous."""
    if not stopwatch.asynchronous:
        return 0.0
    begin = time.perf_counter()
    for _ in range(WARM_UP_CALLS):
        call()
    seconds = (time.perf_counter() - begin) / WARM_UP_CALLS
    stopwatch.wait()
    return seconds


def _estimate(call: Call, host: float, stopwatch: Stopwatch) -> float:
    """Seconds of a call on the device, from a few calls."""
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
    """The median ratio of paired times, with a percentile bootstrap from a fixed seed.

    work: A's FLOPs over B's.
    """
    ratios = work * np.asarray(b, np.float64) / np.asarray(a, np.float64)
    draws = np.random.default_rng(0).integers(0, len(ratios), (RESAMPLES, len(ratios)))
    medians: npt.NDArray[np.float64] = np.median(ratios[draws], axis=1)
    low, high = np.quantile(medians, (0.025, 0.975))
    return Ratio(float(np.median(ratios)), float(low), float(high))


def median(values: Sequence[float]) -> float:
    return float(np.median(values))
