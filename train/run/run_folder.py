"""The folder of a run: its files, and whether a config may continue or replace the run in it."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

from filelock import FileLock, Timeout

from train.config import Config, ConfigError, from_plain
from train.keys import flatten, shown
from train.paths import expand, make_folder, require_removal, unusable
from train.text.files import JOB

LOCK_S = 5.0  # processes of torchrun's previous attempt may still hold the lock

# Keys that may differ when a run continues. The others determine its result. A value of these that
# changes the batch or the next learning rate is refused by train.run.recipe_change.
MAY_CHANGE = (
    *("mode", "parallel.", "engine.", "memory.", "run.", "checkpoint.", "guard."),
    *("data.cache_dir", "data.verify", "data.tokens_per_rank", "train.steps"),
    *("train.global_batch_size", "train.gradient_accumulation_steps"),
    *("train.batch_tokens", "train.deterministic", "train.compile", "model.inherit"),
    *("optim.schedule_steps", "optim.decay_steps"),
    *("train.eval_every", "train.eval_bytes", "train.final_eval_bytes", "train.max_wall_time"),
    "train.speed_test",
    *("train.final_eval_last", "train.final_eval_len", "rope."),
    *("hardware.", "log.", "profile.", "sweep.", "generate.", "eval.", "verify.", "estimate."),
    *("export.", "needle."),
)
# Names in checkpoints/: a checkpoint, a damaged one, one that is being written or removed.
CHECKPOINT = re.compile(r"step-\d+|damaged-step-\d+-\d+|\.(old-)?step-\d+")


class RunFolder:
    """The paths of a run.

    config.json       the config of the latest start; tokenizer.json the tokenizer
    chat_template.jinja  the template of the run's conversations, if it has any
    metrics.jsonl     a line per optimiser step; eval.jsonl a line per validation
    events.jsonl      starts, skipped steps, failed checkpoints, stops
    summary.json      written when the run is complete
    ranks.json        host and process of each rank
    checkpoints/  tensorboard/  logs/  profile/  and plots
    origin/           settings of the Hugging Face folder that the weights came from
    eval-*.json       results of mode=eval; needle.json those of mode=needle
    wandb-id.txt      the run at Weights & Biases
    estimate.json     the prediction of mode=estimate
    speed.json        the result of train.speed_test; speed.png its plot
    .job              the job that prepared the folder last
    """

    FILES = (
        *("config.json", "metrics.jsonl", "eval.jsonl", "events.jsonl", "summary.json"),
        *("ranks.json", "tokenizer.json", "wandb-id.txt", "loss.png", "loss_by_position.png"),
        *("speed.json", "speed.png", "estimate.json", "chat_template.jinja"),
    )
    FOLDERS = ("checkpoints", "tensorboard", "logs", "profile", "origin")
    MEASURED = ("eval-*.json", "eval-*.png", "needle.*", "rope.*")

    def __init__(self, config: Config) -> None:
        self.path = expand("run.dir", config.run.dir).absolute()
        self.checkpoints = self.path / "checkpoints"
        self.config, self.metrics, self.evaluations, self.events, self.summary, self.ranks = (
            self.path / name for name in self.FILES[:6]
        )
        self.tokenizer, self.wandb_id = (self.path / name for name in self.FILES[6:8])
        self.speed = self.path / "speed.json"
        self.chat_template = self.path / self.FILES[-1]
        self.profile = self.path / "profile"
        self.origin = self.path / "origin"
        self.tensorboard = self.path / "tensorboard"
        self._job = self.path / JOB

    def log(self, rank: int) -> Path:
        """The output of a rank other than 0, and the last traceback of any rank."""
        return self.path / "logs" / f"rank{rank}.log"

    def job(self) -> str | None:
        """The job that ``set_job`` recorded; None if there is none."""
        return self._job.read_text() if self._job.exists() else None

    def set_job(self, job: str) -> None:
        """Record that the job has prepared this folder."""
        self.make()
        write_atomically(self._job, job)

    def holds_run(self) -> bool:
        """Whether the folder contains a run: its metrics, or a checkpoint, intact or damaged."""
        return self.metrics.exists() or any(
            CHECKPOINT.fullmatch(path.name) and not path.name.startswith(".")
            for path in self.checkpoints.glob("*")
        )

    def require_fit(self, config: Config) -> None:
        """Raise ``ConfigError`` unless a run of ``config`` may start or continue in this folder."""
        place = f"run.dir={config.run.dir}"
        if self.path.exists() and not self.path.is_dir():
            raise ConfigError(f"{place} exists and is not a folder")
        names = {path.name for path in self.path.glob("*") if not path.name.startswith(".")}
        foreign = sorted(names.difference(self.FILES, self.FOLDERS))
        if foreign and not {"config.json", "metrics.jsonl"} & names:
            raise ConfigError(
                f"{place} contains other files ({foreign[0]}, ...) and no run; "
                f"choose an empty or a new folder"
            )
        if config.run.overwrite or not self.holds_run():
            return
        ways = "choose another run.dir, or replace that run with run.overwrite=true"
        if not self.config.exists():
            raise ConfigError(f"{place} contains a run without its settings, config.json; {ways}")
        if config.checkpoint.resume == "never":
            raise ConfigError(f"{place} already contains a run and checkpoint.resume=never; {ways}")
        if difference := self.difference(config):
            key, change = difference
            raise ConfigError(
                f"{place} contains a run with different settings: {change}; give the same settings "
                f"to continue it, {self._way_to_change(key)}or {ways}"
            )
        if config.train.steps <= (steps := self.complete_after()):
            raise ConfigError(
                f"{place} contains this run, complete after {steps} steps; raise train.steps to "
                f"continue it, or {ways}"
            )

    def _way_to_change(self, key: str) -> str:
        """How the run can go on with another value of ``key``; empty if it cannot."""
        anew = f"start a new run from it in another run.dir with checkpoint.resume={self.path}"
        if key.startswith("data.") or key == "train.seed":
            return f"{anew} checkpoint.reset_data=true, "
        if key.startswith("model.rope."):
            return f"{anew}, "
        if key.startswith(("optim.", "train.")):
            return f"accept the change with checkpoint.accept_changes=[{key}], {anew}, "
        return ""

    def complete_after(self) -> int:
        """Steps of the complete run in this folder; 0 without one or with a damaged summary."""
        try:
            return int(json.loads(self.summary.read_text())["steps"])
        except (OSError, ValueError, KeyError, TypeError):
            return 0

    def is_replaced_by(self, config: Config) -> bool:
        """Whether ``run.overwrite`` replaces the run in this folder: a complete or another run.

        A stopped run with the same config continues, unless ``checkpoint.resume=never``.
        """
        if not config.run.overwrite or not self.holds_run():
            return False
        try:
            same = self.difference(config) is None
        except ConfigError:
            same = False
        complete = config.train.steps <= self.complete_after()
        return not same or complete or config.checkpoint.resume == "never"

    def make(self) -> None:
        """Create the folder if there is none; ``ConfigError`` if that is impossible."""
        make_folder("run.dir", self.path)

    def record_start(self, config: str, tokenizer: str, chat_template: str | None) -> None:
        """Write what a start is made with: its config and tokenizer, JSON, and its template."""
        write_atomically(self.config, config + "\n")
        write_atomically(self.tokenizer, tokenizer)
        if chat_template is not None:
            write_atomically(self.chat_template, chat_template)

    def lock(self) -> FileLock:
        """Lock this folder until the process ends; ``ConfigError`` if another job holds it."""
        self.make()
        lock = FileLock(self.path / ".lock", timeout=LOCK_S)
        try:
            lock.acquire()
        except Timeout:
            process = ""  # a job that starts writes ranks.json only later
            if self.ranks.exists():
                first = json.loads(self.ranks.read_text())[0]
                process = f": process {first['pid']} on {first['host']}"
            raise ConfigError(
                f"run.dir={self.path} is in use by another job{process}; wait for it, stop it, or "
                f"choose another run.dir"
            ) from None
        except OSError as error:
            raise unusable("run.dir", self.path, "locked", error) from None
        return lock

    def difference(self, config: Config) -> tuple[str, str] | None:
        """The first key that must not change and differs, and a clause with both values.

        ``checkpoint.accept_changes`` names keys that may.
        """
        changes = changed_settings(read_config(self.config), config).items()
        accepted = config.checkpoint.accept_changes
        return next((change for change in changes if change[0] not in accepted), None)

    def clear(self) -> None:
        """Remove the files of a run and no others; ``ConfigError`` if one cannot be removed.

        The settings go first and the metrics last: what a kill leaves is a run without settings,
        which no start continues.
        """
        for name in (name for name in self.FILES if name != self.metrics.name):
            require_removal(self.path / name)
        for path in (path for pattern in self.MEASURED for path in self.path.glob(pattern)):
            require_removal(path)
        self._clear_checkpoints()
        # Other ranks have opened their logs.
        for name in set(self.FOLDERS) - {"logs", "checkpoints"}:
            require_removal(self.path / name)
        require_removal(self.metrics)

    def _clear_checkpoints(self) -> None:
        """Remove the checkpoints, also where ``checkpoints`` is a mount or a link to another disk.

        Such a link stays. A link into the folder of another run goes, and that run's checkpoints
        stay.
        """
        folder = self.checkpoints
        if folder.is_symlink() and (not folder.is_dir() or _is_run(folder.resolve().parent)):
            require_removal(folder)
            return
        for path in folder.glob("*"):
            if CHECKPOINT.fullmatch(path.name):
                require_removal(path)


def _is_run(folder: Path) -> bool:
    return (folder / "config.json").exists() or (folder / "metrics.jsonl").exists()


def read_config(path: Path) -> Config:
    """Read the ``config.json`` of a run; ``ConfigError`` if it is missing or unreadable."""
    try:
        return from_plain(json.loads(path.read_text()))
    except (FileNotFoundError, NotADirectoryError):
        folders = [run.parent.name for run in path.parent.parent.glob(f"*/{path.name}")]
        there = f"; other runs there: {', '.join(sorted(folders)[:8])}" if folders else ""
        raise ConfigError(
            f"run.dir={path.parent} contains no run ({path.name} is missing): "
            f"give the folder of one{there}"
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path}, the settings of a run, cannot be read: {error}; restore the file, or choose "
            f"another run.dir"
        ) from None


def write_atomically(path: Path, text: str) -> None:
    """Write a file in UTF-8 atomically: if the disk is full or the process is killed, the old file
    stays."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def changed_settings(there: Config, here: Config) -> dict[str, str]:
    """The keys that determine a run's result and differ, each with a clause with both values."""
    before, now = (flatten(dataclasses.asdict(config)) for config in (there, here))
    return {
        key: f"{key} was {shown(before.get(key))}, is now {shown(now.get(key))}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key) and not may_change(key)
    }


def may_change(key: str) -> bool:
    """Whether a run may continue with another value of a dotted key."""
    return any(key.startswith(free) if free.endswith(".") else key == free for free in MAY_CHANGE)
