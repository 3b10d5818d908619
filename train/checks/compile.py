"""The checks of ``train.compile`` against the keys with which it does not work."""

from __future__ import annotations

from train.config import Config, ConfigError


def check_compile(config: Config) -> None:
    """Raise ``ConfigError`` if the blocks of ``config`` cannot be compiled."""
    if config.train.compile == "none":
        return
    if config.memory.offload != "none":
        raise ConfigError(
            f"memory.offload={config.memory.offload} moves tensors while a block runs, which a "
            "compiled block cannot; nearest valid: train.compile=none (or memory.offload=none)"
        )
    if config.train.attention != "ringfa3":
        raise ConfigError(
            f"train.compile={config.train.compile} does not support train.attention="
            f"{config.train.attention}; nearest valid: train.attention=ringfa3 "
            "(or train.compile=none)"
        )
