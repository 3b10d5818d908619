"""Plans of a mask: refined, and with clipped spans.

*Refinement* cuts segments where spans of a mask begin and end, so a band covers whole segments of
queries and of keys. Where a span ends because its diagonals leave the rectangle, as those of a
causal document do, no cut is needed. Each cut costs partial tiles, and bands grow as query cuts
times key cuts. Bands of one pair of segments that touch become one. Two bands of one pair that stay
apart need keys of one backward tile. Else a deterministic tile would wait for a later band of a
tile that is fetched after it.

Tiles are partial at each cut. With *clipped spans* the refined segments are merged again, up to
where documents or padding begin, and a band covers a part of its pair of segments. Kernels for
clipped spans alone run such a plan. Ranks exchange the same rows of K/V for both.
"""

from __future__ import annotations

import numpy as np

from ringfa3.masks.mask import Mask
from ringfa3.masks.spans import run_ends
from ringfa3.planning.kv_exchange import KVExchange, PlacedSegments, plan_exchange
from ringfa3.planning.mask_shards import components
from ringfa3.planning.placement.costs import Ints
from ringfa3.planning.sharding import Segments
from ringfa3.planning.tile_schedule import concat_ranges
from ringfa3.planning.tiling import Band, Plan

LEAST_KEY_TILE = 64  # keys of the smallest backward tile of any kernel
TILE = 128  # rows or keys, of the usual tile
WORTH = 1.02  # spans are clipped if refined tiles are more than this times merged ones; an estimate


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
    refined, exchange = plan_exchange(q, k, bands, rank, len(queries), grid, alignment)
    if grid == alignment == 1:  # 8 bits need keys on the grid of refined segments
        whole = _whole_segments(mask, refined)
        pairs = (refined.queries, whole[0]), (refined.keys, whole[1])
        if any(_tiles(x) > WORTH * _tiles(y) for x, y in pairs):
            refined.clipped = _clipped(mask, refined, *whole)
    return refined, exchange


def clip_launches(mask: Mask | None, hops: Plan, launches: Plan) -> None:
    """Sets `launches.clipped`, of launches by messages, if the hops have clipped spans."""
    if mask is not None and hops.clipped.clips:
        launches.clipped = _clipped(mask, launches, *_whole_segments(mask, launches))


def _clipped(mask: Mask, refined: Plan, q: Segments, k: Segments, hop: Ints) -> Plan:
    """The plan of the same tokens with clipped spans, in segments of `_whole_segments`."""
    return Plan(q, k, hop, _clipped_bands(mask.diagonal_spans, q, k), refined.num_hops)


def _whole_segments(mask: Mask, refined: Plan) -> tuple[Segments, Segments, Ints]:
    """The segments of queries and of keys, merged up to where components or padding begin, and the
    hops of the keys."""
    q0, q1, k0, k1, lo, hi = mask.diagonal_spans.T
    begins = components(mask)
    ends = _padding_ends(np.maximum(q0, k0 - hi), np.minimum(q1, k1 - lo))
    q, _ = _merged(refined.queries, 0 * refined.queries.row, begins, ends)
    if mask.cross:
        begins = np.concatenate(run_ends(k0, k1))
    ends = _padding_ends(np.maximum(k0, q0 + lo), np.minimum(k1, q1 + hi))
    return q, *_merged(refined.keys, refined.key_hop, begins, ends)


def _padding_ends(begin: Ints, end: Ints) -> Ints:
    """Where tokens in no range [begin, end) begin and end. They are padding, which may hold NaN."""
    begin, end = run_ends(begin, end + 1)  # ranges that touch are one run
    return np.concatenate((begin, end - 1))


def _merged(segments: Segments, hop: Ints, *begins: Ints) -> tuple[Segments, Ints]:
    """Segments of a hop merged where rows and tokens go on, but not at tokens of `begins`."""
    row, position, end = segments.row, segments.position, segments.position + segments.length
    joins = (row[1:] == row[:-1] + segments.length[:-1]) & (position[1:] == end[:-1])
    joins &= (hop[1:] == hop[:-1]) & ~np.isin(position[1:], np.concatenate(begins))
    first = np.flatnonzero(np.concatenate((np.ones(min(1, len(row)), bool), ~joins)))
    length = np.add.reduceat(segments.length, first) if len(first) else segments.length
    return Segments(row[first], length, segments.sequence[first], position[first]), hop[first]


def _tiles(segments: Segments) -> int:
    return int((-(-segments.length // TILE)).sum())


def _clipped_bands(spans: Ints, q: Segments, k: Segments) -> Band:
    """The bands of all spans in all pairs of segments. Segments need not have all tokens."""
    query, span = _touching(q, spans[:, 0], spans[:, 1])
    q0, q1, k0, k1, lo, hi = spans[span].T
    q0 = np.maximum(q0, q.position[query])
    q1 = np.minimum(q1, q.position[query] + q.length[query])
    key, of = _touching(k, np.maximum(k0, q0 + lo), np.minimum(k1, q1 + hi))
    query, q0, q1, k0, k1, lo, hi = (x[of] for x in (query, q0, q1, k0, k1, lo, hi))
    k0 = np.maximum(k0, k.position[key])
    k1 = np.minimum(k1, k.position[key] + k.length[key])
    shift = k0 - q0
    lo, hi = np.maximum(lo - shift, q0 - q1 + 1), np.minimum(hi - shift, k1 - k0 - 1)
    kept = (lo <= hi) & (lo < k1 - k0) & (hi > q0 - q1)
    row, column = q.position[query], k.position[key]
    clip = np.stack((q0 - row, q1 - row, k0 - column, k1 - column), axis=1)
    return Band(query, key, lo, hi, clip).take(np.flatnonzero(kept))


def _touching(segments: Segments, begin: Ints, end: Ints) -> tuple[Ints, Ints]:
    """(segment, i) of all pairs of a segment and tokens [begin[i], end[i]) with a common token."""
    order = np.argsort(segments.position, kind="stable")
    first_token = segments.position[order]
    first = np.searchsorted(first_token + segments.length[order], begin, side="right")
    count = np.maximum(np.searchsorted(first_token, end) - first, 0) * (begin < end)
    return order[concat_ranges(first, count)], np.repeat(np.arange(len(begin)), count)


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
