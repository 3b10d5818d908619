"""If this fails, a stopped job does not end, or ends with a wrong exit code. The stopper, in
separate processes: it always ends them, with the right exit code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.train.jobs import ROOT

SCRIPT = """
import sys, threading, time
from train.run.update_lock import UpdateLock
from train.run.stopper import Run, Stopper

def save():
    print("saves", flush=True)
    if "save fails" in sys.argv:
        raise OSError("disk is full")
    return "saved"

def say(text):
    if "say fails" in sys.argv:
        raise SystemExit(1)  # what a library does when its reader is gone
    print(text, flush=True)

stopper, updates = Stopper(), UpdateLock()
print("taken", flush=True)
if "slow start" in sys.argv:
    time.sleep(1.5)
if "never armed" not in sys.argv:
    late = time.monotonic() + 0.5 if "deadline" in sys.argv else None
    fail = lambda why: print("failed:", why, flush=True)
    limit = 0.3 if "impatient" in sys.argv else 12.0
    stopper.arm(Run(0, 1, None, updates, save, say, fail, lambda: print("closed"), limit, late))
for _ in range(3000):
    with updates.update():
        time.sleep(1.5 if "slow update" in sys.argv else 0.01)
"""

IGNORE = """
for number in (signal.SIGHUP, signal.SIGUSR1):
    signal.signal(number, signal.SIG_IGN)
"""


def ended(signum: int | None, *how: str) -> tuple[int, list[str]]:
    """Exit code and output lines of a process that gets ``signum`` when its stopper runs."""
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, *how], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout.readline() == "taken\n"
        if signum is not None:
            if "slow start" not in how:
                time.sleep(0.3)
            process.send_signal(signum)
        lines, _ = process.communicate(timeout=20)
        return process.returncode, lines.splitlines()
    finally:
        process.kill()


@pytest.mark.parametrize(
    ("signum", "how", "code", "lines"),
    [
        (signal.SIGTERM, [], 0, ["saves", "SIGTERM: saved", "closed"]),
        (signal.SIGINT, [], 130, ["saves", "Ctrl-C: saved", "closed"]),
        *(
            (number, [], 0, ["saves", f"{number.name}: saved", "closed"])
            for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
        ),
        (signal.SIGUSR1, ["slow start"], 0, ["saves", "SIGUSR1: saved", "closed"]),
        (None, ["deadline"], 0, ["saves", "train.max_wall_time has passed: saved", "closed"]),
        (signal.SIGTERM, ["slow start"], 0, ["saves", "SIGTERM: saved", "closed"]),
        (signal.SIGTERM, ["say fails"], 0, ["saves"]),
        (
            *(signal.SIGTERM, ["save fails"], 1),
            ["saves", "failed: SIGTERM, but nothing was saved: disk is full"],
        ),
        (signal.SIGINT, ["never armed"], 130, []),
        (signal.SIGTERM, ["slow update"], 0, ["saves", "SIGTERM: saved", "closed"]),
        (
            *(signal.SIGTERM, ["slow update", "impatient"], 1),
            [
                "failed: SIGTERM, but nothing was saved: the optimiser update did not finish "
                "within checkpoint.stop_s=0.3; if no rank has failed, raise it, and torchrun's "
                "--shutdown-timeout"
            ],
        ),
    ],
)
def test_ends(signum, how, code, lines):
    assert ended(signum, *how) == (code, lines)


def test_a_signal_that_is_ignored_at_the_start_stays_ignored():
    """As SIGHUP under nohup: the run goes on, and SIGTERM still stops it."""
    process = subprocess.Popen(
        [sys.executable, "-c", f"import signal\n{IGNORE}{SCRIPT}"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout.readline() == "taken\n"
        for number in (signal.SIGHUP, signal.SIGUSR1):
            process.send_signal(number)
        time.sleep(0.6)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        lines, _ = process.communicate(timeout=20)
        assert (process.returncode, lines) == (0, "saves\nSIGTERM: saved\nclosed\n")
    finally:
        process.kill()


def test_no_thread_is_older_than_the_stopper():
    """An older thread does not block the signals. One that it gets ends the run without saving."""
    count = (
        "import os, runpy; runpy.run_path('train/pretrain.py')\n"
        "print(len(os.listdir('/proc/self/task')))"
    )
    threads = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")  # 1 would hide the threads of a library
    env = {key: value for key, value in os.environ.items() if key not in threads}
    command = [sys.executable, "-c", count]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    assert int(done.stdout) == 1
