"""The learning rate as a function of the step."""

from __future__ import annotations

import math

from train.config import OptimConfig

WARMUP_STEPS = 2000  # as of Llama 1 and 2


def schedule_length(optim: OptimConfig, steps: int) -> int:
    """Steps of the schedule of a run of ``steps`` steps."""
    return steps if optim.schedule_steps is None else optim.schedule_steps


def warmup_steps(optim: OptimConfig, steps: int) -> int:
    """Steps of warm-up in a run of ``steps``.

    The default, and a warm-up that would not end within the schedule, are at most a tenth of it.
    """
    length, given = schedule_length(optim, steps), optim.warmup_steps
    if given is not None and given <= length:
        return given
    return min(WARMUP_STEPS, length // 10)


def learning_rate(optim: OptimConfig, step: int, steps: int) -> float:
    """Learning rate of optimiser step ``step`` (from 0) of a run of ``steps``.

    It rises linearly over ``warmup_steps`` and reaches ``lr`` in the last of them. Then it decays
    towards ``lr * final_lr_ratio``, its value from the end of the schedule on. With ``wsd`` it
    decays only in the last ``decay_steps`` of the schedule.
    """
    length, first = schedule_length(optim, steps), warmup_steps(optim, steps)
    if step < first:
        return optim.lr * (step + 1) / first
    if optim.schedule == "wsd":
        first = max(first, length - (optim.decay_steps or max(1, length // 10)))
    done = min(1.0, max(0, step - first) / max(1, length - first))
    left = (1 + math.cos(math.pi * done)) / 2 if optim.schedule == "cosine" else 1 - done
    return optim.lr * (optim.final_lr_ratio + (1 - optim.final_lr_ratio) * left)


def describe(optim: OptimConfig, steps: int) -> str:
    """The schedule in a clause, which names a warm-up that is shortened."""
    length, warmup = schedule_length(optim, steps), warmup_steps(optim, steps)
    shortened = ""
    if optim.warmup_steps not in (None, warmup):
        shortened = f" (optim.warmup_steps={optim.warmup_steps} exceeds it and is shortened)"
    return (
        f"learning rate up to {optim.lr:g} after {warmup} steps of warm-up, then {optim.schedule} "
        f"to step {length}{shortened}"
    )
