"""The check of ``train.global_batch_size`` against the ranks that share it."""

from __future__ import annotations

from train.config import ConfigError, TrainConfig


def check_batch(train: TrainConfig, dp: int) -> None:
    """Raise ``ConfigError`` if ``dp`` data-parallel ranks cannot share the global batch."""
    batch, steps = train.global_batch_size, train.gradient_accumulation_steps
    if steps not in (None, 1):
        raise ConfigError(
            f"train.global_batch_size={batch} and train.gradient_accumulation_steps={steps} both "
            "set the samples of a step; nearest valid: train.gradient_accumulation_steps=1"
        )
    if batch % dp:
        best = max(round(batch / dp), 1) * dp
        raise ConfigError(
            f"train.global_batch_size={batch} is not a multiple of the {dp} data-parallel ranks; "
            f"nearest valid: train.global_batch_size={best}"
        )
