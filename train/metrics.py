"""What a run leaves behind while it trains: JSON lines, TensorBoard scalars, a word on the console.

Rank 0 alone records and speaks.
"""

from __future__ import annotations

import json
import math
import resource
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch.utils.tensorboard import SummaryWriter

from train.loss import bucket_label

RUN_FILES = ("metrics.jsonl", "eval.jsonl", "summary.json", "loss.png", "loss_by_position.png")
SECONDS_BETWEEN_LINES = 10.0  # where stdout is not a terminal


def peak_memory(device: torch.device) -> int:
    """Most bytes held so far: by tensors on a GPU, by the whole process (RSS) on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def prepare_folder(folder: Path) -> None:
    """Make the run folder, or empty it of what an earlier run has left there."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(folder / "tensorboard", ignore_errors=True)
    for name in RUN_FILES:
        (folder / name).unlink(missing_ok=True)
    for path in folder.glob("error-rank*.txt"):
        path.unlink()


class JsonLines:
    """A file with one JSON object per line, complete after every line."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", buffering=1)

    def write(self, record: dict[str, Any]) -> None:
        """Append one object."""
        self._file.write(json.dumps(record) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class Recorder:
    """Writes ``metrics.jsonl`` (one line per optimiser step), ``eval.jsonl`` and TensorBoard."""

    def __init__(self, folder: Path) -> None:
        self._steps = JsonLines(folder / "metrics.jsonl")
        self._evaluations = JsonLines(folder / "eval.jsonl")
        self._board = SummaryWriter(str(folder / "tensorboard"))

    def step(self, record: dict[str, Any], loss_by_bucket: Sequence[float]) -> None:
        """One optimiser step; ``record`` is its line, ``step`` its number."""
        self._steps.write(record)
        for name, value in record.items():
            if name != "step":
                self._board.add_scalar(f"train/{name}", value, record["step"])
        self._buckets("loss_by_position", loss_by_bucket, record["step"])

    def evaluation(self, record: dict[str, Any], loss_by_bucket: Sequence[float]) -> None:
        """One validation after ``record["step"]`` optimiser steps."""
        self._evaluations.write(record)
        self._board.add_scalar("held_out/nats_per_byte", record["nats_per_byte"], record["step"])
        self._buckets("held_out_loss_by_position", loss_by_bucket, record["step"])

    def close(self) -> None:
        """Close every file."""
        self._steps.close()
        self._evaluations.close()
        self._board.close()

    def _buckets(self, tag: str, losses: Sequence[float], step: int) -> None:
        for bucket, loss in enumerate(losses):
            if not math.isnan(loss):
                self._board.add_scalar(f"{tag}/{bucket_label(bucket)}", loss, step)


class StepProgress:
    """A progress bar on a terminal; elsewhere a line now and then. Silent on a quiet console."""

    def __init__(self, console: Console, steps: int) -> None:
        self._console, self._steps = console, steps
        self._line_due = 0.0
        self._bar = Progress(
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal or console.quiet,
        )
        self._task = self._bar.add_task("", total=steps)

    def __enter__(self) -> StepProgress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def update(self, record: dict[str, Any]) -> None:
        """Show the step of ``record``, a line of ``metrics.jsonl``."""
        text = f"loss {record['loss']:.3f}  {record['tokens_per_s']:,.0f} tokens/s"
        self._bar.update(self._task, completed=record["step"], description=text)
        now = time.monotonic()
        last = record["step"] == self._steps
        if not self._console.is_terminal and (now >= self._line_due or last):
            self.say(f"step {record['step']}/{self._steps}  {text}")
            self._line_due = now + SECONDS_BETWEEN_LINES

    def say(self, text: str) -> None:
        """A line above the bar."""
        self._console.print(text, soft_wrap=True)
