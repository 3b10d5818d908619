"""Shards of a mask's tokens: work, which is pairs of a query, and tokens are balanced.

A *component* is a run of queries that no span leaves: a document, a tree. `placement.zigzag` treats
it as a document: a small one is whole, others are cut into chunks, of which each owner gets a
sparse and a dense one. For that a component's tokens are ordered by their density, in runs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ringfa3.masks.checks import check_mask_tokens
from ringfa3.masks.mask import Mask
from ringfa3.masks.spans import RowPairs, run_ends
from ringfa3.planning.placement.costs import TILE, Ints
from ringfa3.planning.placement.zigzag import zigzag
from ringfa3.planning.sharding import Segments, balanced_documents, by_rank, partition, quotas
from ringfa3.planning.tile_schedule import concat_ranges
from ringfa3.planning.token_shards import TokenShards

RUNS = 8  # a component, which may be cut for each rank, has so many runs of one density a rank
# Parts into which large components are cut, tried in turn: density that does not grow evenly along
# a component needs several. One part is the zigzag of a document.
PARTS = (1, 2, 4, 8)
# Accepted maximum of a rank's work, over the mean, in one part, which sends the least K/V; and in
# several parts.
ACCEPTED, BALANCED = 1.02, 1.015
EVEN = 32  # all rows have about the same work if both halves have, up to one part in so many
# First tokens of a chunk that ranks exchange. Work is pairs here, so parts of a tile count too.
FINE = TILE // 32, TILE // 8, TILE // 2, TILE, 2 * TILE
FEW = 128  # keys outside of a document's window are few: at most this part of the window's
LARGE = 0.25  # share of a rank's mean work from which a component is cut into parts


def partition_mask(
    mask: Mask, hosts: Sequence[int], layout: str
) -> tuple[list[Segments], list[Segments]]:
    """The segments of every rank: of queries, and of keys, the same ones in self-attention.

    All have one sequence. Keys of cross-attention stay in order, the same number on every rank.
    hosts: (world,) the number of each rank's host.
    """
    world = len(hosts)
    total = np.array([mask.q_tokens], np.int64)
    if layout == "contiguous" or world == 1:
        queries = partition(total, world, "contiguous")
    elif (documents := _documents(mask)) is not None:
        queries = one_sequence(documents[0], balanced_documents(*documents, hosts))
    else:
        queries = _balanced(mask, np.array(hosts))
    if not mask.cross:
        return queries, queries
    return queries, partition(np.array([mask.k_tokens], np.int64), world, "contiguous")


def cross_mask(queries: TokenShards, keys: TokenShards, mask: Mask | None) -> Mask:
    """The mask of `ContextPlan.cross`. Raises ValueError, TypeError as that."""
    for name in ("rank", "world", "group", "hosts"):
        mine, theirs = getattr(queries, name), getattr(keys, name)
        if mine != theirs:
            raise ValueError(
                f"keys has {name}={theirs}, and the plan of the queries {mine}: make both plans "
                "with the same group and hosts"
            )
    if mask is not None:
        check_mask_tokens(mask, queries.total_tokens, keys.total_tokens)
        return mask
    if queries.mask is not None or keys.mask is not None:
        raise ValueError(
            f"mask=None, and the documents of a plan with {queries.mask or keys.mask!r} are not "
            "known: give the mask of these queries and keys"
        )
    cu, cu_k = (np.append(0, np.cumsum(x.lengths)) for x in (queries, keys))
    return Mask.documents(cu, cu_k, causal=False)


def _documents(mask: Mask) -> tuple[Ints, Ints, Ints] | None:
    """Lengths and windows, (documents,) each, if the mask consists of documents.

    A few more keys of each, such as first keys outside of its window, change no row's work by
    much, and are left out.
    """
    q0, q1, k0, k1, lo, hi = mask.diagonal_spans.T
    square = (q0 == k0) & (q1 == k1) & (lo <= 0) & (hi >= 0)
    begin, end = q0[square], q1[square]
    bounds = np.append(begin, mask.q_tokens), np.insert(end, 0, 0)
    if mask.cross or len(begin) == 0 or not np.array_equal(*bounds):
        return None
    length = end - begin
    left, right = np.minimum(-lo[square], length), np.minimum(hi[square], length)
    q0, q1, k0, k1 = (x[~square] for x in (q0, q1, k0, k1))
    document = np.searchsorted(begin, q0, side="right") - 1
    inside = (q1 <= end[document]) & (k0 >= begin[document]) & (k1 <= end[document])
    few = FEW * np.bincount(document, k1 - k0, len(begin)) <= np.minimum(left + right, length)
    return (length, left, right) if inside.all() and few.all() else None


def one_sequence(lengths: Ints, shards: list[Segments]) -> list[Segments]:
    """The shards of documents as those of all their tokens, one sequence."""
    start = np.cumsum(lengths) - lengths
    return [
        Segments(s.row, s.length, np.zeros_like(s.row), start[s.sequence] + s.position)
        for s in shards
    ]


class _Ordered:
    """The tokens of a mask, those of each component in the order of their density.

    begin  first token of each component, which is also the first of its ordered tokens
    """

    def __init__(self, mask: Mask, world: int) -> None:
        self.begin = components(mask)
        self._before = RowPairs.of(mask.diagonal_spans).pairs_before
        runs, size = _runs(mask, self.begin, world)
        pairs = self._before(runs + size) - self._before(runs)
        component = np.searchsorted(self.begin, runs, side="right") - 1
        order = np.lexsort((pairs / size, component))
        self._run, self._size = runs[order], size[order]
        self._at = np.cumsum(self._size) - self._size  # where a run lies among the ordered tokens
        self._pairs = np.cumsum(pairs[order]) - pairs[order]

    def pairs_before(self, token: Ints) -> Ints:
        """Pairs of the first `token` ordered tokens."""
        run = np.searchsorted(self._at, token, side="right") - 1
        begin = self._run[run]
        inside = self._before(begin + token - self._at[run]) - self._before(begin)
        count: Ints = self._pairs[run] + inside
        return count

    def tokens(self, begin: Ints, end: Ints) -> tuple[Ints, Ints, Ints]:
        """(chunk, first token, number): what the ordered tokens [begin, end) of chunks are."""
        first = np.searchsorted(self._at, begin, side="right") - 1
        count = np.searchsorted(self._at, end) - first
        chunk, run = np.repeat(np.arange(len(begin)), count), concat_ranges(first, count)
        low = np.maximum(begin[chunk], self._at[run])
        high = np.minimum(end[chunk], self._at[run] + self._size[run])
        return chunk, self._run[run] + low - self._at[run], high - low


def _balanced(mask: Mask, hosts: Ints) -> list[Segments]:
    total, world = mask.q_tokens, len(hosts)
    ordered = _Ordered(mask, world)
    lengths = _sizes(ordered.begin, total)
    large = _pairs(ordered, ordered.begin, lengths) > LARGE * mask.pairs / world
    best, best_peak = None, np.inf
    for parts in PARTS:
        begin = _cut(ordered.begin, lengths, np.where(large, parts, 1))

        def pairs(document: Ints, position: Ints, length: Ints, begin: Ints = begin) -> Ints:
            return _pairs(ordered, begin[document] + position, length)

        size = _sizes(begin, total)
        halves = np.stack((_pairs(ordered, begin, size // 2), _pairs(ordered, begin, size)))
        in_order = np.abs(2 * halves[0] - halves[1]) < halves[1] // EVEN
        rank, document, position, length = zigzag(
            size, quotas(total, world), pairs, in_order, hosts, FINE
        )
        first = begin[document] + position
        peak = np.bincount(rank, _pairs(ordered, first, length), world).max(initial=0)
        if peak < best_peak:
            best, best_peak = (rank, first, first + length), peak
        accepted = ACCEPTED if parts == 1 else BALANCED
        if best_peak * world <= accepted * max(mask.pairs, 1):
            break
    assert best is not None
    chunk, token, count = ordered.tokens(*best[1:])
    return by_rank(world, best[0][chunk], np.zeros_like(token), token, count)


def _pairs(ordered: _Ordered, begin: Ints, count: Ints) -> Ints:
    """Pairs of ordered tokens [begin, begin + count)."""
    return ordered.pairs_before(begin + count) - ordered.pairs_before(begin)


def components(mask: Mask) -> Ints:
    """The first token of each component, ascending. Tokens that no span covers belong to the
    component before them."""
    q0, q1, k0, k1, *_ = mask.diagonal_spans.T
    begin, end = (q0, q1) if mask.cross else (np.minimum(q0, k0), np.maximum(q1, k1))
    first = np.zeros(1 if mask.q_tokens else 0, np.int64)
    return np.unique(np.concatenate((first, run_ends(begin, end)[0])))


def _runs(mask: Mask, begin: Ints, world: int) -> tuple[Ints, Ints]:
    """(first token, tokens) of each run: between spans' ends, and parts of large components."""
    total = mask.q_tokens
    edges: Ints = np.unique(np.concatenate((begin, mask.diagonal_spans[:, :2].ravel())))
    edges = edges[edges < total]
    parts: Ints = np.maximum(_sizes(begin, total) // (RUNS * world * TILE), 1) * TILE
    step = parts[np.searchsorted(begin, edges, side="right") - 1]
    size = _sizes(edges, total)
    count = -(-size // step)
    run = np.repeat(edges, count) + np.repeat(step, count) * concat_ranges(0 * count, count)
    return run.astype(np.int64), _sizes(run, total)


def _cut(begin: Ints, lengths: Ints, parts: Ints) -> Ints:
    """Runs of tokens cut into so many parts, at multiples of TILE: the first of each part."""
    size: Ints = np.maximum(-(-lengths // (parts * TILE)), 1) * TILE
    count = np.where(parts > 1, -(-lengths // size), 1)
    first: Ints = np.repeat(begin, count) + np.repeat(size, count) * concat_ranges(0 * count, count)
    return first


def _sizes(begin: Ints, total: int) -> Ints:
    """Lengths of adjacent runs of `total` tokens."""
    return np.concatenate((begin[1:], [total])) - begin if len(begin) else begin
