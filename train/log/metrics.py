"""Metrics of a run in progress: JSON lines and TensorBoard scalars. Only rank 0 records."""

from __future__ import annotations

import contextlib
import math
import resource
import sys
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from typing import Any

import torch
from torch.utils.tensorboard import SummaryWriter

from train.data.position_buckets import bucket_label
from train.log.json_lines import JsonLines
from train.log.units import all_units
from train.log.wandb_run import WandbRun
from train.run.run_folder import RunFolder


def peak_memory(device: torch.device) -> int:
    """Peak bytes so far: of tensors on a GPU, of the whole process (RSS) on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def device_memory(device: torch.device) -> int:
    """Bytes in use on a GPU, as its driver counts them, at PyTorch's peak so far.

    They include what ranks share over NVLink, NCCL's buffers and other processes. The figure is too
    high if others have taken memory that PyTorch has released since. On the CPU ``peak_memory``.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        given_back = torch.cuda.max_memory_reserved(device) - torch.cuda.memory_reserved(device)
        return min(total, total - free + given_back)
    return peak_memory(device)


class Recorder:
    """Writes ``metrics.jsonl``, ``eval.jsonl``, ``events.jsonl``, TensorBoard and ``wandb``.

    ``last_step`` is the step after which the run continues, 0 for a new run. A full disk does not
    end training: lines stay in memory, and ``print_line`` gets one message.
    """

    def __init__(
        self,
        folder: RunFolder,
        last_step: int,
        print_line: Callable[[str], None],
        wandb: WandbRun | None = None,
    ) -> None:
        self._folder, self._print_line, self._wandb = folder, print_line, wandb
        self._waiting = False
        self._events = JsonLines(folder.events, sys.maxsize)  # kept in full: the history of the run
        self._steps = JsonLines(folder.metrics, last_step)
        self._evaluations = JsonLines(folder.evaluations, last_step)
        self._board: SummaryWriter | None = None
        self._open_board(last_step)

    def roll_back(self, last_step: int) -> None:
        """Drop the records of steps after ``last_step``; events stay."""
        self._steps.drop_after(last_step)
        self._evaluations.drop_after(last_step)
        self._close_board()
        self._open_board(last_step)

    def step(self, record: dict[str, Any], loss_by_bucket: Sequence[float]) -> None:
        """Record one optimiser step; ``record`` is its line, ``record["step"]`` its number."""
        self._write(self._steps, record)
        scalars = (item for item in record.items() if not isinstance(item[1], list))
        values = {f"train/{name}": value for name, value in scalars if name != "step"}
        self._plot(values | _by_bucket("loss_by_position", loss_by_bucket), record["step"])

    def evaluation(self, record: dict[str, Any], loss_by_bucket: Sequence[float]) -> None:
        """Record one validation after ``record["step"]`` optimiser steps."""
        self._write(self._evaluations, record)
        losses = all_units(record["loss"], record["nats_per_byte"])
        values = {f"held_out/{unit}": loss for unit, loss in losses.items()}
        values |= _by_bucket("held_out_loss_by_position", loss_by_bucket)
        self._plot(values, record["step"])

    def event(self, step: int, event: str) -> None:
        """Record an event (start, skipped step, stop, ...) after ``step`` optimiser steps."""
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        self._write(self._events, {"step": step, "time": now, "event": event})

    def close(self) -> None:
        """Close every file; report lines that the disk still rejects, which are lost."""
        for lines in (self._events, self._steps, self._evaluations):
            lines.close()
            if lines.problem:
                self._print_line(f"{lines.problem}; the newest lines are not in the file")
        self._close_board()
        if self._wandb is not None:
            self._wandb.close()

    def _open_board(self, last_step: int) -> None:
        try:
            self._board = SummaryWriter(str(self._folder.tensorboard), purge_step=last_step + 1)
        except OSError as error:
            self._print_line(f"TensorBoard is off from step {last_step + 1}: {error}")
            self._board = None

    def _close_board(self) -> None:
        if self._board is not None:
            with contextlib.suppress(OSError):
                self._board.close()

    def _write(self, lines: JsonLines, record: dict[str, Any]) -> None:
        lines.write(record)
        if lines.problem and not self._waiting:
            self._print_line(f"{lines.problem}; lines are kept in memory until they can be written")
        self._waiting = lines.problem is not None

    def _plot(self, values: dict[str, float], step: int) -> None:
        if self._wandb is not None:
            self._wandb.log(values, step)
        if self._board is None:
            return
        try:
            for name, value in values.items():
                self._board.add_scalar(name, value, step)
        except OSError as error:
            self._print_line(f"TensorBoard is off from step {step}: {error}")
            self._board = None


def _by_bucket(tag: str, losses: Sequence[float]) -> dict[str, float]:
    by_bucket = enumerate(losses)
    return {f"{tag}/{bucket_label(b)}": loss for b, loss in by_bucket if not math.isnan(loss)}
