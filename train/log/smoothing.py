"""Means over steps: one step has few documents, so its loss is noisy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

LEAST = 20  # steps in a mean, if the run has so many


def window_of(steps: int) -> int:
    """Steps in a mean, for a run of ``steps``: a twentieth of them, at least ``LEAST``."""
    return min(max(LEAST, steps // 20), max(1, steps))


def mean(values: Sequence[float | None]) -> float:
    """The mean of the finite ``values``, NaN without any: a skipped step may have none."""
    numbers = np.array(values, np.float64)  # None becomes NaN
    finite = numbers[np.isfinite(numbers)]
    return float(finite.mean()) if len(finite) else float("nan")


def smoothed(values: Sequence[float | None], window: int) -> NDArray[np.float64]:
    """The ``mean`` of about ``window`` values around each, (n,).

    A window is centred on its value, so that a falling curve is not delayed. At the ends it has
    fewer values, at least half as many.
    """
    numbers = np.array(values, np.float64)
    finite = np.isfinite(numbers)
    terms = np.where(finite, numbers, 0), finite
    sums, counts = (np.concatenate([[0.0], np.cumsum(term)]) for term in terms)
    centre = np.arange(len(numbers))
    first = np.maximum(centre - window // 2, 0)
    stop = np.minimum(centre + window // 2 + 1, len(numbers))
    counted = counts[stop] - counts[first]
    totals = sums[stop] - sums[first]
    return np.divide(totals, counted, out=np.full(len(numbers), np.nan), where=counted > 0)
