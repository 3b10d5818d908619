"""The script of the trainer in processes that are forked from a server which has imported it.

A fresh interpreter spends most of a short run on imports. A fork runs the whole of
``train/pretrain.py`` as ``python train/pretrain.py`` does: with its arguments, environment, output,
signals and exit code.
"""

from __future__ import annotations

import gc
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support.ranks import SERVER

ROOT = Path(__file__).absolute().parents[2]
STREAMS = ("stdin", "stdout", "stderr")


class Fork:
    """A running ``train/pretrain.py``, with the interface of ``subprocess.Popen``.

    Args:
        arguments: of the script.
        environment: all of its variables; default those of this process.
        given: its standard input.
    """

    def __init__(
        self, arguments: list[str], environment: dict[str, str] | None = None, given: str = ""
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="fork-")
        for name in STREAMS:
            Path(self._folder.name, name).write_text(given if name == "stdin" else "")
        environment = dict(os.environ) if environment is None else environment
        self._process = SERVER.Process(
            target=_run, args=(arguments, environment, self._folder.name)
        )
        self._process.start()
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Standard output and error after the end; ``subprocess.TimeoutExpired`` without one."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("train/pretrain.py", timeout)
        out, err = (Path(self._folder.name, name).read_text() for name in STREAMS[1:])
        return out, err

    def send_signal(self, number: signal.Signals) -> None:
        if self._process.exitcode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


def _run(arguments: list[str], environment: dict[str, str], folder: str) -> None:
    gc.freeze()  # the collector need not look at the imported modules
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(ROOT)
    for number, name in enumerate(STREAMS):
        opened = os.open(Path(folder, name), os.O_RDONLY if name == "stdin" else os.O_WRONLY)
        os.dup2(opened, number)
        os.close(opened)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [folder for folder in given if folder]
    sys.argv[1:] = arguments
    runpy.run_path(str(ROOT / "train" / "pretrain.py"), run_name="__main__")
