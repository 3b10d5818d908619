"""The learning rate as a function of the step."""

from __future__ import annotations

import math

from train.config import OptimConfig


def schedule_length(optim: OptimConfig, steps: int) -> int:
    """Steps of the schedule of a run of ``steps`` steps."""
    return steps if optim.schedule_steps is None else optim.schedule_steps


def learning_rate(optim: OptimConfig, step: int, steps: int) -> float:
    """Learning rate of optimiser step ``step`` (from 0) of a run of ``steps``.

    It rises linearly over ``warmup_steps`` and reaches ``lr`` in the last of them. Then it decays
    towards ``lr * final_lr_ratio``, its value from the end of the schedule on. With ``wsd`` it
    decays only in the last ``decay_steps`` of the schedule.
    """
    length, first = schedule_length(optim, steps), optim.warmup_steps
    if step < first:
        return optim.lr * (step + 1) / first
    if optim.schedule == "wsd":
        first = max(first, length - (optim.decay_steps or max(1, length // 10)))
    done = min(1.0, max(0, step - first) / max(1, length - first))
    left = (1 + math.cos(math.pi * done)) / 2 if optim.schedule == "cosine" else 1 - done
    return optim.lr * (optim.final_lr_ratio + (1 - optim.final_lr_ratio) * left)
