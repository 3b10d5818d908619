"""Plans of a mask: refined, and with clipped spans.

*Refinement* cuts segments where spans of a mask begin and end, so a band covers whole segments of
queries and of keys. Bands of one pair of segments that touch become one. Two bands of one pair that
stay apart need keys of one backward tile. Else a deterministic tile would wait for a later band of
a tile that is fetched after it.

Tiles are partial at each cut. With *clipped spans* the refined segments are merged again, up to
where documents or padding begin, and a band covers a part of its pair of segments. Kernels for
clipped spans alone run such a plan. Ranks exchange the same rows of K/V for both.
"""

from __future__ import annotations

import numpy as np

from ringfa3.masks.mask import Mask
from ringfa3.planning.kv_exchange import KVExchange, PlacedSegments, plan_exchange
from ringfa3.planning.mask_shards import components
from ringfa3.planning.placement.costs import Ints
from ringfa3.planning.sharding import Segments
from ringfa3.planning.tile_schedule import concat_ranges
from ringfa3.planning.tiling import Band, Plan

LEAST_KEY_TILE = 64  # keys of the smallest backward tile of any kernel
TILE = 128  # rows or keys, of the usual tile
WORTH = 1.02  # refined tiles over merged ones from which spans are clipped; an estimate


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
    q = _cut(PlacedSegments.of(queries), spans[:, :2].ravel())
    k = _cut(PlacedSegments.of(keys), spans[:, 2:4].ravel())
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
        refined.clipped = _clipped(mask, refined)
    return refined, exchange


def _clipped(mask: Mask, refined: Plan) -> Plan:
    """The plan of the same tokens with clipped spans, or `refined` if its tiles are hardly more."""
    q0, q1, k0, k1, lo, hi = mask.diagonal_spans.T
    begins = components(mask), _edges(np.maximum(q0, k0 - hi), np.minimum(q1, k1 - lo), 1)
    q, _ = _merged(refined.queries, 0 * refined.queries.row, *begins)
    of_keys = _edges(k0, k1, 0) if mask.cross else begins[0]
    begins = of_keys, _edges(np.maximum(k0, q0 + lo), np.minimum(k1, q1 + hi), 1)
    k, hop = _merged(refined.keys, refined.key_hop, *begins)
    if _tiles(refined.queries) <= WORTH * _tiles(q) and _tiles(refined.keys) <= WORTH * _tiles(k):
        return refined
    return Plan(q, k, hop, _clipped_bands(mask.diagonal_spans, q, k), refined.num_hops)


def _edges(begin: Ints, end: Ints, gap: int) -> Ints:
    """Ends of the runs that intervals [begin, end) cover, where runs are `gap` tokens apart.

    With a gap of 1 they surround padding, which may hold NaN.
    """
    order = np.argsort(begin, kind="stable")
    begin, end = begin[order], np.maximum.accumulate(end[order])
    apart = begin[1:] >= end[:-1] + gap
    return np.concatenate((begin[:1], end[:-1][apart], begin[1:][apart], end[-1:]))


def _merged(segments: Segments, hop: Ints, *begins: Ints) -> tuple[Segments, Ints]:
    """Segments of one hop merged where rows and tokens go on, but not at tokens of `begins`."""
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
    first = np.searchsorted(q.position, q0)
    count = np.searchsorted(q.position, q1) - first
    span = np.repeat(np.arange(len(spans)), count)
    query = concat_ranges(first, count)
    row = q.position[query]
    begin = np.maximum(k0[span], row + lo[span])  # columns of the span that these rows see
    end = np.minimum(k1[span], row + q.length[query] + hi[span])
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
    if (np.diff(np.sort(pair)) > 0).all():  # nothing touches, and a plan orders its bands itself
        return Band(query, key, low, high)
    order = np.lexsort((low, pair))
    query, key, low, high = query[order], key[order], low[order], high[order]
    joins = (np.diff(query) == 0) & (np.diff(key) == 0) & (low[1:] == high[:-1] + 1)
    begins = np.concatenate(([True], ~joins))[: len(low)]
    ends = np.concatenate((~joins, [True]))[: len(low)]
    return Band(query[begins], key[begins], low[begins], high[ends])
