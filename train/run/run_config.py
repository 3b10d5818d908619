"""The settings of the run in ``run.dir``, for modes that use it and for starts that continue it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from train.config import Config, ConfigError
from train.keys import get
from train.paths import expand
from train.run.run_folder import RunFolder, may_change, read_config
from train.sections.training import AUTO

RUN_SECTIONS = ("model", "data", "optim", "train", "memory")


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


def continues(config: Config) -> bool:
    """Whether a start with ``config`` continues the run in its folder."""
    folder = RunFolder(config)
    try:
        if not folder.holds_run() or folder.is_replaced_by(config):
            return False
        folder.require_fit(config)
    except (ConfigError, OSError):  # the start is refused
        return False
    return True


def allowed_changes(config: Config, keys: Iterable[str]) -> list[str]:
    """Those of ``keys``, settings or groups, that the next start may have with other values."""
    if not continues(config):
        return list(keys)
    return [key for key in keys if may_change(key) or may_change(f"{key}.")]


def held_compile(config: Config) -> str:
    """``train.compile``; ``none`` instead of ``auto`` if ``config`` continues a run with ``none``.

    Compiled blocks round elsewhere, so the run would not go on as it was.
    """
    if config.train.compile == AUTO and continues(config):
        held = read_config(RunFolder(config).config).train.compile
        return "none" if held == "none" else AUTO
    return config.train.compile
