"""A child process: run it, stop it, and kill it together with every process that it started."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections import deque
from pathlib import Path

# A signal that the sweep receives -> the signal that its job gets, which then saves and ends.
SIGNALS = {
    signal.SIGINT: signal.SIGINT,
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGHUP: signal.SIGTERM,
    signal.SIGUSR1: signal.SIGTERM,
    signal.SIGUSR2: signal.SIGTERM,
}
SECONDS_TO_STOP = 60.0  # for a job to save and end after a signal
SECONDS_TO_DIE = 10.0
JOB_VARIABLE = "RINGFA3_JOB"  # the environment variable that identifies the processes of a job


class Stopped(KeyboardInterrupt):
    """A signal asks for the end of a job and of the sweep."""

    def __init__(self, signum: int) -> None:
        self.signum = signum


def run_process(command: list[str]) -> tuple[int, list[str]]:
    """Run a job to its end; returns its exit code and the last lines of its stderr.

    The job has its own session, so that a signal of the terminal reaches it only once, through
    ``Stopped``. After the signal it has ``SECONDS_TO_STOP`` to end. Then, or at a second
    ``Stopped``, it is killed with every process that it started, in any session (each worker of
    torchrun has its own).
    """
    stderr: deque[str] = deque(maxlen=200)
    variable = f"{JOB_VARIABLE}={uuid.uuid4().hex}"
    process = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
        env=os.environ | dict([variable.split("=")]),
    )
    assert process.stderr is not None
    ended = False
    try:
        for line in process.stderr:
            _copy(line)
            stderr.append(line)
        code, ended = process.wait(), True
        return code, list(stderr)
    except Stopped as stopped:
        process.send_signal(SIGNALS[signal.Signals(stopped.signum)])
        with contextlib.suppress(subprocess.TimeoutExpired):
            _copy(process.communicate(timeout=SECONDS_TO_STOP)[1])
            ended = True
        raise
    finally:
        if not ended:
            process.kill()
            kill_job(variable)
            process.wait()


def _copy(text: str) -> None:
    """To our stderr, unless its terminal has closed."""
    with contextlib.suppress(OSError):
        sys.stderr.write(text)


def kill_job(variable: str) -> None:
    """Kill every process with ``variable`` (NAME=VALUE) in its environment, orphans too.

    A process may start another one before it dies, so this repeats until none is left. It gives up
    after ``SECONDS_TO_DIE``: a process inside the kernel, for example on a disk that does not
    answer, cannot be killed.
    """
    deadline = time.monotonic() + SECONDS_TO_DIE
    while alive := [pid for pid in _processes() if _has(pid, variable)]:
        for pid in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            return
        time.sleep(0.02)


def _processes() -> list[int]:
    return [int(path.name) for path in Path("/proc").glob("[0-9]*")]


def _has(pid: int, variable: str) -> bool:
    """Whether a process has ``variable`` in its environment; False for one that has ended."""
    try:
        return variable.encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


def failure_line(code: int, stderr: list[str]) -> str:
    """Why a job failed, in one line: its own message, or else its signal or exit code."""
    lines = [line.strip() for line in stderr if line.strip()]
    for line in reversed(lines):
        if message := re.search(r"\brank \d+(,[^:]*)?: .+|(?<=^pretrain\.py: ).+", line):
            return message[0]
    if code < 0:
        return f"ended by {signal.Signals(-code).name}" + (
            " (out of memory?)" if code == -signal.SIGKILL else ""
        )
    return lines[-1] if lines else f"exit code {code}"
