"""When the steps of a trainer end, and a trace of some of them."""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity

UNDISTURBED = 2  # timed steps before those that are recorded
RECORDED = 2  # steps of a trace


class Stopwatch:
    """The times at which steps end, in seconds.

    With `wait` a step ends when the device has computed it, which alternating steps need. Without
    it the device may still compute an update, as in training. Every trainer waits for the device
    once a step, so the device is never more than a step late.

    With `trace`, a path, rank 0 writes a trace there of the last `RECORDED` of `steps` steps. The
    step before them warms the profiler up. The profiler takes host time for each op, so these
    steps are slower where the device waits for the host.
    """

    def __init__(self, steps: int, wait: bool = False, trace: Path | None = None) -> None:
        self.wait, self.ends = wait, list[float]()
        self._profile = None
        if trace is not None and os.environ.get("RANK", "0") == "0":
            self._profile = _recording(trace, steps - RECORDED)
            self._profile.start()

    def step_done(self) -> None:
        if self.wait and torch.cuda.is_available():
            torch.cuda.synchronize()
        self.ends.append(time.perf_counter())
        if self._profile is not None:
            self._profile.step()

    def seconds(self, steps: int) -> list[float]:
        """Of the last `steps` steps, each from the end of the one before."""
        return [end - begin for begin, end in itertools.pairwise(self.ends)][-steps:]


def _recording(path: Path, skipped: int) -> torch.profiler.profile:
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    return torch.profiler.profile(
        activities=activities,
        schedule=torch.profiler.schedule(
            skip_first=skipped - 1, wait=0, warmup=1, active=RECORDED, repeat=1
        ),
        on_trace_ready=lambda found: found.export_chrome_trace(str(path)),
        record_shapes=True,
    )
