"""Decides which optimiser steps are skipped: those that are not finite and, if asked, spikes."""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import Any

from torch import Tensor

from train.config import GuardConfig


class SpikeFilter:
    """Accepts or skips each step by loss and gradient norm; ``config`` is the section ``guard``.

    A step whose loss or norm is not finite is always skipped. A spike is a loss or a gradient norm
    more than ``sigma`` standard deviations above the mean of the last ``window`` accepted steps. No
    step is a spike before ``window`` steps were accepted.
    """

    def __init__(self, config: GuardConfig) -> None:
        self.config = config
        self.skipped = 0  # in the whole run
        self.consecutive_skips = 0
        self._accepted: deque[tuple[float, float]] = deque(maxlen=config.window)

    def should_skip(self, figures: Tensor) -> Tensor:
        """1 if a step with ``figures``, (2,) loss and gradient norm, must be skipped, else 0.

        The result is (), int64, on their device; the host does not wait for it.
        """
        loss, grad_norm = figures
        (most, _), (most_norm, _) = self._limits()
        accepted = figures.isfinite().all() & (loss <= most) & (grad_norm <= most_norm)
        return (~accepted).long()

    def skip_reason(self, loss: float, grad_norm: float) -> str | None:
        """Why a step with this loss and norm must be skipped; None to accept it."""
        named = (("loss", loss), ("gradient norm", grad_norm))
        for name, value in named:
            if not math.isfinite(value):
                return f"{name} is {value}"
        for (name, value), (most, lately) in zip(named, self._limits(), strict=True):
            if value > most:
                return f"{name} {value:.4g} is a spike (recent mean {lately})"
        return None

    def _limits(self) -> list[tuple[float, str]]:
        """Of loss and gradient norm each: the limit, and mean and deviation so far as text."""
        if self.config.sigma is None or len(self._accepted) < self.config.window:
            return [(math.inf, "")] * 2
        limits = []
        for past in zip(*self._accepted, strict=True):
            mean, deviation = statistics.fmean(past), statistics.pstdev(past)
            limits.append((mean + self.config.sigma * deviation, f"{mean:.4g} +- {deviation:.2g}"))
        return limits

    def accept(self, loss: float, grad_norm: float) -> None:
        """Record an accepted step."""
        self._accepted.append((loss, grad_norm))
        self.consecutive_skips = 0

    def skip(self) -> None:
        """Record a skipped step."""
        self.skipped += 1
        self.consecutive_skips += 1

    @property
    def out_of_patience(self) -> bool:
        """Whether ``patience`` steps in a row were skipped."""
        return self.consecutive_skips >= self.config.patience

    def state(self) -> dict[str, Any]:
        """The state for a checkpoint, as lossless JSON values."""
        accepted = [list(pair) for pair in self._accepted]
        return {"skipped": self.skipped, "in_a_row": self.consecutive_skips, "taken": accepted}

    def restore(self, state: dict[str, Any]) -> None:
        """Load ``state``. The count of skipped steps never decreases."""
        self.skipped = max(self.skipped, state["skipped"])
        self.consecutive_skips = state["in_a_row"]
        self._accepted.clear()
        self._accepted.extend((loss, grad_norm) for loss, grad_norm in state["taken"])
