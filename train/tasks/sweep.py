"""A sweep (``-m``): one run per combination of config values, each in its own process.

Hydra composes the configs, and its sweeper chooses the combinations. The sweep checks all jobs of a
batch before the first one starts, then runs them one after the other below ``sweep.dir``. A failed
job ends only its own process. Finished jobs are not repeated: the same command continues an
interrupted sweep.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from omegaconf import DictConfig, open_dict, read_write
from rich.table import Table

from train.checks.config import check
from train.config import Config, ConfigError
from train.console import LineConsole
from train.log.units import bits
from train.paths import expand, make_folder
from train.run.child_process import SIGNALS, Stopped, failure_line, run_process
from train.run.inherit import resolve_inherited
from train.run.run_folder import RunFolder
from train.run.stopper import MAY_BE_IGNORED, signals_to_take

SCRIPT = Path(__file__).parents[1] / "pretrain.py"
LONGEST_NAME = 120  # characters of a job's folder name; file systems allow 255 bytes


@dataclass
class Job:
    """A run of ``steps`` steps in a sweep; ``choices`` are the overrides that the sweep varies."""

    choices: dict[str, str]
    folder: Path
    command: list[str]
    steps: int
    status: str = "waiting"  # then finished, failed or stopped
    nats_per_byte: float | None = None
    loss: float | None = None  # in nats per token
    train_seconds: float | None = None
    error: str | None = None

    def take_result(self) -> bool:
        """Read the summary of the finished run; False if the run is not finished."""
        summary = read_summary(self.folder)
        if summary.get("steps") != self.steps:
            return False
        self.nats_per_byte, self.loss = summary["nats_per_byte"], summary.get("loss")
        self.train_seconds = summary["train_seconds"]
        self.status, self.error = "finished", None
        return True

    def row(self) -> dict[str, Any]:
        """The entry of this job in ``sweep.json``."""
        entries = {name: getattr(self, name) for name in ("choices", "status", "nats_per_byte")}
        entries |= {"train_seconds": self.train_seconds, "error": self.error}
        return entries | {"folder": self.folder.name}


class Sweep:
    """The jobs of one sweep, batch by batch; ``arguments`` are passed to every job."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self.arguments = list(arguments)
        self.console = LineConsole()
        self.jobs: list[Job] = []
        self.folder: Path | None = None

    def launch(self, configs: list[Config], choices: list[dict[str, str]]) -> list[Job]:
        """Check every job of a batch, then run those that are not finished.

        ``choices`` are the overrides that vary, for each job. Raises ``ConfigError`` before any job
        starts and before any file is written.
        """
        batch = [self._plan(*pair) for pair in zip(configs, choices, strict=True)]
        if any(config.mode == "check" for config in configs):
            self.console.print(f"{len(batch)} jobs: the settings are valid. Nothing was started.")
            return batch
        self.jobs += batch
        for number, job in enumerate(batch):
            repeated = any(other.folder == job.folder for other in batch[:number])
            if job.status == "finished" or (repeated and job.take_result()):
                self.console.print(f"finished before: {job.folder.name}")
            else:
                self._run(job)
            self._record()
        return batch

    def _plan(self, config: Config, choices: dict[str, str]) -> Job:
        if config.mode not in ("train", "check"):
            raise ConfigError(f"mode={config.mode}: a sweep trains; leave -m out")
        own = [f"{key}={value}" for key, value in choices.items()]
        self.folder = self.folder or expand("sweep.dir", config.sweep.dir).absolute()
        folder = self.folder / folder_name(own)
        config.run.dir = str(folder)
        finished = self._is_finished(folder, config)
        if not finished:
            world = config.sweep.nproc_per_node or 1
            check(config.on(world), world)
            # Imports torch, which takes seconds: an invalid sweep ends without it.
            from train.engine.parallel import choose_device

            choose_device(config)
        command = [sys.executable, str(SCRIPT), *self.arguments, *own]
        if config.sweep.nproc_per_node is not None:
            launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
            command[1:1] = [*launcher, str(config.sweep.nproc_per_node)]
        overwrite = str(config.run.overwrite).lower()
        command += [f"run.dir={quoted(str(folder))}", f"run.overwrite={overwrite}"]
        job = Job(choices, folder, command, config.train.steps)
        if finished:
            job.take_result()
        return job

    def _is_finished(self, folder: Path, config: Config) -> bool:
        """Whether ``folder`` contains the finished run of ``config``.

        An unfinished run continues: this sets its ``run.overwrite`` to false. Raises
        ``ConfigError`` for another run, unless ``run.overwrite`` allows the sweep to replace it.
        """
        there = RunFolder(config)
        if not there.holds_run() or not there.config.exists():  # `check` refuses the second
            return False
        steps = there.complete_after()
        difference = there.difference(config)
        if difference is None and steps > config.train.steps:
            difference = "train.steps", f"train.steps was {steps}, is now {config.train.steps}"
        if difference is None:
            config.run.overwrite = False
            return steps == config.train.steps
        if config.run.overwrite:
            return False
        raise ConfigError(
            f"sweep.dir={config.sweep.dir}: {folder.name} contains a run with different settings: "
            f"{difference[1]}; choose another sweep.dir or replace such runs with "
            f"run.overwrite=true"
        )

    def _run(self, job: Job) -> None:
        number = f"job {len([j for j in self.jobs if j.status != 'waiting']) + 1}"
        named = " ".join(f"{key}={value}" for key, value in job.choices.items())
        self.console.print(f"{number} of {len(self.jobs)}: {named}")
        begin = time.perf_counter()
        try:
            code, stderr = run_process(job.command)
        except Stopped:
            job.status = "stopped"
            self._record()
            raise
        if code == 0 and job.take_result():
            return
        job.status = "failed" if code else "stopped"
        job.error = (
            failure_line(code, stderr) if code else "not complete; the same sweep continues it"
        )
        seconds = time.perf_counter() - begin
        self.console.print(f"{job.status} after {seconds:.0f} s: {job.error}")

    def sorted_jobs(self) -> list[Job]:
        """Finished jobs, best first, then the others in the order of the sweep."""

        def rank(job: Job) -> float:
            result = job.nats_per_byte
            return math.inf if result is None or math.isnan(result) else result

        return sorted(self.jobs, key=rank)

    def _record(self) -> None:
        assert self.folder is not None  # set by the first _plan
        make_folder("sweep.dir", self.folder)
        written = self.folder / "sweep.json.tmp"
        rows = [job.row() for job in self.sorted_jobs()]
        written.write_text(json.dumps(rows, indent=1) + "\n")
        written.replace(self.folder / "sweep.json")

    def finish(self) -> bool:
        """Print the table and draw the plot; returns whether every job has finished."""
        if self.folder is None or not self.jobs:
            return True
        self._record()
        keys = list(dict.fromkeys(key for job in self.jobs for key in job.choices))
        table = Table()
        for key in keys:
            alone = [other.rpartition(".")[2] for other in keys].count(key.rpartition(".")[2]) == 1
            table.add_column(key.rpartition(".")[2] if alone else key, overflow="fold")
        for name in ("nats per token", "bits per byte", "train s"):
            table.add_column(name, min_width=max(map(len, name.split())))
        table.add_column("status")
        for job in self.sorted_jobs():
            loss = "" if job.loss is None else f"{job.loss:.4f}"
            per_byte = "" if job.nats_per_byte is None else f"{bits(job.nats_per_byte):.4f}"
            seconds = "" if job.train_seconds is None else f"{job.train_seconds:.0f}"
            status = f"{job.status}: {job.error}" if job.error else job.status
            table.add_row(
                *(job.choices.get(key, "") for key in keys), loss, per_byte, seconds, status
            )
        self.console.print(table)
        from train.log.plots import draw, plot_sweep

        folder, rows = self.folder, [job.row() for job in self.sorted_jobs()]
        draw(lambda: plot_sweep(folder, rows), self.console)
        self.console.print(f"everything is in {self.folder}")
        return all(job.status == "finished" for job in self.jobs)


