"""The recipe of a run that continues: its settings, learning rate and batch change only by name."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from train.config import Config, ConfigError, from_plain
from train.data.manifest import DamagedError, read_manifest
from train.run.run_folder import RunFolder, changed_settings
from train.run.schedule import learning_rate, schedule_length

MOVES_LR = ("schedule_steps", "decay_steps")  # keys of `optim` that matter by the learning rate


class Change(NamedTuple):
    """A change of the recipe, and the remedy that avoids it (may be empty), each as a clause."""

    text: str
    remedy: str = ""


def require_recipe(config: Config, batch: int, metadata: dict[str, Any]) -> dict[str, Change]:
    """The changes of the recipe since a checkpoint of the run, all in ``accept_changes``.

    ``batch`` is the number of samples in a step, ``metadata`` that of the checkpoint. Raises
    ``ConfigError`` for the first change that ``checkpoint.accept_changes`` does not name.
    """
    changes = recipe_changes(config, batch, metadata)
    for key, change in changes.items():
        if key not in config.checkpoint.accept_changes:
            keep = f"{change.remedy}, " if change.remedy else ""
            raise ConfigError(
                f"run.dir={config.run.dir} continues after step {metadata['step']}, but "
                f"{change.text}; {keep}accept it with checkpoint.accept_changes=[{key}], start a "
                f"new run from it in another run.dir with checkpoint.resume={config.run.dir}, or "
                "replace it with run.overwrite=true checkpoint.resume=never"
            )
    return changes


def recipe_changes(config: Config, batch: int, metadata: dict[str, Any]) -> dict[str, Change]:
    """The differences between the recipe of a checkpoint and that of its next step.

    Each has the key that accepts it.
    """
    there, step = from_plain(metadata["settings"]), metadata["step"]
    found = {key: Change(clause) for key, clause in changed_settings(there, config).items()}
    if step < config.train.steps and (change := _schedule_change(config, there, step)):
        found["train.steps"] = change
    before = metadata.get("batch")
    if before not in (None, batch):
        found["train.global_batch_size"] = Change(
            f"a step has {batch} samples from here on, {before} before",
            f"keep it with train.global_batch_size={before} (a multiple of the samples in a "
            "micro-batch)",
        )
    return found


def _schedule_change(config: Config, there: Config, step: int) -> Change | None:
    """The change of the next step's learning rate by another schedule, if there is one.

    Schedules may differ later: a run may extend a constant phase in which it is.
    """
    optim, steps = config.optim, config.train.steps
    earlier = dataclasses.replace(optim, **{key: getattr(there.optim, key) for key in MOVES_LR})
    before, now = learning_rate(earlier, step, there.train.steps), learning_rate(optim, step, steps)
    if abs(now - before) <= 1e-9 * optim.lr:
        return None
    length = schedule_length(there.optim, there.train.steps)
    usable = length >= steps or optim.final_lr_ratio > 0
    return Change(
        f"another schedule (train.steps={steps}) moves the learning rate of step {step + 1} from "
        f"{before:.3g} to {now:.3g}",
        f"keep it with optim.schedule_steps={length}" if usable else "",
    )


def newest_metadata(folder: RunFolder) -> dict[str, Any] | None:
    """The metadata of the newest checkpoint of a run that has a readable manifest."""
    for path in sorted(folder.checkpoints.glob("step-*"), reverse=True):
        try:
            return read_manifest(path).metadata
        except (DamagedError, OSError):  # the start quarantines it
            continue
    return None
