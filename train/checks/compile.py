"""The checks of ``train.compile`` against the keys with which it does not work."""

from __future__ import annotations

from train.compile_choice import obstacle
from train.config import Config, ConfigError


def check_compile(config: Config) -> None:
    """Raise ``ConfigError`` if the blocks of ``config`` must be compiled, and cannot be."""
    problem, remedy = obstacle(config)
    if config.train.compile == "block" and problem:
        raise ConfigError(
            f"train.compile=block: {problem}; nearest valid: train.compile=auto (or {remedy})"
        )
