"""Packing: the order and the contents of samples as pure functions of (seed, index).

A document is cut into slices of at most ``max_doc_len`` tokens (a key of ``data``). An
epoch is a permutation of all slices, drawn from (seed, epoch). The epochs form one endless stream
of tokens, and sample ``i`` is its tokens ``[i * seq_len, (i + 1) * seq_len)``. A slice that crosses
the end of a sample is cut in two. Every token is used once per epoch for any number of processes,
and there is no state to save.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from train.data.documents import AT_ONCE, IGNORED, Documents
from train.host import shared_array

VERSION = 1  # of the rows that processes share


class DocumentSlice(NamedTuple):
    """Tokens ``[start, stop)`` of a document."""

    document: int
    start: int
    stop: int


@dataclass(frozen=True)
class Sample:
    """Packed slices. ``cu_seqlens`` (slices + 1) bounds attention and positions.

    ``tokens`` (t,) int64. ``labels`` (t,) int64: the next token of the document, even if it lies
    beyond the slice; ``IGNORED`` at the end of the document, and where the next token has no loss.
    ``n_bytes`` are the UTF-8 bytes of the labels, if every label of a document has the same number.
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
        following = np.full(length, IGNORED)
        following[: len(ids) - 1] = ids[1:]
        predicted, of_document = len(ids) - 1, int(documents.lengths[document]) - 1
        if documents.loss is not None:
            loss = documents.loss_mask(document)
            following[: len(ids) - 1][~loss[start + 1 : stop + 1]] = IGNORED
            predicted, of_document = int((following != IGNORED).sum()), int(loss[1:].sum())
        tokens.append(ids[:length])
        labels.append(following)
        cu_seqlens.append(cu_seqlens[-1] + length)
        n_bytes += int(documents.n_bytes[document]) * predicted / max(1, of_document)
    return Sample(np.concatenate(tokens), np.concatenate(labels), cu_seqlens, round(n_bytes))


def join(sample: Sample, masked: bool) -> Sample:
    """The sample as one document: each token but the last predicts the next one of the sample.

    If documents are ``masked``, the labels stay: no end of a document predicts the next document.
    """
    labels = sample.labels if masked else np.append(sample.tokens[1:], sample.labels[-1:])
    return Sample(sample.tokens, labels, [0, len(sample.tokens)], sample.n_bytes)


def concatenate(samples: Sequence[Sample]) -> Sample:
    """One sample with the documents of all ``samples``, which stay apart, in their order."""
    if len(samples) == 1:
        return samples[0]
    starts = accumulate((len(sample.tokens) for sample in samples), initial=0)
    ends = [
        start + end
        for start, sample in zip(starts, samples, strict=False)  # the last start is the end of all
        for end in sample.cu_seqlens[1:]
    ]
    return Sample(
        np.concatenate([sample.tokens for sample in samples]),
        np.concatenate([sample.labels for sample in samples]),
        [0, *ends],
        sum(sample.n_bytes for sample in samples),
    )


