"""The config of an existing run, for modes that use its model."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from train.config import Config, ConfigError, from_plain
from train.keys import get
from train.paths import expand

RUN_SECTIONS = ("model", "data", "optim", "train", "memory")


def read_config(path: Path) -> Config:
    """Read the ``config.json`` of a run; ``ConfigError`` if it is missing or unreadable."""
    try:
        return from_plain(json.loads(path.read_text()))
    except OSError:
        folders = [run.parent.name for run in path.parent.parent.glob(f"*/{path.name}")]
        there = f"; other runs there: {', '.join(sorted(folders)[:8])}" if folders else ""
        raise ConfigError(f"run.dir={path.parent} contains no run ({path.name}){there}") from None
    except ValueError as error:
        raise ConfigError(f"{path}, the settings of a run, cannot be read: {error}") from None


def with_run_config(config: Config, given: list[str]) -> Config:
    """``config`` with ``RUN_SECTIONS`` taken from the run in ``run.dir``.

    ``given`` are the keys and groups of the command line, whose values override the run's. Raises
    ``ConfigError`` for a group of ``RUN_SECTIONS``: it would be another model or other data.
    """
    run = read_config(expand("run.dir", config.run.dir) / "config.json")
    for key in given:
        section, _, rest = key.partition(".")
        if section not in RUN_SECTIONS:
            continue
        if not rest:
            raise ConfigError(
                f"{key}=...: mode={config.mode} takes the model and its settings from the run in "
                f"run.dir={config.run.dir}; leave it out (single keys, {key}.*=..., may be given)"
            )
        if rest.startswith("sources"):  # a mixture is replaced as a whole
            run.data.sources = config.data.sources
            continue
        parent = get(run, key.rpartition(".")[0])
        setattr(parent, key.rpartition(".")[2], get(config, key))
    sections = {name: getattr(run, name) for name in RUN_SECTIONS}
    return dataclasses.replace(config, **sections)
