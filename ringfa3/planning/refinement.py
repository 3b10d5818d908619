"""Plans of a mask: refined, and with clipped spans.

*Refinement* cuts segments where spans of a mask begin and end, so a band covers whole segments of
queries and of keys. Where a span ends because its diagonals leave the rectangle, as those of a
causal document do, no cut is needed. Each cut costs partial tiles, and bands grow as query cuts
times key cuts. Bands of one pair of segments that touch become one. Two bands of one pair that stay
apart need keys of one backward tile. Else a deterministic tile would wait for a later band of a
tile that is fetched after it.

Tiles are partial at each cut. With *clipped spans* the refined segments are merged again, up to
where documents or padding begin, and a band covers a part of its pair of segments. Kernels for
clipped spans alone run such a plan. Ranks exchange the same rows of K/V for both. Refined bands are
then made at their first use: 8 bits, deterministic backwards, or launches by messages.

The exchange needs no bands. A span yields one run of keys for each query segment, and runs of a
rank that touch are joined. So 1,000 images in one document do not name the 500,000 pairs of them.
"""

from __future__ import annotations

from dataclasses import astuple
from functools import partial
from typing import NamedTuple

import numpy as np

from ringfa3.masks.mask import Mask
from ringfa3.masks.spans import run_ends
from ringfa3.planning.kv_exchange import KVExchange, PlacedSegments, plan_exchange
from ringfa3.planning.mask_shards import components
from ringfa3.planning.placement.costs import Ints
from ringfa3.planning.sharding import Segments
from ringfa3.planning.tile_schedule import concat_ranges, join_ranges
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
    runs = _Runs.of(spans, q.segments, k.segments)
    shared = _shared_keys(spans, runs, q.segments, k.segments)
    if len(shared):
        begin, length = k.segments.position[shared], k.segments.length[shared]
        tiles = -(-length // LEAST_KEY_TILE)
        k = _cut(k, np.repeat(begin, tiles) + LEAST_KEY_TILE * concat_ranges(0 * tiles, tiles))
        runs = _Runs.of(spans, q.segments, k.segments)
    own = runs.take(np.flatnonzero(q.owner[runs.query] == rank))
    bands = partial(_bands, spans, own, q.segments, k.segments)
    needs = _needs(q.owner[runs.query], runs, k.segments)
    refined, exchange = plan_exchange(q, k, needs, bands, rank, len(queries), grid, alignment)
    if grid == alignment == 1:  # 8 bits need keys on the grid of refined segments
        whole = _whole_segments(mask, refined)
        pairs = (refined.queries, whole[0]), (refined.keys, whole[1])
        if any(_tiles(x) > WORTH * _tiles(y) for x, y in pairs):
            refined.clipped = _clipped(mask, refined, *whole)
    if refined.clipped is refined:
        _ = refined.bands  # now, not at the first call, which needs them
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
    cut = np.zeros(total + 1, bool)  # faster than to sort the cuts, of which many are equal
    cut[whole.position] = cut[cuts] = cut[total] = True
    edges = np.flatnonzero(cut)
    begin = edges[:-1]
    of = np.searchsorted(whole.position, begin, side="right") - 1
    row = whole.row[of] + begin - whole.position[of]
    return PlacedSegments(
        Segments(row, np.diff(edges), np.zeros_like(begin), begin), placed.owner[of]
    )


class _Runs(NamedTuple):
    """(runs,) each: by a span, queries of a segment attend to keys of neighbouring segments.

    first, last  key segments [first, last)
    begin, end   tokens of these, to which some query attends
    """

    span: Ints
    query: Ints
    first: Ints
    last: Ints
    begin: Ints
    end: Ints

    @classmethod
    def of(cls, spans: Ints, q: Segments, k: Segments) -> _Runs:
        q0, q1, k0, k1, lo, hi = spans.T
        first = np.searchsorted(q.position, q0, side="right") - 1
        count = np.searchsorted(q.position, q1) - first
        span = np.repeat(np.arange(len(spans)), count)
        query = concat_ranges(first, count)
        row = np.maximum(q.position[query], q0[span])
        last = np.minimum(q.position[query] + q.length[query], q1[span])
        begin = np.maximum(k0[span], row + lo[span])
        end = np.minimum(k1[span], last + hi[span])
        first = np.searchsorted(k.position, begin, side="right") - 1
        last = np.searchsorted(k.position, end)
        return cls(span, query, first, last, begin, end).take(np.flatnonzero(begin < end))

    def take(self, order: Ints) -> _Runs:
        return _Runs(*(x[order] for x in self))

    def split(self, keys: int) -> tuple[_Runs, _Runs]:
        """Parts of the runs whose pairs of segments are in one run alone, and the others.

        keys: number of key segments.
        """
        begin, end = keys * self.query + self.first, keys * self.query + self.last
        order = np.argsort(begin, kind="stable")  # fast: the runs of a span ascend
        meets = np.zeros(len(order) + 1, bool)
        meets[1:-1] = begin[order][1:] < np.maximum.accumulate(end[order])[:-1]
        meets = meets[1:] | meets[:-1]  # a run before or after it
        alone, several = order[~meets], order[meets]
        if len(several) == 0:
            return self, self.take(several)
        begin, end = begin[several], end[several]
        edges = np.sort(np.concatenate((begin, end)))
        edges = edges[np.diff(edges, prepend=-1) > 0]
        first, last = np.searchsorted(edges, begin), np.searchsorted(edges, end)
        runs = np.bincount(first, minlength=len(edges)) - np.bincount(last, minlength=len(edges))
        at = concat_ranges(first, last - first)
        whole = self.take(np.repeat(several, last - first))
        base = keys * whole.query
        parts = whole._replace(first=edges[at] - base, last=edges[at + 1] - base)
        once = runs.cumsum()[at] == 1
        parts, shared = (parts.take(np.flatnonzero(x)) for x in (once, ~once))
        return _Runs(*map(np.concatenate, zip(self.take(alone), parts, strict=True))), shared


def _needs(reader: Ints, runs: _Runs, k: Segments) -> tuple[Ints, Ints, Ints, Ints]:
    """As in `plan_exchange`. reader: (runs,) the rank of each run.

    Runs of a rank that touch are joined before they meet key segments, for these are many.
    """
    _, reader, begin, end = join_ranges(reader, runs.begin, runs.end)
    first = np.searchsorted(k.position, begin, side="right") - 1
    count = np.searchsorted(k.position, end) - first
    of, key = np.repeat(np.arange(len(begin)), count), concat_ranges(first, count)
    begin, end = begin[of] - k.position[key], end[of] - k.position[key]
    return reader[of], key, np.maximum(begin, 0), np.minimum(end, k.length[key])


def _shared_keys(spans: Ints, runs: _Runs, q: Segments, k: Segments) -> Ints:
    """Key segments of which some pair with a query segment has bands that do not touch."""
    bands = _unite(_bands_of(spans, runs.split(len(k))[1], q, k))
    apart = (np.diff(bands.query) == 0) & (np.diff(bands.key) == 0)
    return np.unique(bands.key[:-1][apart])


def _bands(spans: Ints, runs: _Runs, q: Segments, k: Segments) -> Band:
    """The bands of all pairs of segments. Those of one pair are neighbours, by diagonal."""
    alone, shared = (_bands_of(spans, x, q, k) for x in runs.split(len(k)))
    shared = _unite(shared)
    pairs = zip(astuple(alone)[:4], astuple(shared)[:4], strict=True)
    return Band(*map(np.concatenate, pairs))


def _bands_of(spans: Ints, runs: _Runs, q: Segments, k: Segments) -> Band:
    """A band for each key segment of each run."""
    count = runs.last - runs.first
    key = concat_ranges(runs.first, count)
    query, span = np.repeat(runs.query, count), np.repeat(runs.span, count)
    shift = k.position[key] - q.position[query]
    lo = np.maximum(spans[span, 4] - shift, 1 - q.length[query])
    hi = np.minimum(spans[span, 5] - shift, k.length[key] - 1)
    return Band(query, key, lo, hi)


def _unite(bands: Band) -> Band:
    """Bands of one pair of segments that touch become one. Ordered by pair and diagonal."""
    bands = bands.take(np.lexsort((bands.lo, bands.key, bands.query)))
    apart = (np.diff(bands.query) != 0) | (np.diff(bands.key) != 0)
    apart |= bands.lo[1:] != bands.hi[:-1] + 1
    begins = np.concatenate(([True], apart))[: len(bands)]
    ends = np.concatenate((apart, [True]))[: len(bands)]
    return Band(bands.query[begins], bands.key[begins], bands.lo[begins], bands.hi[ends])
