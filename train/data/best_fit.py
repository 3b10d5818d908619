"""Best-fit packing: no slice is cut; each goes into the fullest sample that has room for it.

A document longer than ``max_doc_len`` (``seq_len`` if it is null) becomes slices of that length and
a rest. Slices are assigned once, longest first; samples have at most ``seq_len`` tokens. An epoch
is a permutation of the samples, drawn from (seed, epoch). There is no state to save.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from train.data.documents import AT_ONCE, Documents
from train.data.samples import Cut, DocumentSlice, Sample, pack, shared_rows

PACKING = 2  # makes this random stream differ from those of epochs and of mixtures


class BestFitSamples:
    """The endless stream of training samples, of whole slices."""

    def __init__(
        self,
        documents: Documents,
        seq_len: int,
        max_doc_len: int | None,
        seed: int,
        min_len: int = 1,
    ) -> None:
        self.documents, self.seq_len, self.seed, self.min_len = documents, seq_len, seed, min_len
        self.max_doc_len = min(max_doc_len or seq_len, seq_len)
        self._settings = ["best fit", self.max_doc_len, min_len, seed, seq_len]
        # (sample, document, start) of each slice; the samples have the order of their assignment.
        self._slices = shared_rows(documents, self._settings, self._assigned)
        self._samples = int(self._slices[-1, 0]) + 1
        self._epoch = lru_cache(maxsize=2)(self._permutation)

    def __getitem__(self, index: int) -> Sample:
        """Sample ``index`` >= 0 of the stream."""
        return pack(self.documents, self.slices(index))

    def slices(self, index: int) -> list[DocumentSlice]:
        """The slices of sample ``index``; their lengths sum to at most ``seq_len``."""
        epoch, position = divmod(index, self._samples)
        sample = int(self._epoch(epoch)[position])
        first, stop = (bisect_left(self._slices[:, 0], number) for number in (sample, sample + 1))
        slices = []
        for document, start in self._slices[first:stop, 1:].tolist():
            length = int(self.documents.lengths[document])
            slices.append(DocumentSlice(document, start, min(start + self.max_doc_len, length)))
        return slices

    def _assigned(self) -> Iterator[NDArray[np.int64]]:
        cut = Cut(self.documents, self.max_doc_len, self.min_len)
        shuffled = np.random.default_rng([self.seed, 0, PACKING]).permutation(cut.count)
        lengths = np.empty(cut.count, np.int64)
        for first in range(0, cut.count, AT_ONCE):
            _, start, stop = cut.slices(shuffled[first : first + AT_ONCE])
            lengths[first : first + AT_ONCE] = stop - start
        items, samples = best_fit(lengths, self.seq_len)
        for first in range(0, cut.count, AT_ONCE):
            document, start, _ = cut.slices(shuffled[items[first : first + AT_ONCE]])
            yield np.stack([samples[first : first + AT_ONCE], document, start], axis=1)

    def _permutation(self, epoch: int) -> NDArray[np.int64]:
        def order() -> list[NDArray[np.int64]]:
            return [np.random.default_rng([self.seed, epoch]).permutation(self._samples)[:, None]]

        return shared_rows(self.documents, [*self._settings, epoch], order, width=1)[:, 0]


def best_fit(
    lengths: NDArray[np.integer[Any]], capacity: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Best-fit decreasing bin packing of items of ``lengths`` (n,) <= ``capacity``.

    Returns (items, bins), each (n,): the numbers of the items, bin by bin, and the bin of each.
    Items of equal length stay in their order.
    """
    count = 0
    with_room: dict[int, list[int]] = {}  # bins by their free capacity
    rooms: list[int] = []  # its keys, sorted
    longest_first = np.argsort(-lengths, kind="stable")
    bins = np.empty(len(lengths), np.int64)
    for position, item in enumerate(longest_first):
        length = int(lengths[item])
        found = bisect_left(rooms, length)
        if found == len(rooms):
            chosen, room = count, capacity
            count += 1
        else:
            room = rooms[found]
            chosen = with_room[room].pop()
            if not with_room[room]:
                del with_room[room], rooms[found]
        bins[position] = chosen
        if left := room - length:
            if left not in with_room:
                with_room[left] = []
                insort(rooms, left)
            with_room[left].append(chosen)
    by_bin = np.argsort(bins, kind="stable")
    return longest_first[by_bin], bins[by_bin]
