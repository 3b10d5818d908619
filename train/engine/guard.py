"""Which optimiser steps are taken: finite ones, and on request no spikes."""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import Any

from train.config import GuardConfig


class Guard:
    """Judges steps by their loss and gradient norm; the same figures give the same verdicts.

    A spike is a loss or a gradient norm more than ``sigma`` standard deviations above the mean of
    the last ``window`` steps that were taken; none is found before there are as many.
    """

    def __init__(self, settings: GuardConfig) -> None:
        self.settings = settings
        self.skipped = 0  # in the whole run
        self.in_a_row = 0
        self._taken: deque[tuple[float, float]] = deque(maxlen=settings.window)

    def objection(self, loss: float, grad_norm: float) -> str | None:
        """Why a step with these figures must not be taken; None when it may be."""
        for name, value in (("loss", loss), ("gradient norm", grad_norm)):
            if not math.isfinite(value):
                return f"{name} is {value}"
        if self.settings.sigma is None or len(self._taken) < self.settings.window:
            return None
        for name, value, past in zip(
            ("loss", "gradient norm"),
            (loss, grad_norm),
            zip(*self._taken, strict=True),
            strict=True,
        ):
            mean, deviation = statistics.fmean(past), statistics.pstdev(past)
            if value > mean + self.settings.sigma * deviation:
                return f"{name} {value:.4g} is a spike (lately {mean:.4g} +- {deviation:.2g})"
        return None

    def take(self, loss: float, grad_norm: float) -> None:
        """Note a step that was taken."""
        self._taken.append((loss, grad_norm))
        self.in_a_row = 0

    def skip(self) -> None:
        """Note a step that was not taken."""
        self.skipped += 1
        self.in_a_row += 1

    @property
    def exhausted(self) -> bool:
        """Whether ``patience`` steps in a row were skipped."""
        return self.in_a_row >= self.settings.patience

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, as JSON values that lose nothing."""
        taken = [list(pair) for pair in self._taken]
        return {"skipped": self.skipped, "in_a_row": self.in_a_row, "taken": taken}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from ``state``; steps skipped since then stay counted."""
        self.skipped = max(self.skipped, state["skipped"])
        self.in_a_row = state["in_a_row"]
        self._taken.clear()
        self._taken.extend((loss, grad_norm) for loss, grad_norm in state["taken"])
