"""The check of ``train.batch`` against the ranks that share it."""

from __future__ import annotations

from train.config import ConfigError, TrainConfig


def check_batch(train: TrainConfig, dp: int) -> None:
    """Raise ``ConfigError`` if ``dp`` data-parallel ranks cannot share ``train.batch``."""
    batch = train.batch
    if train.accumulation not in (None, 1):
        raise ConfigError(
            f"train.batch={batch} and train.accumulation={train.accumulation} both set the samples "
            "of a step; nearest valid: train.accumulation=1"
        )
    if batch % dp:
        best = max(round(batch / dp), 1) * dp
        raise ConfigError(
            f"train.batch={batch} is not a multiple of the {dp} data-parallel ranks; "
            f"nearest valid: train.batch={best}"
        )
