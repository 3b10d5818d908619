"""Packing: the order and the contents of samples as pure functions of (seed, index).

A document is cut into pieces of at most ``piece_len`` tokens. An epoch is a permutation of all
pieces, drawn from (seed, epoch); the epochs follow each other as one endless stream, and sample
``i`` is its tokens ``[i * seq_len, (i + 1) * seq_len)``. A piece that straddles two samples is cut
in two. So every token of the corpus is seen once per epoch whatever the number of processes, and
there is no state to save.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from train.data.documents import Documents

IGNORED = -100  # label of a token with nothing to predict


class Piece(NamedTuple):
    """Tokens ``[start, stop)`` of a document."""

    document: int
    start: int
    stop: int


@dataclass(frozen=True)
class Sample:
    """Packed pieces. Attention and positions end at the boundaries ``cu_seqlens`` (pieces + 1).

    ``tokens`` (t,) int64. ``labels`` (t,) int64: the next token of the document, also where the
    piece ends before it; ``IGNORED`` at the end of the document.
    """

    tokens: NDArray[np.int64]
    labels: NDArray[np.int64]
    cu_seqlens: list[int]


def pack(documents: Documents, pieces: list[Piece]) -> Sample:
    """One sample of ``pieces``, in their order."""
    tokens, labels, cu_seqlens = [], [], [0]
    for document, start, stop in pieces:
        known = documents.tokens(document, start, stop + 1)
        length = stop - start
        tokens.append(known[:length])
        labels.append(known[1:])
        if len(known) == length:
            labels.append(np.array([IGNORED]))
        cu_seqlens.append(cu_seqlens[-1] + length)
    return Sample(np.concatenate(tokens), np.concatenate(labels), cu_seqlens)


class TrainingSamples:
    """The endless stream of training samples, each of exactly ``seq_len`` tokens."""

    def __init__(
        self, documents: Documents, seq_len: int, piece_len: int | None, seed: int
    ) -> None:
        self.documents = documents
        self.seq_len = seq_len
        self.seed = seed
        self.piece_len = piece_len or int(documents.lengths.max())
        per_document = -(-documents.lengths // self.piece_len)
        self._document = np.repeat(np.arange(len(documents)), per_document)
        first = np.cumsum(per_document) - per_document
        number = np.arange(len(self._document)) - np.repeat(first, per_document)
        self._start = number * self.piece_len
        self._stop = np.minimum(self._start + self.piece_len, documents.lengths[self._document])
        self.tokens_per_epoch = int(documents.lengths.sum())
        self._epoch = lru_cache(maxsize=2)(self._permutation)

    def __getitem__(self, index: int) -> Sample:
        """Sample ``index`` >= 0 of the stream."""
        return pack(self.documents, self.pieces(index))

    def pieces(self, index: int) -> list[Piece]:
        """The pieces of sample ``index``, their lengths adding up to ``seq_len``."""
        found: list[Piece] = []
        position, end = index * self.seq_len, (index + 1) * self.seq_len
        while position < end:
            epoch, offset = divmod(position, self.tokens_per_epoch)
            order, ends = self._epoch(epoch)
            place = int(np.searchsorted(ends, offset, side="right"))
            piece = order[place]
            left_in_piece = int(ends[place]) - offset
            taken = min(left_in_piece, end - position)
            start = int(self._stop[piece]) - left_in_piece
            found.append(Piece(int(self._document[piece]), start, start + taken))
            position += taken
        return found

    def _permutation(self, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The order of the pieces in ``epoch`` and where each ends in it, in tokens."""
        order = np.random.default_rng([self.seed, epoch]).permutation(len(self._document))
        return order, np.cumsum((self._stop - self._start)[order])


def evaluation_documents(documents: Documents, max_bytes: int | None) -> list[int]:
    """The first documents of a split that reach ``max_bytes`` UTF-8 bytes together, or all."""
    if max_bytes is None:
        return list(range(len(documents)))
    return first_documents(documents, documents.n_bytes, max_bytes)


def first_documents(
    documents: Documents, sizes: NDArray[np.integer[Any]], budget: int
) -> list[int]:
    """The first documents of each source whose ``sizes`` (n,) reach its share of ``budget``."""
    chosen: list[int] = []
    total = sum(documents.sources.values())
    for weight, (first, stop) in zip(
        documents.sources.values(), pairwise(documents.bounds), strict=True
    ):
        reached = int(np.searchsorted(np.cumsum(sizes[first:stop]), budget * weight / total))
        chosen += range(first, min(first + reached + 1, stop))
    return chosen


def evaluation_samples(
    documents: Documents, chosen: list[int], seq_len: int, window: int
) -> list[list[Piece]]:
    """The ``chosen`` documents in windows of ``window`` <= ``seq_len`` tokens, packed.

    Each list is one sample of at most ``seq_len`` tokens. Together they hold every token of every
    chosen document exactly once, and so predict each exactly once.
    """
    samples: list[list[Piece]] = []
    free = 0
    for piece in _windows(documents, chosen, window):
        length = piece.stop - piece.start
        if length > free:
            samples.append([])
            free = seq_len
        samples[-1].append(piece)
        free -= length
    return samples


def _windows(documents: Documents, chosen: list[int], window: int) -> Iterator[Piece]:
    for document in chosen:
        length = int(documents.lengths[document])
        for start in range(0, length, window):
            yield Piece(document, start, min(start + window, length))
