"""The settings that may change when a start continues the run in its folder."""

from __future__ import annotations

from collections.abc import Iterable

from train.config import Config, ConfigError
from train.run.run_config import read_config
from train.run.run_folder import RunFolder, may_change
from train.sections.training import AUTO


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
