"""The settings of a run that is there already, for what is done with its model afterwards."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from train.config import Config, ConfigError, from_plain, get

OF_THE_RUN = ("model", "data", "optim", "train")


def read_settings(path: Path) -> Config:
    """The settings in the ``config.json`` of a run; ``ConfigError`` when it is not there."""
    try:
        return from_plain(json.loads(path.read_text()))
    except OSError:
        folders = [run.parent.name for run in path.parent.parent.glob(f"*/{path.name}")]
        there = f"; runs beside it: {', '.join(sorted(folders)[:8])}" if folders else ""
        raise ConfigError(f"run.dir={path.parent} holds no run ({path.name}){there}") from None
    except ValueError as error:
        raise ConfigError(f"{path}, the settings of a run, cannot be read: {error}") from None


def adopt(config: Config, given: list[str]) -> Config:
    """``config`` with the sections ``OF_THE_RUN`` as the run in ``run.dir`` had them.

    What the command line says goes before: ``given`` are the keys and groups that it names.
    Raises ``ConfigError`` for a group among them, which would be another model or other data.
    """
    run = read_settings(Path(config.run.dir).expanduser() / "config.json")
    for key in given:
        section, _, rest = key.partition(".")
        if section not in OF_THE_RUN:
            continue
        if not rest:
            raise ConfigError(
                f"{key}=...: mode={config.mode} takes the model and its settings from the run in "
                f"run.dir={config.run.dir}; leave it out (single keys, {key}.*=..., may be given)"
            )
        if rest.startswith("sources"):  # a mixture is one thing, whichever of its keys are given
            run.data.sources = config.data.sources
            continue
        parent = get(run, key.rpartition(".")[0])
        setattr(parent, key.rpartition(".")[2], get(config, key))
    sections = {name: getattr(run, name) for name in OF_THE_RUN}
    return dataclasses.replace(config, **sections)
