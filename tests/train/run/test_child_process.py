"""If this fails, a sweep leaves processes behind, or hides why a job failed. A job as a child
process: the line that explains its failure, and a kill of all its processes."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

from tests.train.jobs import ROOT, is_alive
from train.run import child_process
from train.run.child_process import Stopped, failure_line, run_process


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("import os; os.kill(os.getpid(), 9)", "ended by SIGKILL (out of memory?)"),
        ("import os; os._exit(3)", "exit code 3"),
        ("raise MemoryError('none left')", "MemoryError: none left"),
        ("import sys; sys.exit('pretrain.py: a=1: no such key')", "a=1: no such key"),
        (
            "import sys; sys.exit('noise\\n  rank 1, step 3: Oops: x\\nnoise')",
            "rank 1, step 3: Oops: x",
        ),
        ("import sys; sys.exit('rank 0: Oops: x')", "rank 0: Oops: x"),
    ],
)
def test_a_failed_job_is_explained_in_one_line(code, says):
    assert failure_line(*run_process([sys.executable, "-c", code])) == says


# Started as torchrun starts its workers, each in a session of its own; the last of them loses its
# parent. All of them, and who starts them, take no notice of SIGTERM.
STUBBORN = """
import os, pathlib, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
folder, depth = pathlib.Path(sys.argv[1]), int(sys.argv[2])
if depth:
    again = [sys.executable, __file__, folder, str(depth - 1)]
    subprocess.Popen(again, start_new_session=True)
(folder / f"{depth}.tmp").write_text(str(os.getpid()))
(folder / f"{depth}.tmp").rename(folder / f"{depth}.pid")
while depth != 1 or not (folder / "0.pid").exists():
    time.sleep(0.01)
"""


def test_a_kill_ends_every_process_of_a_job(tmp_path, monkeypatch):
    """The job, its child, which has ended, and its grandchild; another process is not killed."""
    monkeypatch.setattr(child_process, "SECONDS_TO_STOP", 0.2)
    script = tmp_path / "stubborn.py"
    script.write_text(STUBBORN)
    files = [tmp_path / f"{depth}.pid" for depth in (2, 1, 0)]

    class Interrupted:
        """A stderr that raises ``Stopped``, as a signal would, when all processes exist."""

        def write(self, _: str) -> None:
            while not all(file.exists() for file in files) or is_alive(int(files[1].read_text())):
                time.sleep(0.01)
            raise Stopped(15)

    monkeypatch.setattr(child_process.sys, "stderr", Interrupted())
    command = [
        sys.executable,
        "-c",
        "import sys, runpy; print('go', file=sys.stderr, flush=True); "
        "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')",
    ]
    with pytest.raises(Stopped):
        run_process([*command, str(script), str(tmp_path), "2"])
    pids = [int(file.read_text()) for file in files]
    deadline = time.monotonic() + 10
    while any(is_alive(pid) for pid in pids):  # a killed process exists for another moment
        assert time.monotonic() < deadline, [is_alive(pid) for pid in pids]
        time.sleep(0.01)


CLOSED_TERMINAL = """
import signal, sys
from train.run.child_process import SIGNALS, Stopped, run_process
from train.tasks.sweep import _stop
for number in SIGNALS:
    signal.signal(number, _stop)
job = '''
import signal, sys, time
def save(*_):
    time.sleep(1)
    open(sys.argv[1], "w").close()
    sys.exit()
signal.signal(signal.SIGTERM, save)
print("runs", file=sys.stderr, flush=True)
time.sleep(60)
'''
try:
    run_process([sys.executable, "-c", job, sys.argv[1]])
except Stopped:
    print("stopped")
"""


def test_a_job_saves_although_a_closing_terminal_sends_sighup_twice(tmp_path):
    """From its shell, and from the kernel when the session leader ends."""
    saved = tmp_path / "saved"
    process = subprocess.Popen(
        [sys.executable, "-c", CLOSED_TERMINAL, str(saved)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr.readline() == "runs\n"
        process.send_signal(signal.SIGHUP)
        time.sleep(0.2)
        process.send_signal(signal.SIGHUP)
        out, _ = process.communicate(timeout=20)
    finally:
        process.kill()
    assert (process.returncode, out, saved.exists()) == (0, "stopped\n", True)
