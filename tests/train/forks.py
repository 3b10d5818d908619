"""The script of the trainer in processes that are forked from a server which has imported it.

A fresh interpreter spends most of a short run on imports. A fork runs the whole of
``train/pretrain.py`` as ``python train/pretrain.py`` does: with its arguments, environment, output,
signals and exit code. Runs that a fork starts, as torchrun and sweeps do, are forks of it. They
differ in two points: they see one core, and Hydra's mode is that of the flags alone.
"""

from __future__ import annotations

import functools
import gc
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler as torchrun
from hydra._internal.hydra import Hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode
from torch.distributed.run import main as run_torchrun

from tests.support.ranks import SERVER

ROOT = Path(__file__).absolute().parents[2]
SCRIPT = str(ROOT / "train" / "pretrain.py")
TORCHRUN = ("-m", "torch.distributed.run")  # a program of Python, as SCRIPT is
STREAMS = ("stdin", "stdout", "stderr")


class Fork:
    """A running ``train/pretrain.py``, with the interface of ``subprocess.Popen``.

    Args:
        arguments: of the script.
        environment: all of its variables; default those of this process.
        given: its standard input.
        launcher: arguments of torchrun, which starts the script; default without torchrun.
    """

    def __init__(
        self,
        arguments: list[str],
        environment: dict[str, str] | None = None,
        given: str = "",
        launcher: list[str] | None = None,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="fork-")
        for name in STREAMS:
            Path(self._folder.name, name).write_text(given if name == "stdin" else "")
        environment = dict(os.environ) if environment is None else environment
        self._process = SERVER.Process(
            target=_run, args=(arguments, environment, self._folder.name, launcher)
        )
        self._process.start()
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self) -> None:
        self._process.join()

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


def _run(
    arguments: list[str], environment: dict[str, str], folder: str, launcher: list[str] | None
) -> None:
    gc.freeze()  # the collector need not look at the imported modules
    for number, name in enumerate(STREAMS):
        opened = os.open(Path(folder, name), os.O_RDONLY if name == "stdin" else os.O_WRONLY)
        os.dup2(opened, number)
        os.close(opened)
    subprocess.Popen = torchrun.Popen = _Popen
    os.chdir(ROOT)
    command = [SCRIPT, *arguments]
    _run_python(command if launcher is None else [*TORCHRUN, *launcher, *command], environment)


def _run_python(command: list[str], environment: Mapping[str, str]) -> None:
    """Do what ``python COMMAND`` does for the script of the trainer, with torchrun or without."""
    os.environ.clear()
    os.environ.update(environment)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [folder for folder in given if folder]
    os.sched_getaffinity = lambda _: {0}  # two threads of a small run spin while they wait
    Hydra.get_mode = _mode
    if tuple(command[:2]) == TORCHRUN:
        run_torchrun(command[2:])
    else:
        sys.argv[:] = command
        runpy.run_path(SCRIPT, run_name="__main__")


def _mode(_: Hydra, config_name: str, overrides: list[str]) -> RunMode | None:
    """Hydra's own composes all settings once more. As there, None leaves the choice to the flags.

    It holds because ``configs/`` has no ``hydra.mode``.
    """
    return RunMode.MULTIRUN if "hydra.mode=MULTIRUN" in overrides else None


class _Popen(subprocess.Popen):
    """A process as always, but a run of the trainer is a fork of this process.

    ``Popen`` has set up the fork's streams, folder and session when it calls ``preexec_fn``, which
    runs the program and never returns to execute the interpreter.
    """

    def __init__(self, args: Any, **options: Any) -> None:
        if isinstance(args, list | tuple) and args[0] == sys.executable and SCRIPT in args:
            command = [part for part in args[1:] if part != "-u"]  # of torchrun
            environment = options.get("env") or dict(os.environ)
            options["preexec_fn"] = functools.partial(_become, command, environment)
            options["restore_signals"] = False  # an interpreter ignores SIGPIPE
            sys.stdout.flush()  # the fork would print what is in the buffer again
        super().__init__(args, **options)


def _become(command: list[str], environment: Mapping[str, str]) -> NoReturn:
    """Run a program in a fork of a process that runs another, and end with its exit code.

    A new interpreter has no handlers of its parent's signals, no files of it, and waits for its
    own threads.
    """
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # `Popen` waits until the fork has closed its pipe
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            interrupts = number == signal.SIGINT
            signal.signal(number, signal.default_int_handler if interrupts else signal.SIG_DFL)
    GlobalHydra.instance().clear()  # of a sweep
    code: object = 1
    try:
        _run_python(command, environment)
        code = 0
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    if not isinstance(code, int | None):
        print(code, file=sys.stderr)
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)
