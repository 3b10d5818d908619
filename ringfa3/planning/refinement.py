"""Refinement: segments cut where spans of a mask begin and end, and their bands.

So a band covers whole segments of queries and of keys, as tilings need it: they clip a band to its
diagonals, not to a part of its rows. Where a span ends because its diagonals leave the rectangle,
as those of a causal document do, no cut is needed. Each cut costs partial tiles, and bands grow as
query cuts times key cuts. Bands of one pair of segments that touch become one.

Two bands of one pair that stay apart need keys of one backward tile. Else a deterministic tile
would wait for a later band of a tile that is fetched after it.
"""

from __future__ import annotations

import numpy as np

from ringfa3.masks.mask import Mask
from ringfa3.masks.spans import run_ends
from ringfa3.planning.kv_exchange import KVExchange, PlacedSegments, plan_exchange
from ringfa3.planning.placement.costs import Ints
from ringfa3.planning.sharding import Segments
from ringfa3.planning.tile_schedule import concat_ranges
from ringfa3.planning.tiling import Band, Plan

LEAST_KEY_TILE = 64  # keys of the smallest backward tile of any kernel


def plan_mask(
    mask: Mask,
    queries: list[Segments],
    keys: list[Segments],
    rank: int,
    grid: int = 1,
    alignment: int = 1,
) -> tuple[Plan, KVExchange]:
    """Spans and exchange of `rank`, where rank o holds queries[o] and keys[o].

    The segments have one sequence, all queries or all keys. grid, alignment: as in `plan_exchange`.
    """
    spans = mask.diagonal_spans
    cuts = _cuts(spans)
    q, k = (_cut(PlacedSegments.of(x), at) for x, at in zip((queries, keys), cuts, strict=True))
    bands = _bands(spans, q.segments, k.segments)
    apart = (np.diff(bands.query) == 0) & (np.diff(bands.key) == 0)
    if apart.any():
        shared = np.unique(bands.key[:-1][apart])
        begin, length = k.segments.position[shared], k.segments.length[shared]
        tiles = -(-length // LEAST_KEY_TILE)
        k = _cut(k, np.repeat(begin, tiles) + LEAST_KEY_TILE * concat_ranges(0 * tiles, tiles))
        bands = _bands(spans, q.segments, k.segments)
    return plan_exchange(q, k, bands, rank, len(queries), grid, alignment)


def _cuts(spans: Ints) -> tuple[Ints, Ints]:
    """Tokens where queries, and where keys, are cut.

    A span needs no cut at an end beyond which its diagonals meet none of its other tokens. But one
    at a corner, else they would go on through it. Runs that no span leaves stay apart: no tile has
    tokens of two, so a NaN stays in its document.
    """
    q0, q1, k0, k1, lo, hi = spans.T
    above, under = q0 + hi > k0, q1 + lo < k1
    left, right = k0 - lo > q0, k1 - hi < q1
    above |= ~left
    under |= ~right
    begin, end = np.maximum(k0, q0 + lo), np.minimum(k1, q1 + hi)
    return (
        np.concatenate((q0[above], q1[under], *run_ends(q0, q1))),
        np.concatenate((k0[left], k1[right], *run_ends(begin, end))),
    )


def _cut(placed: PlacedSegments, cuts: Ints) -> PlacedSegments:
    """The segments, cut at these tokens."""
    whole = placed.segments
    total = whole.tokens
    edges = np.unique(np.concatenate((whole.position, cuts, [total])))
    begin = edges[:-1]
    of = np.searchsorted(whole.position, begin, side="right") - 1
    row = whole.row[of] + begin - whole.position[of]
    return PlacedSegments(
        Segments(row, np.diff(edges), np.zeros_like(begin), begin), placed.owner[of]
    )


def _bands(spans: Ints, q: Segments, k: Segments) -> Band:
    """The bands of all pairs of segments. Those of one pair are neighbours, by diagonal."""
    q0, q1, k0, k1, lo, hi = spans.T
    first = np.searchsorted(q.position, q0, side="right") - 1
    count = np.searchsorted(q.position, q1) - first
    span = np.repeat(np.arange(len(spans)), count)
    query = concat_ranges(first, count)
    row = np.maximum(q.position[query], q0[span])
    last = np.minimum(q.position[query] + q.length[query], q1[span])
    begin = np.maximum(k0[span], row + lo[span])  # columns of the span that these rows see
    end = np.minimum(k1[span], last + hi[span])
    some = begin < end
    span, query, begin, end = span[some], query[some], begin[some], end[some]
    first = np.searchsorted(k.position, begin, side="right") - 1
    count = np.searchsorted(k.position, end) - first
    key = concat_ranges(first, count)
    span, query = np.repeat(span, count), np.repeat(query, count)
    shift = k.position[key] - q.position[query]
    low = np.maximum(lo[span] - shift, 1 - q.length[query])
    high = np.minimum(hi[span] - shift, k.length[key] - 1)
    pair = query * len(k) + key
    order = np.argsort(pair, kind="stable")  # fast: the pairs of a span ascend
    same = np.diff(pair[order]) == 0
    shared = np.zeros(len(pair), bool)
    shared[order[:-1][same]] = shared[order[1:][same]] = True
    (alone,), (others,) = np.nonzero(~shared), np.nonzero(shared)
    others = others[np.lexsort((low[others], pair[others]))]
    joins = (np.diff(pair[others]) == 0) & (low[others][1:] == high[others][:-1] + 1)
    begins = np.concatenate(([True], ~joins))[: len(others)]
    ends = np.concatenate((~joins, [True]))[: len(others)]
    first, last = (np.concatenate((alone, others[x])) for x in (begins, ends))
    return Band(query[first], key[first], low[first], high[last])
