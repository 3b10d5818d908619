"""Runs of the trainer, with torchrun and without, that tests watch, signal and kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path

from tests.support.ranks import free_port
from tests.train.forks import ROOT, SCRIPT, TORCHRUN, Fork

HANG_S = 300.0  # a job that takes longer hangs, even on a slow machine


class Job:
    """A running ``torchrun train/pretrain.py`` with its run folder. Use it in a ``with``.

    Its processes are forks, or new interpreters if ``fresh``, which jobs on GPUs need: the
    allocator's settings precede the import of PyTorch.
    """

    def __init__(
        self,
        folder: Path,
        processes: int,
        *arguments: str,
        launcher: tuple[str, ...] = ("--standalone",),
        environment: Mapping[str, str] | None = None,
        fresh: bool = False,
    ):
        self.folder = folder
        flags = [*launcher, "--nproc-per-node", str(processes)]
        command = [*arguments, f"run.dir={folder}"]
        given = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
        self.process: Fork | subprocess.Popen[str]
        if fresh:
            self.process = subprocess.Popen(
                [sys.executable, *TORCHRUN, *flags, SCRIPT, *command],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                cwd=ROOT,
                env=given,
                start_new_session=True,
            )
        else:
            self.process = Fork(command, given, launcher=flags)

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        """Kill all processes of the job."""
        for pid in [*self.pids(), self.process.pid]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait()

    def pids(self) -> list[int]:
        """Process of each rank of the latest attempt; empty before the first."""
        path = self.folder / "ranks.json"
        return [rank["pid"] for rank in json.loads(path.read_text())] if path.exists() else []

    def await_step(self, step: int) -> None:
        """Wait until ``step`` optimiser steps are recorded."""
        self.until(lambda: len(steps(self.folder)) >= step)

    def until(self, true: Callable[[], bool], limit: float = HANG_S) -> None:
        """Wait until ``true()``; fails after ``limit`` seconds, or if the job ends first."""
        deadline = time.monotonic() + limit
        while not true():
            assert time.monotonic() < deadline
            assert self.process.poll() is None, self.end()
            time.sleep(0.01)

    def end(self, limit: float = HANG_S) -> tuple[int, str]:
        """Wait at most ``limit`` seconds for the end; returns the exit code and the output."""
        output = self.process.communicate(timeout=limit)
        return self.process.returncode, "".join(text or "" for text in output)

    def finish(self) -> str:
        """Wait for a clean end and return the output: exit code 0, no abort, no process left."""
        code, output = self.end()
        assert code == 0, output
        assert "terminate called" not in output
        assert not any(is_alive(pid) for pid in self.pids())
        return output


def run_script(
    *arguments: str, given: str = "", launcher: list[str] | None = None
) -> subprocess.CompletedProcess[str]:
    """A finished run of ``train/pretrain.py``; ``given`` is its standard input, ``launcher`` the
    arguments of torchrun."""
    script = Fork([*arguments], given=given, launcher=launcher)
    try:
        output = script.communicate(HANG_S)
    finally:
        script.kill()
    return subprocess.CompletedProcess(arguments, script.returncode, *output)


def start_ranks(*commands: list[str]) -> list[Fork]:
    """One rank per command (the arguments of ``train/pretrain.py``), without torchrun.

    torchrun would end the survivors of a failure and hide their exit codes.
    """
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    return [
        Fork(
            command,
            {
                **os.environ,
                **place,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(len(commands)),
                "LOCAL_WORLD_SIZE": str(len(commands)),
            },
        )
        for rank, command in enumerate(commands)
    ]


def run_ranks(world: int, *arguments: str) -> str:
    """What ``world`` ranks print to stdout, without torchrun; each must exit with code 0."""
    ranks = start_ranks(*[[*arguments]] * world)
    try:
        printed = [rank.communicate(HANG_S) for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0] * world, printed
    finally:
        for rank in ranks:
            rank.kill()
    return "".join(out for out, _ in printed)


def one_line_of(rank: int, process: Fork, timeout: float) -> str:
    """The one line that a failed rank prints about itself; it must exit 1 within ``timeout``."""
    _, output = process.communicate(timeout=timeout)
    assert process.returncode == 1, output
    (line,) = [line for line in output.splitlines() if line.startswith(f"rank {rank}, ")]
    return line


def steps(folder: Path) -> list[tuple[int, float, float]]:
    """Step, loss and gradient norm of each complete line of a run's metrics."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        return []
    complete = [line for line in path.read_bytes().splitlines(keepends=True) if line[-1:] == b"\n"]
    records = [json.loads(line) for line in complete]
    return [(record["step"], record["loss"], record["grad_norm"]) for record in records]


def events(folder: Path) -> list[str]:
    """The events of a run, in order."""
    return [json.loads(line)["event"] for line in (folder / "events.jsonl").open()]


def event_times(folder: Path) -> list[float]:
    """The times of the events, in whole seconds since the epoch."""
    output = [json.loads(line)["time"] for line in (folder / "events.jsonl").open()]
    return [datetime.fromisoformat(time).timestamp() for time in output]


def is_alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False
