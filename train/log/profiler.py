"""``profile``: traces of some steps on chosen ranks, and allocator snapshots."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch.profiler import ProfilerAction, ProfilerActivity

from train.config import ConfigError, ProfileConfig

HISTORY = 1_000_000  # allocator events in a memory snapshot


def require_profilable(profile: ProfileConfig, device: torch.device) -> None:
    """Raise ``ConfigError`` if ``profile`` needs what ``device`` does not have."""
    if profile.memory and device.type != "cuda":
        raise ConfigError(
            f"profile.memory=true: only CUDA's allocator keeps a history, and this run is on the "
            f"{device.type}; nearest valid: profile.memory=false"
        )


@contextlib.contextmanager
def profiled(
    profile: ProfileConfig, folder: Path, rank: int, device: torch.device, done: int
) -> Iterator[Callable[[], None]]:
    """A context around the steps of a run. It yields a function to call after each step.

    ``done`` steps were finished before. The context writes to ``folder`` a trace of the steps
    ``profile.steps`` on this ``rank`` and, with ``profile.memory``, a snapshot of the allocator. It
    does so also if an exception ends the steps early.
    """
    if profile.steps is None or rank not in profile.ranks or done >= profile.steps[1]:
        yield lambda: None
        return
    first, last = max(profile.steps[0], done + 1), profile.steps[1]
    folder.mkdir(parents=True, exist_ok=True)

    def action(number: int) -> ProfilerAction:
        step = done + 1 + number
        if step == last:
            return ProfilerAction.RECORD_AND_SAVE
        if first <= step < last:
            return ProfilerAction.RECORD
        return ProfilerAction.WARMUP if step == first - 1 else ProfilerAction.NONE

    def write(trace: torch.profiler.profile) -> None:
        trace.export_chrome_trace(str(folder / f"steps{first}-{last}-rank{rank}.json.gz"))

    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    memory = MemoryHistory(folder / f"memory-rank{rank}.pickle") if profile.memory else None
    with (
        contextlib.closing(memory) if memory is not None else contextlib.nullcontext(),
        torch.profiler.profile(
            activities=activities, schedule=action, on_trace_ready=write, record_shapes=True
        ) as trace,
    ):
        steps = done

        def step_done() -> None:
            nonlocal steps
            steps += 1
            trace.step()
            if memory is not None:
                memory.set(recording=first <= steps + 1 <= last)

        if memory is not None:
            memory.set(recording=first == done + 1)
        yield step_done


class MemoryHistory:
    """Records the history of CUDA's allocator, and writes it when the recording ends."""

    def __init__(self, path: Path) -> None:
        self.path, self.recording = path, False

    def set(self, recording: bool) -> None:
        """Start or stop recording."""
        if recording and not self.recording:
            torch.cuda.memory._record_memory_history(max_entries=HISTORY)
        elif self.recording and not recording:
            torch.cuda.memory._dump_snapshot(str(self.path))
            torch.cuda.memory._record_memory_history(enabled=None)
        self.recording = recording

    def close(self) -> None:
        """Stop recording."""
        self.set(recording=False)
