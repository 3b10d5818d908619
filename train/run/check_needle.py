"""The checks of ``needle.*``: its lists."""

from __future__ import annotations

from train.config import ConfigError, NeedleConfig, nearest

TASKS = ("single", "multi_key", "variable")  # of train.probes.haystack, which imports numpy


def check_needle(needle: NeedleConfig) -> None:
    """Raise ``ConfigError`` for the first list that has no entries, or one that is not allowed."""
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
