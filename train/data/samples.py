"""Packing: the order and the contents of samples as pure functions of (seed, index).

A document is cut into slices of at most ``max_doc_len`` tokens (a key of ``data``). An
epoch is a permutation of all slices, drawn from (seed, epoch). The epochs form one endless stream
of tokens, and sample ``i`` is its tokens ``[i * seq_len, (i + 1) * seq_len)``. A slice that crosses
the end of a sample is cut in two. Every token is used once per epoch for any number of processes,
and there is no state to save.
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


class DocumentSlice(NamedTuple):
    """Tokens ``[start, stop)`` of a document."""

    document: int
    start: int
    stop: int


@dataclass(frozen=True)
class Sample:
    """Packed slices. ``cu_seqlens`` (slices + 1) bounds attention and positions.

    ``tokens`` (t,) int64. ``labels`` (t,) int64: the next token of the document, even if it lies
    beyond the slice; ``IGNORED`` at the end of the document. ``n_bytes`` are the UTF-8 bytes of the
    labels, if every token of a document except BOS has the same number of bytes.
    """

    tokens: NDArray[np.int64]
    labels: NDArray[np.int64]
    cu_seqlens: list[int]
    n_bytes: int = 0


def pack(documents: Documents, slices: list[DocumentSlice]) -> Sample:
    """One sample of ``slices``, in the given order."""
    tokens, labels, cu_seqlens, n_bytes = [], [], [0], 0.0
    for document, start, stop in slices:
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


def cut(documents: Documents, max_doc_len: int) -> tuple[NDArray[np.int64], ...]:
    """Slices of at most ``max_doc_len`` tokens: (document, start, stop), each (slices,) int64."""
    per_document = -(-documents.lengths // max_doc_len)
    document = np.repeat(np.arange(len(documents)), per_document)
    first = np.cumsum(per_document) - per_document
    start = (np.arange(len(document)) - np.repeat(first, per_document)) * max_doc_len
    return document, start, np.minimum(start + max_doc_len, documents.lengths[document])


class TrainingSamples:
    """The endless stream of training samples, each of exactly ``seq_len`` tokens.

    Without ``document_mask`` a sample is one document: its slices attend to each other.
    """

    def __init__(
        self,
        documents: Documents,
        seq_len: int,
        max_doc_len: int | None,
        seed: int,
        document_mask: bool = True,
    ) -> None:
        self.documents, self.document_mask = documents, document_mask
        self.seq_len = seq_len
        self.seed = seed
        self.max_doc_len = max_doc_len or int(documents.lengths.max())
        self._document, self._start, self._stop = cut(documents, self.max_doc_len)
        self.tokens_per_epoch = int(documents.lengths.sum())
        self._epoch = lru_cache(maxsize=2)(self._permutation)

    def __getitem__(self, index: int) -> Sample:
        """Sample ``index`` >= 0 of the stream."""
        sample = pack(self.documents, self.slices(index))
        return sample if self.document_mask else join(sample)

    def slices(self, index: int) -> list[DocumentSlice]:
        """The slices of sample ``index``; their lengths sum to ``seq_len``."""
        slices: list[DocumentSlice] = []
        position, end = index * self.seq_len, (index + 1) * self.seq_len
        while position < end:
            epoch, offset = divmod(position, self.tokens_per_epoch)
            order, ends = self._epoch(epoch)
            found = int(np.searchsorted(ends, offset, side="right"))
            number = order[found]
            remaining = int(ends[found]) - offset
            taken = min(remaining, end - position)
            start = int(self._stop[number]) - remaining
            slices.append(DocumentSlice(int(self._document[number]), start, start + taken))
            position += taken
        return slices

    def _permutation(self, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The order of the slices in ``epoch``, and the end of each in tokens from its start."""
        order = np.random.default_rng([self.seed, epoch]).permutation(len(self._document))
        return order, np.cumsum((self._stop - self._start)[order])


class AtLeast(NamedTuple):
    """A budget that covers the lengths of training.

    It has ``n_bytes`` and ``n_tokens`` or more, with a document of ``length`` tokens or more.
    """

    n_bytes: int
    n_tokens: int
    length: int


Budget = int | AtLeast | None  # of an evaluation: bytes or more; None means all documents


def evaluation_documents(documents: Documents, budget: Budget) -> list[int]:
    """The documents with the smallest hashes that fulfil ``budget``.

    If none of them has the ``length`` of an ``AtLeast``, the next document that has it is among
    them too, or the longest if none has it.
    """
    if budget is None:
        return list(range(len(documents)))
    if not isinstance(budget, AtLeast):
        return choose_documents(documents, documents.n_bytes, budget)
    chosen = {
        *choose_documents(documents, documents.n_bytes, budget.n_bytes),
        *choose_documents(documents, documents.lengths, budget.n_tokens),
    }
    length = min(budget.length, int(documents.lengths.max()))
    long = np.flatnonzero(documents.lengths >= length)
    if chosen.isdisjoint(long.tolist()):
        chosen.add(int(long[documents.hash[long].argmin()]))
    return sorted(chosen)


def choose_documents(
    documents: Documents, sizes: NDArray[np.integer[Any]], budget: int
) -> list[int]:
    """Documents of each source whose ``sizes`` (n,) sum to its share of ``budget`` or more.

    They are the ones with the smallest hashes: a random sample that does not depend on the order of
    the files. The result is sorted by document number within each source.
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
) -> list[list[DocumentSlice]]:
    """The ``chosen`` documents in windows of ``window`` <= ``seq_len`` tokens, packed.

    Each list is one sample of at most ``seq_len`` tokens. Together the samples hold, and predict,
    every token of every chosen document exactly once.
    """
    samples: list[list[DocumentSlice]] = []
    free = 0
    for part in _windows(documents, chosen, window):
        length = part.stop - part.start
        if length > free:
            samples.append([])
            free = seq_len
        samples[-1].append(part)
        free -= length
    return samples


def _windows(documents: Documents, chosen: list[int], window: int) -> Iterator[DocumentSlice]:
    for document in chosen:
        length = int(documents.lengths[document])
        for start in range(0, length, window):
            yield DocumentSlice(document, start, min(start + window, length))
