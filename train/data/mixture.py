"""Mixing sources by weight, in closed form: sample index -> (source, index in its own stream).

The stream of samples is divided into blocks, each with at least one sample of every source. After
``n`` whole blocks each source has its share of all samples, rounded by largest remainder. At the
end of a block a source is therefore less than one sample off. Within a block the sources are
permuted by (seed, block). There is no state to save.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from train.config import SOURCES, ConfigError, DataConfig
from train.data.best_fit import BestFitSamples
from train.data.documents import Documents
from train.data.samples import Sample, TrainingSamples

MIN_BLOCK = 64  # samples
ORDER = 1  # makes this random stream differ from that of the slices in an epoch


class Samples(Protocol):
    """An endless stream of samples, each a pure function of its number."""

    def __getitem__(self, index: int) -> Sample: ...


class Mixture:
    """Maps a sample index >= 0 to its source, and to its index in the stream of that source."""

    def __init__(self, weights: Sequence[float], seed: int) -> None:
        exact = [Fraction(weight) for weight in weights]
        self.shares = [weight / sum(exact) for weight in exact]
        # Rounding moves each end of a source's share by less than one sample, so a share of two
        # samples or more in a block contains at least one.
        self.block = max(MIN_BLOCK, -(-2 // min(self.shares)))
        self.seed = seed
        self._block = lru_cache(maxsize=8)(self._order)

    def locate(self, index: int) -> tuple[int, int]:
        """``(source, index in its stream)`` of sample ``index``."""
        block, position = divmod(index, self.block)
        order, numbers = self._block(block)
        return int(order[position]), int(numbers[position])

    def before(self, block: int) -> list[int]:
        """Number of samples of each source before ``block``."""
        quotas = [share * self.block * block for share in self.shares]
        counts = [int(quota) for quota in quotas]
        by_remainder = sorted(range(len(counts)), key=lambda k: (counts[k] - quotas[k], k))
        for source in by_remainder[: self.block * block - sum(counts)]:
            counts[source] += 1
        return counts

    def _order(self, block: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The source of each sample of a block, and its index in that source's stream."""
        first, stop = np.array(self.before(block)), np.array(self.before(block + 1))
        order = np.repeat(np.arange(len(first)), stop - first)
        order = np.random.default_rng([self.seed, block, ORDER]).permutation(order)
        numbers = np.empty_like(order)
        for source, number in enumerate(first):
            own = order == source
            numbers[own] = number + np.arange(own.sum())
        return order, numbers


def long_documents(documents: Documents, data: DataConfig) -> list[tuple[Documents, int]]:
    """The documents of each source, and its ``min_len``: training excludes shorter ones.

    Raises ``ConfigError`` if a source has none that is as long.
    """
    chosen = []
    for number, name in enumerate(documents.sources):
        own, (key, least) = documents.of_source(number), _min_len(data, name)
        longest = int(own.lengths.max())
        if least is not None and longest < least:
            raise ConfigError(
                f"{key}={least}: no training document has so many tokens; "
                f"nearest valid: {key}={longest}"
            )
        chosen.append((own, least or 1))
    return chosen


def short_documents(documents: Documents, data: DataConfig) -> str:
    """A clause with the number of documents that each ``min_len`` excludes; empty without one."""
    counts: Counter[str] = Counter()
    for number, name in enumerate(documents.sources):
        key, least = _min_len(data, name)
        if least is not None:
            short = documents.of_source(number).lengths < least
            counts[f"{key}={least}"] += int(short.sum())
    return "".join(f", {count:,} below {key} left out" for key, count in counts.items())


def _min_len(data: DataConfig, source: str) -> tuple[str, int | None]:
    """The key with the minimum length of documents of ``source`` in tokens, and its value."""
    if source and data.sources[source].min_len is not None:
        return f"{SOURCES}.{source}.min_len", data.sources[source].min_len
    return "data.min_len", data.min_len


class MixedSamples:
    """The endless stream of training samples of several sources; each sample has one source."""

    def __init__(self, streams: Sequence[Samples], mixture: Mixture) -> None:
        self.streams, self.mixture = streams, mixture

    def __getitem__(self, index: int) -> Sample:
        """Sample ``index`` >= 0 of the stream."""
        source, number = self.mixture.locate(index)
        return self.streams[source][number]


def training_samples(documents: Documents, data: DataConfig, seed: int) -> Samples:
    """The stream of training samples of all sources, mixed by their weights.

    Raises ``ConfigError`` if a source has no document that is long enough.
    """

    def stream(own: Documents, min_len: int) -> TrainingSamples | BestFitSamples:
        settings = data.seq_len, data.max_doc_len, seed
        if data.packing == "best_fit":
            return BestFitSamples(own, *settings, min_len)
        return TrainingSamples(own, *settings, data.document_mask, min_len)

    streams = [stream(own, min_len) for own, min_len in long_documents(documents, data)]
    if len(streams) == 1:
        return streams[0]
    return MixedSamples(streams, Mixture(list(documents.sources.values()), seed))
