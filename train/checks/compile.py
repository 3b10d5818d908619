"""The checks of ``train.compile`` against the keys with which it does not work."""

from __future__ import annotations

from train.compile_choice import obstacle
from train.config import Config, ConfigError


def check_compile(config: Config) -> None:
    """Raise ``ConfigError`` if the blocks of ``config`` must be compiled, and cannot be."""
    if config.train.compile == "block" and (problem := obstacle(config)):
        key = problem.partition("=")[0]
        other = "memory.offload=none" if key == "memory.offload" else "train.attention=ringfa3"
        raise ConfigError(
            f"train.compile=block: {problem}; nearest valid: train.compile=auto (or {other})"
        )
