"""The checks of what is evaluated: ``needle.*``, ``rope.*``, ``train.final_eval_*``."""

from __future__ import annotations

from train.checks.model import ROPE_TYPES
from train.config import AUTO, AUTO_BYTES, Config, ConfigError, NeedleConfig, TrainConfig
from train.keys import nearest

TASKS = ("single", "multi_key", "variable")


def check_needle(needle: NeedleConfig) -> None:
    """Raise ``ConfigError`` for the first list that is empty or has a wrong entry."""
    for key in ("tasks", "lengths", "depths"):
        values = getattr(needle, key)
        if not values or len(set(values)) < len(values):
            best = getattr(NeedleConfig(), key) if not values else list(dict.fromkeys(values))
            raise ConfigError(
                f"needle.{key}={values} must have entries, each of them once; nearest valid: "
                f"needle.{key}={best}"
            )
    for task in needle.tasks:
        if task not in TASKS:
            best = nearest(task, TASKS) or TASKS[0]
            raise ConfigError(
                f"needle.tasks={needle.tasks}: allowed are {', '.join(TASKS)}; nearest valid: "
                f"needle.tasks=[{best}]"
            )
    if min(needle.lengths) < 2:
        raise ConfigError(f"needle.lengths={needle.lengths}: at least 2; for example [1024,2048]")
    if wrong := [depth for depth in needle.depths if not 0 <= depth <= 1]:
        raise ConfigError(
            f"needle.depths={needle.depths}: {wrong[0]} must lie between 0 and 1; nearest valid: "
            f"needle.depths=[{min(1.0, max(0.0, wrong[0]))}]"
        )


def check_rope_sweep(config: Config) -> None:
    """Raise ``ConfigError`` for a type of ``rope`` without a factor, or a number out of range."""
    sweep, scaled = config.rope, [name for name, keys in ROPE_TYPES.items() if keys]
    for rope_type in sweep.types:
        if rope_type not in scaled:
            raise ConfigError(
                f"rope.types={sweep.types}: allowed are {', '.join(scaled)}; nearest valid: "
                f"rope.types=[{nearest(rope_type, scaled) or scaled[0]}]"
            )
    for key, least in (("factors", 1), ("thetas", 1)):
        if wrong := [value for value in getattr(sweep, key) if not value > least]:
            raise ConfigError(f"rope.{key}={getattr(sweep, key)}: {wrong[0]} must be above {least}")


def check_budgets(train: TrainConfig) -> None:
    """Raise ``ConfigError`` for a word other than ``auto`` in place of a number of bytes."""
    for key in AUTO_BYTES:
        value = getattr(train, key)
        if isinstance(value, str) and value != AUTO:
            raise ConfigError(
                f"train.{key}={value} must be {AUTO}, null or a number of bytes; nearest valid: "
                f"train.{key}={AUTO}"
            )


def check_final(config: Config) -> None:
    """Raise ``ConfigError`` if ``train.final_eval_*`` exceeds the tokens that are read at once."""
    seq_len, train = config.data.seq_len, config.train
    longest = config.data.piece_len or seq_len
    limits = {"final_eval_len": (train.final_eval_len, seq_len)}
    limits["final_eval_last"] = (
        train.final_eval_last,
        min(longest, train.final_eval_len or longest),
    )
    for key, (value, most) in limits.items():
        if value is not None and value > most:
            raise ConfigError(
                f"train.{key}={value} exceeds the {most} tokens that are read at once; nearest "
                f"valid: train.{key}={most}"
            )