class ProcessLauncher(Launcher):
    """The launcher that runs the job batches of a Hydra sweeper and returns their results."""

    def __init__(self, sweep: Sweep) -> None:
        self._sweep = sweep

    def setup(self, *, hydra_context: Any, config: DictConfig, **_: Any) -> None:
        """Store what is needed to compose the config of a job."""
        self._loader, self._config = hydra_context.config_loader, config

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> list[JobReturn]:
        """Run a batch. The result of a job is its nats per byte, NaN if it failed."""
        typed = OverridesParser.create().parse_overrides(list(self._config.hydra.overrides.task))
        fixed = {o.get_key_element(): not o.is_sweep_override() for o in typed}  # the last counts
        pairs = [dict(override.split("=", 1) for override in job) for job in job_overrides]
        choices = [{k.lstrip("+"): job[k] for k in job if not fixed.get(k)} for job in pairs]
        compose = self._loader.load_sweep_config
        composed = [compose(self._config, list(job)) for job in job_overrides]
        jobs = self._sweep.launch([_without_hydra(config) for config in composed], choices)
        return [_returned(*pair) for pair in zip(jobs, composed, strict=True)]


def _returned(job: Job, config: DictConfig) -> JobReturn:
    returned = JobReturn(overrides=list(job.choices), cfg=config, status=JobStatus.COMPLETED)
    returned.return_value = math.nan if job.nats_per_byte is None else job.nats_per_byte
    return returned