class Cut:
    """The slices of at most ``max_doc_len`` tokens of documents with at least ``min_len``."""

    def __init__(self, documents: Documents, max_doc_len: int, min_len: int) -> None:
        self.documents, self.max_doc_len = documents, max_doc_len
        lengths, self._ends = documents.lengths, None
        if min_len <= int(lengths.min()) and int(lengths.max()) <= max_doc_len:
            self.count = len(documents)  # each document is a slice
            return
        self._ends, self.count = np.empty(len(documents), np.int64), 0
        for first in range(0, len(documents), AT_ONCE):
            some = np.array(lengths[first : first + AT_ONCE])
            counts = np.where(some >= min_len, -(-some // max_doc_len), 0)
            self._ends[first : first + AT_ONCE] = self.count + np.cumsum(counts)
            self.count = int(self._ends[first + len(some) - 1])

    def slices(self, numbers: NDArray[np.int64]) -> tuple[NDArray[np.int64], ...]:
        """(document, start, stop), each (n,), of the slices with these numbers (n,)."""
        if self._ends is None:
            document, start = numbers, np.zeros_like(numbers)
        else:
            document = np.searchsorted(self._ends, numbers, side="right")
            first = np.where(document > 0, self._ends[document - 1], 0)
            start = (numbers - first) * self.max_doc_len
        stop = np.minimum(start + self.max_doc_len, self.documents.lengths[document])
        return document, start, stop


def shared_rows(
    documents: Documents,
    settings: list[Any],
    rows: Callable[[], Iterable[NDArray[np.int64]]],
    width: int = 3,
) -> NDArray[np.int64]:
    """The ``rows`` (n, width) int64: one array for the host, if the documents are on disk.

    ``settings``, JSON, determine them together with the documents.
    """
    if documents.digest is None:
        return np.concatenate(list(rows()))
    return shared_array([VERSION, documents.digest, *settings], width, rows)


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
        min_len: int = 1,
    ) -> None:
        self.documents, self.document_mask = documents, document_mask
        self.seq_len, self.seed, self.min_len = seq_len, seed, min_len
        self.max_doc_len = max_doc_len or int(documents.lengths.max())
        self._epoch = lru_cache(maxsize=2)(self._permutation)
        lengths = documents.lengths
        self.tokens_per_epoch = int(lengths.sum(where=lengths >= min_len))

    def __getitem__(self, index: int) -> Sample:
        """Sample ``index`` >= 0 of the stream."""
        sample = pack(self.documents, self.slices(index))
        return sample if self.document_mask else join(sample, self.documents.loss is not None)

    def slices(self, index: int) -> list[DocumentSlice]:
        """The slices of sample ``index``; their lengths sum to ``seq_len``."""
        slices: list[DocumentSlice] = []
        position, stop = index * self.seq_len, (index + 1) * self.seq_len
        while position < stop:
            epoch, offset = divmod(position, self.tokens_per_epoch)
            rows, ends = self._epoch(epoch), self._epoch(epoch)[:, 2]
            last = min(offset + stop - position, self.tokens_per_epoch)
            position += last - offset
            own = slice(bisect_right(ends, offset), bisect_left(ends, last) + 1)
            for document, first, end in rows[own].tolist():
                length = int(self.documents.lengths[document])
                start = min(first + self.max_doc_len, length) - (end - offset)
                taken = min(end, last) - offset
                slices.append(DocumentSlice(document, start, start + taken))
                offset += taken
        return slices

    def _permutation(self, epoch: int) -> NDArray[np.int64]:
        """The slices of ``epoch`` in order: (document, start, end in tokens from its start)."""

        def rows() -> Iterator[NDArray[np.int64]]:
            cut, end = Cut(self.documents, self.max_doc_len, self.min_len), 0
            order = np.random.default_rng([self.seed, epoch]).permutation(cut.count)
            for first in range(0, cut.count, AT_ONCE):
                document, start, stop = cut.slices(order[first : first + AT_ONCE])
                ends = end + np.cumsum(stop - start)
                yield np.stack([document, start, ends], axis=1)
                end = ends[-1]

        settings = ["stream", self.max_doc_len, self.min_len, self.seed, epoch]
        return shared_rows(self.documents, settings, rows)


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
        wanted = budget * weight / total
        own = _of_smallest_hashes(documents.hash[first:stop], sizes[first:stop], wanted)
        chosen += np.sort(first + own).tolist()
    return chosen


def _of_smallest_hashes(
    hashes: NDArray[np.integer[Any]], sizes: NDArray[np.integer[Any]], wanted: float
) -> NDArray[np.int64]:
    """The numbers of the smallest ``hashes`` whose ``sizes`` sum to ``wanted`` or more.

    It sorts only those below a hash that probably suffices, to not copy the hashes of all.
    """
    some = np.sort(hashes[:: -(-len(hashes) // AT_ONCE)])
    share = 2 * wanted / max(1, int(sizes.sum())) + 16 / len(some)
    for limit in (some[min(int(share * len(some)), len(some) - 1)], np.iinfo(np.int64).max):
        below = np.flatnonzero(hashes <= limit)
        below = below[np.argsort(hashes[below], kind="stable")]
        reached = int(np.searchsorted(np.cumsum(sizes[below]), wanted))
        if reached < len(below):
            break
    return below[: reached + 1]


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
