"""Shards: which tokens of which documents each rank holds, as segments.

A *segment* is a run of consecutive tokens of one document on one rank. Two layouts exist:

``contiguous``
    the packed tokens in order, the same number to every rank;
``zigzag``
    work and tokens balanced, as `placement.zigzag` describes. A document is cut only if balance
    needs it; under a causal mask its owners get an early and a late chunk each.

Both give every rank the same number of tokens, off by one if the world does not divide the total.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ringfa3.planning.placement.costs import Ints, block_cost
from ringfa3.planning.placement.zigzag import zigzag


@dataclass(frozen=True)
class Segments:
    """Runs of document tokens as arrays of one length, in the order of their local rows.

    row       first local row
    length    tokens, > 0
    sequence  index of the document
    position  of the first token inside its document
    """

    row: Ints
    length: Ints
    sequence: Ints
    position: Ints

    def __len__(self) -> int:
        return len(self.row)

    @property
    def tokens(self) -> int:
        return int(self.length.sum())

    def take(self, index: Ints) -> Segments:
        """Those with these numbers."""
        return Segments(*(getattr(self, name)[index] for name in self.__dataclass_fields__))

    def repeated(self, times: int) -> Segments:
        """Those of one sequence, for so many sequences of its length."""
        index = np.repeat(np.arange(times), len(self))
        length, position = (np.tile(x, times) for x in (self.length, self.position))
        return Segments(np.tile(self.row, times) + index * self.tokens, length, index, position)


def whole_sequences(lengths: Ints) -> Segments:
    """Every sequence as one segment, packed in order; an empty sequence has no segment."""
    (sequence,) = np.nonzero(lengths)
    length = lengths[sequence]
    return Segments(np.cumsum(length) - length, length, sequence, np.zeros_like(length))


def pairs_before(p: Ints, length: Ints, left: int, right: int) -> Ints:
    """Allowed (query, key) pairs of the first `p` rows of a self-attending document.

    Row r attends to keys [max(r - left, 0), min(r + right, length - 1)]; -1 stands for unlimited.
    """
    reach = length if right < 0 else np.minimum(right, length)
    inside: Ints = np.clip(length - reach, 0, p)  # rows whose last visible key lies inside
    ends: Ints = inside * (inside - 1) // 2 + inside * reach + (p - inside) * (length - 1)
    if left < 0:
        return ends + p
    started: Ints = np.maximum(p - 1 - left, 0)  # rows to which the first key is masked
    return ends + p - started * (started + 1) // 2


def pairs_of(segments: Segments, lengths: Ints, left: int, right: int) -> int:
    """Allowed (query, key) pairs of segments of documents of these lengths."""
    length, end = lengths[segments.sequence], segments.position + segments.length
    before = (pairs_before(p, length, left, right) for p in (end, segments.position))
    return int(np.subtract(*before).sum())


def effective_window(causal: bool, window_size: tuple[int, int]) -> tuple[int, int]:
    """(left, right) with causal folded in: no key to the right of the diagonal."""
    left, right = window_size
    return left, 0 if causal else right


def partition(
    lengths: Ints,
    world: int,
    layout: str,
    left: int = -1,
    right: int = 0,
    hosts: Sequence[int] | None = None,
) -> list[Segments]:
    """The segments of every rank.

    Args:
        lengths: (documents,) int64, tokens per document, zeros allowed.
        world: number of ranks.
        layout: one of `validation.LAYOUTS`.
        left, right: the window, -1 for unlimited; causal is right = 0. It matters for balance only.
        hosts: (world,) the number of each rank's host; None for one host.
    """
    if layout == "contiguous" or world == 1:
        return by_rank(world, *_contiguous(lengths, quotas(int(lengths.sum()), world)))
    before, after = (lengths if x < 0 else np.minimum(x, lengths) for x in (left, right))
    return balanced_documents(lengths, before, after, (0,) * world if hosts is None else hosts)


def balanced_documents(
    lengths: Ints, left: Ints, right: Ints, hosts: Sequence[int]
) -> list[Segments]:
    """The segments of every rank, of documents with windows of their own, each (documents,)."""
    # Rows have equal work if nearly all see a whole window, or all see the whole document.
    wide = np.maximum(left, right)
    in_order = (wide < lengths // 16) | (np.minimum(left, right) >= lengths - 1)
    quota, cost = quotas(int(lengths.sum()), len(hosts)), block_cost(lengths, left, right)
    return by_rank(len(hosts), *zigzag(lengths, quota, cost, in_order, np.array(hosts)))


def quotas(total: int, world: int) -> Ints:
    """(world,) tokens of each rank: equal, off by one if the world does not divide the total."""
    return np.full(world, total // world, np.int64) + (np.arange(world) < total % world)


def by_rank(world: int, rank: Ints, sequence: Ints, position: Ints, length: Ints) -> list[Segments]:
    """Chunks in any order as one `Segments` a rank; adjacent chunks of a document are joined."""
    keep = length > 0
    rank, sequence, position, length = (x[keep] for x in (rank, sequence, position, length))
    order = np.lexsort((position, sequence, rank))
    rank, sequence, position, length = (x[order] for x in (rank, sequence, position, length))
    joins = (
        (rank[1:] == rank[:-1])
        & (sequence[1:] == sequence[:-1])
        & (position[1:] == position[:-1] + length[:-1])
    )
    starts = np.flatnonzero(np.concatenate(([True], ~joins))) if len(rank) else np.zeros(0, int)
    length = np.add.reduceat(length, starts) if len(starts) else length
    rank, sequence, position = rank[starts], sequence[starts], position[starts]
    bounds = np.searchsorted(rank, np.arange(world + 1))
    segments = []
    for a, b in itertools.pairwise(bounds):
        rows = length[a:b]
        segments.append(Segments(np.cumsum(rows) - rows, rows, sequence[a:b], position[a:b]))
    return segments


def _contiguous(lengths: Ints, quota: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """Cuts the packed tokens at every document start and at every rank's first token."""
    document_start = np.cumsum(lengths) - lengths
    rank_start = np.cumsum(quota) - quota
    cuts = np.unique(np.concatenate((document_start, rank_start, [int(lengths.sum())])))
    start, length = cuts[:-1], np.diff(cuts)
    # the last document that starts at or before a cut: empty ones start there, too
    sequence = np.searchsorted(document_start, start, side="right") - 1
    rank = np.searchsorted(rank_start, start, side="right") - 1
    return rank, sequence, start - document_start[sequence], length
