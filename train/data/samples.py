"""Packing: the order and the contents of samples as pure functions of (seed, index).

A document is cut into pieces of at most ``piece_len`` tokens. An epoch is a permutation of all
pieces, drawn from (seed, epoch). The epochs form one endless stream, and sample ``i`` is its tokens
``[i * seq_len, (i + 1) * seq_len)``; a piece that straddles two samples is cut in two. Every token
is seen once per epoch for any number of processes, and there is no state to save.
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

IGNORED = -100  # label of a token without a next token


class Piece(NamedTuple):
    """Tokens ``[start, stop)`` of a document."""

    document: int
    start: int
    stop: int


@dataclass(frozen=True)
class Sample:
    """Packed pieces. ``cu_seqlens`` (pieces + 1) bounds attention and positions.

    ``tokens`` (t,) int64. ``labels`` (t,) int64: the next token of the document, even if it lies
    beyond the piece; ``IGNORED`` at the end of the document. ``n_bytes`` of UTF-8 are those of the
    labels: all tokens of a document but BOS have an equal share of its bytes.
    """

    tokens: NDArray[np.int64]
    labels: NDArray[np.int64]
    cu_seqlens: list[int]
    n_bytes: int = 0


def pack(documents: Documents, pieces: list[Piece]) -> Sample:
    """One sample of ``pieces``, in the given order."""
    tokens, labels, cu_seqlens, n_bytes = [], [], [0], 0.0
    for document, start, stop in pieces:
        ids = documents.tokens(document, start, stop + 1)
        length = stop - start
        tokens.append(ids[:length])
        labels.append(ids[1:])
        if len(ids) == length:
            labels.append(np.array([IGNORED]))
        cu_seqlens.append(cu_seqlens[-1] + length)
        predicted, of_document = len(ids) - 1, int(documents.lengths[document]) - 1
        n_bytes += int(documents.n_bytes[document]) * predicted / max(1, of_document)
    return Sample(np.concatenate(tokens), np.concatenate(labels), cu_seqlens, round(n_bytes))


def join(sample: Sample) -> Sample:
    """The sample as one document: each token but the last predicts the next one of the sample."""
    labels = np.append(sample.tokens[1:], sample.labels[-1:])
    return Sample(sample.tokens, labels, [0, len(sample.tokens)], sample.n_bytes)


def cut(documents: Documents, piece_len: int) -> tuple[NDArray[np.int64], ...]:
    """Pieces of at most ``piece_len`` tokens: document, start and stop of each, (pieces,) int64."""
    per_document = -(-documents.lengths // piece_len)
    document = np.repeat(np.arange(len(documents)), per_document)
    first = np.cumsum(per_document) - per_document
    start = (np.arange(len(document)) - np.repeat(first, per_document)) * piece_len
    return document, start, np.minimum(start + piece_len, documents.lengths[document])


class TrainingSamples:
    """The endless stream of training samples, each of exactly ``seq_len`` tokens.

    Without ``document_mask`` a sample is one document: its pieces see each other.
    """

    def __init__(
        self,
        documents: Documents,
        seq_len: int,
        piece_len: int | None,
        seed: int,
        document_mask: bool = True,
    ) -> None:
        self.documents, self.document_mask = documents, document_mask
        self.seq_len = seq_len
        self.seed = seed
        self.piece_len = piece_len or int(documents.lengths.max())
        self._document, self._start, self._stop = cut(documents, self.piece_len)
        self.tokens_per_epoch = int(documents.lengths.sum())
        self._epoch = lru_cache(maxsize=2)(self._permutation)

    def __getitem__(self, index: int) -> Sample:
        """Sample ``index`` >= 0 of the stream."""
        sample = pack(self.documents, self.pieces(index))
        return sample if self.document_mask else join(sample)

    def pieces(self, index: int) -> list[Piece]:
        """The pieces of sample ``index``; their lengths sum to ``seq_len``."""
        pieces: list[Piece] = []
        position, end = index * self.seq_len, (index + 1) * self.seq_len
        while position < end:
            epoch, offset = divmod(position, self.tokens_per_epoch)
            order, ends = self._epoch(epoch)
            place = int(np.searchsorted(ends, offset, side="right"))
            piece = order[place]
            left_in_piece = int(ends[place]) - offset
            taken = min(left_in_piece, end - position)
            start = int(self._stop[piece]) - left_in_piece
            pieces.append(Piece(int(self._document[piece]), start, start + taken))
            position += taken
        return pieces

    def _permutation(self, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The order of the pieces in ``epoch``, and the end of each in tokens from its start."""
        order = np.random.default_rng([self.seed, epoch]).permutation(len(self._document))
        return order, np.cumsum((self._stop - self._start)[order])


def evaluation_documents(documents: Documents, max_bytes: int | None) -> list[int]:
    """The documents of least hash whose UTF-8 bytes sum to ``max_bytes`` or more; None: all."""
    if max_bytes is None:
        return list(range(len(documents)))
    return choose_documents(documents, documents.n_bytes, max_bytes)


def choose_documents(
    documents: Documents, sizes: NDArray[np.integer[Any]], budget: int
) -> list[int]:
    """Documents of each source whose ``sizes`` (n,) sum to its share of ``budget`` or more.

    They are those of least hash, a random sample whatever the order of the files is, and stand in
    the order of their numbers.
    """
    chosen: list[int] = []
    total = sum(documents.sources.values())
    for weight, (first, stop) in zip(
        documents.sources.values(), pairwise(documents.bounds), strict=True
    ):
        by_hash = first + np.argsort(documents.hash[first:stop], kind="stable")
        reached = int(np.searchsorted(np.cumsum(sizes[by_hash]), budget * weight / total))
        chosen += np.sort(by_hash[: reached + 1]).tolist()
    return chosen


def evaluation_samples(
    documents: Documents, chosen: list[int], seq_len: int, window: int
) -> list[list[Piece]]:
    """The ``chosen`` documents in windows of ``window`` <= ``seq_len`` tokens, packed.

    Each list is one sample of at most ``seq_len`` tokens. Together the samples hold, and predict,
    every token of every chosen document exactly once.
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
