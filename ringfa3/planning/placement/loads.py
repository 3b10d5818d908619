"""`Loads`: the chunks of each rank, their work, and the tokens that it still takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from ringfa3.planning.placement.costs import Cost, Ints

ONE = 1 << 20  # a rank's mean work
Chunk: TypeAlias = tuple[int, int, int]  # document, position, length

# Work that is charged for K/V rows which a new cut sends, for as many rows as a rank has tokens.
# A higher price between hosts leaves work unequal and saves no time: there are few such rows.
ROWS = ONE // 64


class Loads:
    """Chunks on ranks. All work is relative: ONE is the mean of the ranks.

    lengths  (documents,) tokens
    quota    (world,) tokens that each rank gets in the end
    work     (documents,) of whole documents
    load     (world,) work of a rank's chunks
    room     (world,) tokens that it lacks; negative if it has too many
    chunks   of each rank
    """

    def __init__(self, lengths: Ints, quota: Ints, cost: Cost) -> None:
        self.lengths, self.quota, self._cost = lengths, quota, cost
        whole = cost(np.arange(len(lengths)), np.zeros_like(lengths), lengths)
        total = int(whole.sum())
        self._unit = max(total >> 30, 1)  # products with ONE and the world stay below 2^63
        self._total = max(total // self._unit, 1)
        self.work = self._relative(whole)
        self.load = np.zeros_like(quota)
        self.room = quota.copy()
        self.chunks: list[list[Chunk]] = [[] for _ in quota]

    def _relative(self, work: Ints) -> Ints:
        relative: Ints = work // self._unit * (ONE * len(self.quota)) // self._total
        return relative

    def work_of(self, document: Ints, position: Ints, length: Ints) -> Ints:
        """Work of chunks; it broadcasts."""
        return self._relative(self._cost(document, position, length))

    def add_whole(self, rank: int, document: int) -> None:
        tokens = int(self.lengths[document])
        self.chunks[rank].append((document, 0, tokens))
        self.load[rank] += self.work[document]
        self.room[rank] -= tokens

    def change(
        self, removed: Sequence[tuple[int, int]], added: Sequence[tuple[int, Chunk]]
    ) -> None:
        """Takes chunks from ranks, one of each, then adds chunks, but no empty ones.

        One call counts their work: numpy's calls for single numbers take most of a plan's time.

        removed: (rank, number in `chunks`). added: (rank, chunk).
        """
        gone = [(rank, *self.chunks[rank].pop(index)) for rank, index in removed]
        come = [(rank, *chunk) for rank, chunk in added if chunk[2]]
        for rank, *chunk in come:
            self.chunks[rank].append((chunk[0], chunk[1], chunk[2]))
        rank, document, position, length = np.array([*gone, *come], np.int64).reshape(-1, 4).T
        sign = np.where(np.arange(len(rank)) < len(gone), -1, 1)
        np.add.at(self.load, rank, sign * self.work_of(document, position, length))
        np.subtract.at(self.room, rank, sign * length)

    def table(self, rank: int) -> tuple[Ints, Ints, Ints]:
        """(documents, positions, lengths) of a rank's chunks."""
        document, position, length = np.array(self.chunks[rank], np.int64).reshape(-1, 3).T
        return document, position, length
