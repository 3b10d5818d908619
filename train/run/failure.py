"""What is said of a rank that fails: once, with its rank, its step and its error.

torchrun ends with a report of the failed processes. For each it prints what the process has written
to the file in TORCHELASTIC_ERROR_FILE. A killed process can write nothing any more, so every rank
writes beforehand, step by step, what is true if it is found dead.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist

from ringfa3.errors import RingError
from train.config import Config


class FailureReport:
    """This rank's part of torchrun's report. Without torchrun nothing is written ahead.

    ``console`` is where people look, also once the rank's own output goes to a log file.
    """

    def __init__(self, rank: int, console: TextIO) -> None:
        self.rank, self.console = rank, console
        self.step: int | None = None
        self._file = os.environ.get("TORCHELASTIC_ERROR_FILE")

    def begin_step(self, step: int) -> None:
        """From now on this rank works on optimiser step ``step``."""
        self.step = step
        self._write(self._line("killed from outside, or by the system for lack of memory"))

    def report(self, error: BaseException, log: Path, config: Config) -> None:
        """Say what ended this rank, in one line; the traceback goes to ``log``.

        The line is part of torchrun's last report. It is printed here only if there will be none:
        without torchrun, or when torchrun starts the job again.
        """
        said = self._line(f"{explain(error, config)} (traceback: {log})")
        self._write(said, later=is_of_a_peer(error))
        if self._file is None or _restarts_left():
            print(said, file=self.console, flush=True)
        with contextlib.suppress(OSError):  # a full disk: what ended the rank is said already
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("a", errors="backslashreplace") as file:
                file.write("".join(traceback.format_exception(error)))

    def not_saved(self, why: str) -> None:
        """Say why this rank was stopped without saving; most often because another one failed."""
        said = self._line(why)
        self._write(said, later=True)
        print(said, file=sys.stderr, flush=True)

    def _line(self, said: str) -> str:
        """With rank and step, and with nothing in it that a console cannot print."""
        return f"{self._place()}: {said}".encode(errors="backslashreplace").decode()

    def _place(self) -> str:
        step = "before the first step" if self.step is None else f"step {self.step}"
        return f"rank {self.rank}, {step}"

    def _write(self, message: str, later: bool = False) -> None:
        """torchrun calls the failure with the earliest time the cause of all; in whole seconds."""
        if not self._file:
            return
        temporary = f"{self._file}.tmp"
        said: dict[str, Any] = {"message": message, "timestamp": int(time.time()) + later}
        try:
            Path(temporary).write_text(json.dumps(said))
            os.replace(temporary, self._file)
        except OSError:
            self._file = None  # a full disk, say: torchrun then knows the signal or the exit code


def explain(error: BaseException, config: Config) -> str:
    """The error in one line; for want of memory, with what to change."""
    text = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return f"{text} {memory_advice(config)}" if is_out_of_memory(error) else text


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device or the host had no memory left."""
    said = isinstance(error, RuntimeError) and any(
        reason in str(error) for reason in ("DefaultCPUAllocator", "out of memory")
    )
    return said or isinstance(error, (MemoryError, torch.OutOfMemoryError))


def memory_advice(config: Config) -> str:
    """The settings that lower the peak of memory, those that cost least first."""
    ways = []
    if config.train.loss_chunk > 1024:
        ways.append(f"train.loss_chunk=1024 (now {config.train.loss_chunk})")
    ring = config.train.attention == "ringfa3"
    if config.train.recompute == "none" and ring:
        ways.append("train.recompute=attention-saving")
    elif config.train.recompute != "full":
        ways.append("train.recompute=full")
    if ring:
        ways.append(f"more processes and parallel.cp={2 * config.parallel.cp}")
    ways.append(f"data.seq_len={config.data.seq_len // 2}")
    return "-- out of memory; in this order try: " + ", ".join(ways)


def is_of_a_peer(error: BaseException) -> bool:
    """Whether another rank's end could have caused this error."""
    text = str(error)
    lost = isinstance(error, RuntimeError) and ("gloo" in text.lower() or "NCCL" in text)
    return lost or isinstance(error, (dist.DistError, RingError, ConnectionError))


def to_log(log: Path) -> TextIO:
    """Send this process's stdout and stderr, other libraries' too, to the end of ``log``.

    Returns what was stderr.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    console = os.fdopen(os.dup(2), "w", errors="backslashreplace")
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    return console


def _restarts_left() -> bool:
    done = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    return done < int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
