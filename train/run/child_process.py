"""A process that runs a job: started, told to stop, ended with all that it has started itself."""

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

# What a signal of the sweep becomes for its job, which saves and ends on these two.
SIGNALS = {
    signal.SIGINT: signal.SIGINT,
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGHUP: signal.SIGTERM,
}
SECONDS_TO_STOP = 60.0  # that a job has to save and end after a signal
SECONDS_TO_DIE = 10.0
MARK = "RINGFA3_JOB"  # the variable by which a process is known to be of a job


class Stopped(KeyboardInterrupt):
    """A signal that asks for the end of a job and of what comes after it."""

    def __init__(self, signum: int) -> None:
        self.signum = signum


def run_process(command: list[str]) -> tuple[int, list[str]]:
    """Run a job to its end: its exit code and the last lines of its stderr.

    It is in a session of its own, so that a signal of the terminal reaches it once, through
    ``Stopped``: it gets the signal and ``SECONDS_TO_STOP``. Then, or at a second signal, it is
    killed, and with it every process that it has started: torchrun puts each of its workers in
    another session.
    """
    said: deque[str] = deque(maxlen=200)
    mark = f"{MARK}={uuid.uuid4().hex}"
    process = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
        env=os.environ | dict([mark.split("=")]),
    )
    assert process.stderr is not None
    ended = False
    try:
        for line in process.stderr:
            sys.stderr.write(line)
            said.append(line)
        code, ended = process.wait(), True
        return code, list(said)
    except Stopped as stopped:
        process.send_signal(SIGNALS[signal.Signals(stopped.signum)])
        with contextlib.suppress(subprocess.TimeoutExpired):
            sys.stderr.write(process.communicate(timeout=SECONDS_TO_STOP)[1])
            ended = True
        raise
    finally:
        if not ended:
            process.kill()
            kill_marked(mark)
            process.wait()


def kill_marked(mark: str) -> None:
    """Kill every process of this user's that has ``mark`` in its environment.

    Parents do not matter: one that has lost its own is found too. A process may start another
    while it is being killed, so this looks until there is none; one that the kernel holds on to,
    over a disk that does not answer for example, is waited for ``SECONDS_TO_DIE``.
    """
    deadline = time.monotonic() + SECONDS_TO_DIE
    while found := [pid for pid in _processes() if _has(pid, mark)]:
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            return
        time.sleep(0.02)


def _processes() -> list[int]:
    return [int(path.name) for path in Path("/proc").glob("[0-9]*")]


def _has(pid: int, mark: str) -> bool:
    """False for a process that has ended, of which no environment is left."""
    try:
        return mark.encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


def last_words(code: int, said: list[str]) -> str:
    """Why a job has failed, in one line: what it said of itself, else how it ended."""
    lines = [line.strip() for line in said if line.strip()]
    for line in reversed(lines):
        if spoken := re.search(r"\brank \d+(,[^:]*)?: .+|(?<=^pretrain\.py: ).+", line):
            return spoken[0]
    if code < 0:
        return f"ended by {signal.Signals(-code).name}" + (
            " (out of memory?)" if code == -signal.SIGKILL else ""
        )
    return lines[-1] if lines else f"exit code {code}"
