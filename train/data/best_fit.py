"""Best-fit packing: no slice is cut; each goes into the fullest sample that has room for it.

A document longer than ``max_doc_len`` (``seq_len`` if it is null) becomes slices of that length and
a rest. Slices are assigned once, longest first; samples have at most ``seq_len`` tokens. An epoch
is a permutation of the samples, drawn from (seed, epoch). There is no state to save.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from train.data.documents import Documents
from train.data.samples import DocumentSlice, Sample, cut, pack

PACKING = 2  # makes this random stream differ from those of epochs and of mixtures


class BestFitSamples:
    """The endless stream of training samples, of whole slices."""

    def __init__(
        self, documents: Documents, seq_len: int, max_doc_len: int | None, seed: int
    ) -> None:
        self.documents, self.seed = documents, seed
        self._document, self._start, self._stop = cut(
            documents, min(max_doc_len or seq_len, seq_len)
        )
        lengths = self._stop - self._start
        shuffled = np.random.default_rng([seed, 0, PACKING]).permutation(len(lengths))
        self._bins = [shuffled[own] for own in best_fit(lengths[shuffled], seq_len)]
        self._epoch = lru_cache(maxsize=2)(self._permutation)

    def __getitem__(self, index: int) -> Sample:
        """Sample ``index`` >= 0 of the stream."""
        return pack(self.documents, self.slices(index))

    def slices(self, index: int) -> list[DocumentSlice]:
        """The slices of sample ``index``; their lengths sum to at most ``seq_len``."""
        epoch, position = divmod(index, len(self._bins))
        columns = (self._document, self._start, self._stop)
        own = self._bins[self._epoch(epoch)[position]]
        return [DocumentSlice(*(int(column[number]) for column in columns)) for number in own]

    def _permutation(self, epoch: int) -> NDArray[np.int64]:
        return np.random.default_rng([self.seed, epoch]).permutation(len(self._bins))


def best_fit(lengths: NDArray[np.integer[Any]], capacity: int) -> list[list[int]]:
    """Best-fit decreasing bin packing of items of ``lengths`` (n,) <= ``capacity``.

    Returns the numbers of the items in each bin. Items of equal length stay in their order.
    """
    bins: list[list[int]] = []
    with_room: dict[int, list[int]] = {}  # bins by their free capacity
    rooms: list[int] = []  # its keys, sorted
    for item in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[item])
        found = bisect_left(rooms, length)
        if found == len(rooms):
            chosen, room = len(bins), capacity
            bins.append([])
        else:
            room = rooms[found]
            chosen = with_room[room].pop()
            if not with_room[room]:
                del with_room[room], rooms[found]
        bins[chosen].append(item)
        if left := room - length:
            if left not in with_room:
                with_room[left] = []
                insort(rooms, left)
            with_room[left].append(chosen)
    return bins
