"""The folder of a run: what is in it, and whether the run in it is the one that is asked for."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

from train.config import Config, ConfigError

# Settings that a run may change when it goes on. The others decide what it computes.
FREE = (
    *("mode", "parallel.", "run.", "checkpoint.", "guard.", "data.cache_dir", "data.verify"),
    *("train.steps", "train.accumulation", "train.recompute", "train.loss_chunk"),
    *("train.eval_every", "train.eval_bytes", "train.final_eval_bytes", "train.max_wall_time"),
    *("log.", "profile.", "sweep.", "generate.", "eval."),
)


class RunFolder:
    """Paths of a run.

    config.json       the settings of the newest start; tokenizer.json the tokenizer
    metrics.jsonl     a line per optimiser step; eval.jsonl a line per validation
    events.jsonl      starts, skipped steps, failed checkpoints, stops
    summary.json      written when the run is complete
    ranks.json        host and process of each rank
    checkpoints/  tensorboard/  logs/  profile/  and plots
    eval-*.json       what mode=eval has measured
    wandb-id.txt      the run at Weights & Biases
    """

    FILES = (
        *("config.json", "metrics.jsonl", "eval.jsonl", "events.jsonl", "summary.json"),
        *("ranks.json", "tokenizer.json", "wandb-id.txt", "loss.png", "loss_by_position.png"),
    )
    FOLDERS = ("checkpoints", "tensorboard", "logs", "profile")
    MEASURED = ("eval-*.json", "eval-*.png")

    def __init__(self, config: Config) -> None:
        self.path = Path(config.run.dir).expanduser().absolute()
        self.checkpoints = self.path / "checkpoints"
        self.config, self.metrics, self.evaluations, self.events, self.summary, self.ranks = (
            self.path / name for name in self.FILES[:6]
        )
        self.tokenizer, self.wandb_id = (self.path / name for name in self.FILES[6:8])
        self.profile = self.path / "profile"
        self.tensorboard = self.path / "tensorboard"

    def log(self, rank: int) -> Path:
        """Where a rank but the first sends its output, and each rank its last traceback."""
        return self.path / "logs" / f"rank{rank}.log"

    def holds_run(self) -> bool:
        """Whether a run has begun here."""
        return self.metrics.exists()

    def require_fit(self, config: Config) -> None:
        """Raise ``ConfigError`` unless the run of ``config`` may begin or go on in this folder."""
        place = f"run.dir={config.run.dir}"
        if self.path.exists() and not self.path.is_dir():
            raise ConfigError(f"{place} exists and is not a folder")
        names = {path.name for path in self.path.glob("*")}
        foreign = sorted(names.difference(self.FILES, self.FOLDERS))
        if foreign and not {"config.json", "metrics.jsonl"} & names:
            raise ConfigError(
                f"{place} holds other files ({foreign[0]}, ...) and no run; "
                f"choose an empty or a new folder"
            )
        if config.run.overwrite or not self.holds_run():
            return
        ways = "choose another run.dir, or replace that run with run.overwrite=true"
        if not self.config.exists():
            raise ConfigError(f"{place} holds a run without its settings, config.json; {ways}")
        if config.checkpoint.resume == "never":
            raise ConfigError(f"{place} already holds a run and checkpoint.resume=never; {ways}")
        if difference := self.difference(config):
            key, there, here = difference
            raise ConfigError(
                f"{place} holds another run, with {key}={there} (now {here}); give the same "
                f"settings to go on with it, or {ways}"
            )
        if self.summary.exists():
            steps = json.loads(self.summary.read_text())["steps"]
            if config.train.steps <= steps:
                raise ConfigError(
                    f"{place} holds this run, complete after {steps} steps; raise train.steps to "
                    f"go on with it, or {ways}"
                )

    def difference(self, config: Config) -> tuple[str, Any, Any] | None:
        """The first setting, of those that must stay, in which the run here differs."""
        try:
            there = flat(json.loads(self.config.read_text()))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{self.config}, the settings of a run, cannot be read: {error}"
            ) from None
        here = flat(json.loads(json.dumps(dataclasses.asdict(config))))
        for key in sorted(here.keys() | there.keys()):
            if not key.startswith(FREE) and here.get(key) != there.get(key):
                return key, there.get(key), here.get(key)
        return None

    def clear(self) -> None:
        """Remove what a run leaves, and nothing else."""
        for name in self.FILES:
            (self.path / name).unlink(missing_ok=True)
        for path in (path for pattern in self.MEASURED for path in self.path.glob(pattern)):
            path.unlink()
        for name in self.FOLDERS:
            shutil.rmtree(self.path / name, ignore_errors=True)


def flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by their dotted keys."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value
    return found
