"""Mixes of documents: synthetic ones by name, and lengths from a file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from ringfa3.planning.placement.costs import Ints

# Lengths of documents that hold so many tokens in all
Distribution: TypeAlias = Callable[[np.random.Generator, int], list[int]]

BUCKETS = (  # of MagiAttention's benchmark: shortest, longest, share
    (1, 200, 0.185), (201, 500, 0.28), (501, 1024, 0.25), (1024, 2048, 0.16), (2048, 4096, 0.07),
    (4096, 8192, 0.03), (8192, 16384, 0.013), (16384, 32768, 0.008), (32768, 131072, 0.004),
)  # fmt: skip
LONGEST = 1 << 20  # tokens of a document of `tail`


def _fill(total: int, draw: Callable[[], int]) -> list[int]:
    """Lengths until the batch is full; the last one is cut to fit."""
    lengths, left = [], total
    while left:
        lengths.append(min(draw(), left))
        left -= lengths[-1]
    return lengths


def _magi(rng: np.random.Generator, total: int) -> list[int]:
    share = np.array([s for _, _, s in BUCKETS])
    share /= share.sum()

    def draw() -> int:
        low, high, _ = BUCKETS[rng.choice(len(BUCKETS), p=share)]
        return min(int(rng.integers(low, high + 1)), max(total // 4, 1))

    lengths = _fill(total, draw)
    rng.shuffle(lengths)
    return lengths


def _tail(rng: np.random.Generator, total: int) -> list[int]:
    def draw() -> int:
        if rng.random() < 0.97:
            return int(rng.lognormal(7.2, 1.3)) + 1
        return int(min(16384 * (1 + rng.pareto(1.0)), LONGEST))

    lengths = _fill(total, draw)
    rng.shuffle(lengths)
    return lengths


def _short(rng: np.random.Generator, total: int) -> list[int]:
    return _fill(total, lambda: int(rng.integers(64, 4097)))


def _single(_: np.random.Generator, total: int) -> list[int]:
    return [total]


DISTRIBUTIONS: dict[str, Distribution] = {
    "magi": _magi,
    "tail": _tail,
    "short": _short,
    "single": _single,
}


def from_lengths(lengths: Ints) -> Distribution:
    """Documents that are drawn from these, with replacement; the last one is cut to fit."""

    def draw(rng: np.random.Generator, total: int) -> list[int]:
        return _fill(total, lambda: int(lengths[rng.integers(len(lengths))]))

    return draw


@dataclass(frozen=True)
class Mix:
    """Batches of documents. tokens: of a GPU."""

    name: str
    distribution: Distribution
    tokens: int

    def draw(self, seed: int, world: int) -> Ints:
        """(documents,) the lengths of a batch for `world` GPUs."""
        rng = np.random.default_rng([seed, world])
        return np.array(self.distribution(rng, world * self.tokens), np.int64)