def _without_hydra(composed: DictConfig) -> Config:
    task = copy.deepcopy(composed)
    with read_write(task), open_dict(task):
        del task["hydra"]
    return resolve_inherited(task)


def run_sweep(compose: Callable[[list[str]], None], flags: list[str], overrides: list[str]) -> int:
    """Run the sweep of the command line through ``compose``; returns the exit code.

    0 if every job has finished, 1 if one has failed, 130 if a signal has stopped the sweep.
    ``ConfigError`` and Hydra's errors pass through.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 or "TORCHELASTIC_RUN_ID" in os.environ:
        raise ConfigError(
            "-m under torchrun: sweep outside, torchrun inside: start python train/pretrain.py -m "
            "... without torchrun; sweep.nproc_per_node=N gives every job its own torchrun"
        )
    typed = OverridesParser.create().parse_overrides(overrides)
    keys = {override.key_or_group for override in typed}
    if "hydra/launcher" in keys:
        raise ConfigError("hydra/launcher: a sweep starts its jobs itself; leave it out")
    if "run.dir" in keys:
        raise ConfigError(
            "run.dir: each job of a sweep gets a folder of its own; choose the folder around them "
            "with sweep.dir"
        )
    shared = [
        override.input_line
        for override in typed
        if not override.is_sweep_override()
        and (not override.is_hydra_override() or override.key_or_group == "hydra.searchpath")
    ]
    for signum in signals_to_take(SIGNALS):
        signal.signal(signum, _stop)
    sweep = Sweep([*flags, *shared])

    def make_launcher(**context: Any) -> Launcher:
        launcher = ProcessLauncher(sweep)
        launcher.setup(**context)
        return launcher

    # Hydra looks up launchers by name among installed packages. Ours is not installed.
    Plugins.instance().instantiate_launcher = make_launcher
    with tempfile.TemporaryDirectory() as scratch:
        try:
            compose([*flags, "--multirun", *overrides, f"hydra.sweep.dir={quoted(scratch)}"])
        except Stopped:
            sweep.finish()
            return 130
        finally:
            _move_sweeper_files(Path(scratch), sweep.folder)
    return 0 if sweep.finish() else 1


def _stop(signum: int, _frame: object) -> NoReturn:
    """Stops the sweep. A terminal that closes sends SIGHUP twice, so only SIGINT or SIGTERM may be
    the second signal, which kills the job before it has saved."""
    for number in MAY_BE_IGNORED:
        signal.signal(number, signal.SIG_IGN)
    raise Stopped(signum)


def _move_sweeper_files(scratch: Path, folder: Path | None) -> None:
    """Move files of the sweeper (for example its results) next to ``sweep.json``."""
    for path in scratch.iterdir():
        if folder is not None and folder.is_dir() and path.is_file():
            shutil.move(path, folder / path.name)


def read_summary(folder: Path) -> dict[str, Any]:
    """The ``summary.json`` of a run; empty if it is missing or incomplete after a kill."""
    try:
        summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    except (OSError, ValueError):
        return {}
    return summary


def folder_name(choices: list[str]) -> str:
    """The folder name of a job: its overrides, plus a hash if a file name cannot hold them."""
    whole = ",".join(choices) or "run"
    name = re.sub(r"[^\w.,=+-]", "_", whole)[:LONGEST_NAME]
    if name == whole:
        return name
    return f"{name}-{hashlib.sha256(whole.encode()).hexdigest()[:8]}"


def quoted(value: str) -> str:
    """``value`` as a quoted string of Hydra's override grammar.

    In that grammar a backslash is an escape only before a quote.
    """
    inside = re.sub(r"(\\*)'", r"\1\1\'", value)
    trailing = inside[len(inside.rstrip("\\")) :]
    return f"'{inside}{trailing}'"
