"""Spans, which describe a mask, and tilings, which list the tiles that a launch fetches.

A *span* is a rectangle of the score matrix with a diagonal band on it: row r of [q0, q1) attends
to column c of [k0, k1) iff lo <= (c - k0) - (r - q0) <= hi. Every mask is a list of spans.

A plan has two levels. Spans are independent of kernels. A *tiling* is derived from them for one
direction and tile shape: a forward tile is a run of query rows and visits the columns of spans, a
backward tile is a run of keys and visits their rows. Kernels fetch tiles in the order of the tiling
and have no schedule of their own.

A plan covers all *hops* of one rank. At hop t the rank attends to K/V of rank (rank - t) % world;
hop 0 is its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from ringfa3.planning.placement.costs import Ints
from ringfa3.planning.sharding import Segments, whole_sequences
from ringfa3.planning.tile_schedule import (
    CLIPPED_SPAN,
    FIRST,
    LAST,
    MAX_ROWS,
    SPAN,
    TILE,
    Table,
    TileSchedule,
    Tiling,
    by_cost,
    concat_ranges,
    launch_parts,
)


@dataclass(frozen=True)
class Band:
    """Pairs of a query and a key segment, and the band in which queries attend to keys.

    All arrays have one length; lo and hi as in SPAN. With `clip` a band covers a part of its
    segments, and a pair of segments may have several.
    """

    query: Ints  # index of the query segment
    key: Ints  # index of the key segment
    lo: Ints
    hi: Ints
    clip: Ints | None = None  # (n, 4): rows [a, b) of the query segment, keys [c, d) of the other

    def __len__(self) -> int:
        return len(self.query)

    def take(self, order: Ints) -> Band:
        clip = None if self.clip is None else self.clip[order]
        return Band(self.query[order], self.key[order], self.lo[order], self.hi[order], clip)

    def columns(self, queries: Segments, keys: Segments, alignment: int) -> tuple[Ints, Ints]:
        """(begin, end) of the columns to which queries attend, within each pair's key segment.

        alignment: begin is rounded down to a multiple.
        """
        begin = np.maximum(self.lo, 0)
        end = np.minimum(keys.length[self.key], queries.length[self.query] + self.hi)
        return begin - begin % alignment, end


def pair_sequences(q: Segments, k: Segments) -> tuple[Ints, Ints]:
    """All (query segment, key segment) of the same sequence; `k.sequence` must be sorted."""
    begin = np.searchsorted(k.sequence, q.sequence, side="left")
    count = np.searchsorted(k.sequence, q.sequence, side="right") - begin
    query = np.repeat(np.arange(len(q)), count)
    return query, concat_ranges(begin, count)


def band(
    q: Segments, k: Segments, query: Ints, key: Ints,
    diagonal_offset: Ints | int, left: int, right: int,
) -> Band:  # fmt: skip
    """The bands of segment pairs, without pairs that are fully masked.

    diagonal_offset: key length minus query length, per sequence or one number, so that diagonals
    end at the bottom right. left, right: window, -1 for unlimited.
    """
    left, right = min(left, MAX_ROWS), min(right, MAX_ROWS)  # a window of 2^63 - 1 would wrap
    nq, nk, delta = q.length[query], k.length[key], q.position[query] - k.position[key]
    offset = diagonal_offset
    delta = delta + (offset if isinstance(offset, int) else offset[q.sequence[query]])
    lo = 1 - nq if left < 0 else np.maximum(delta - left, 1 - nq)
    hi = nk - 1 if right < 0 else np.minimum(delta + right, nk - 1)
    visible = (hi > -nq) & (lo < nk) & (lo <= hi)
    return Band(query[visible], key[visible], lo[visible], hi[visible])


def _hop_ends(hop: Ints, num_hops: int) -> Ints:
    """(num_hops + 1,) where the entries of each hop begin, and where those of the last one end."""
    return np.searchsorted(hop, np.arange(num_hops + 1))


class Plan:
    """Spans of one rank over all its hops, and their tilings, which are made on demand and cached.

    queries    local query segments
    keys       key segments of all hops, hop by hop; rows count within their hop's buffer
    key_hop    (len(keys),) hop of each key segment
    bands      the pairs that are not fully masked, or a function that makes them, without clip, for
               the first tiling; it can be pickled
    num_hops   hops without keys included
    arrival    (len(keys),) arrival flag that each key segment waits for; default 0, none
    """

    def __init__(
        self,
        queries: Segments,
        keys: Segments,
        key_hop: Ints,
        bands: Band | Callable[[], Band],
        num_hops: int,
        arrival: Ints | None = None,
    ) -> None:
        self.arrival = np.zeros(len(keys), np.int64) if arrival is None else arrival
        self.queries, self.keys, self.key_hop = queries, keys, key_hop
        self.num_hops = num_hops
        self.clips = False  # as `Tiling.clips`, of all its tilings
        if isinstance(bands, Band):
            self.bands, self.clips = self._ordered(bands), bands.clip is not None
        else:
            self._make_bands = bands
        self._tilings: dict[tuple[int, ...], list[Tiling]] = {}
        self._single: dict[int, bool] = {}
        self._gathered: list[Plan] = []  # one; if two threads make it, the first
        self._scores: dict[tuple[int, int], int] = {}
        self._clipped: Plan | None = None

    def __getstate__(self) -> dict[str, object]:
        """Copies of what other threads may extend: a data loader sends plans on a thread."""
        state = self.__dict__.copy().items()
        return {name: x.copy() if isinstance(x, (dict, list)) else x for name, x in state}

    @cached_property
    def bands(self) -> Band:
        return self._ordered(self._make_bands())

    def _ordered(self, bands: Band) -> Band:
        """By hop, query segment, arrival flag and first key."""
        key = bands.key
        begin = self.keys.position[key] + (0 if bands.clip is None else bands.clip[:, 2])
        return bands.take(np.lexsort((begin, self.arrival[key], bands.query, self.key_hop[key])))

    def gathered(self, first_row: Callable[[], Ints]) -> Plan:
        """One forward launch for all hops: K/V of hop t start at row first_row()[t] of one buffer.

        Spans of hop t wait for arrival flag t; a tile visits them in the order of the hops. It is
        one object: context plans that share this one find the same tables, also in a capture.
        """
        if not self._gathered:
            k, hop = self.keys, self.key_hop
            keys = Segments(k.row + first_row()[hop], k.length, k.sequence, k.position)
            bands = self.bands if "bands" in self.__dict__ else self._make_bands
            made = Plan(self.queries, keys, np.zeros_like(hop), bands, 1, hop)
            if self._clipped is not None:
                made.clipped = self._clipped.gathered(first_row)
            self._gathered.append(made)
        return self._gathered[0]

    @property
    def clipped(self) -> Plan:
        """The plan of the same tokens with clipped spans, if they save tiles, else this one."""
        return self._clipped or self

    @clipped.setter
    def clipped(self, plan: Plan) -> None:
        self._clipped = None if plan is self else plan  # a cycle would delay the plan's end

    def of_backward(self, precision: str, deterministic: bool) -> Plan:
        """The plan whose tiles a backward runs: `clipped` in 16 bits with dQ in any order."""
        return self.clipped if precision == "native" and not deterministic else self

    def padded_rows(self, tile_m: int) -> Ints:
        """(segments + 1,) padded row at which each query segment starts; the last is their total.

        All hops share these rows: LSE, D and the fp32 dQ of the backward live in it.
        """
        padded = -(-self.queries.length // tile_m) * tile_m
        return np.concatenate(([0], np.cumsum(padded)))

    def _spans(self, tile_m: int) -> Table:
        b, q, k = self.bands, self.queries, self.keys
        spans = np.zeros(len(b), SPAN if b.clip is None else CLIPPED_SPAN)
        spans["q0"], spans["q1"] = q.row[b.query], q.row[b.query] + q.length[b.query]
        spans["k0"], spans["k1"] = k.row[b.key], k.row[b.key] + k.length[b.key]
        spans["lo"], spans["hi"] = b.lo, b.hi
        spans["arrival"] = self.arrival[b.key]
        spans["padded_q0"] = self.padded_rows(tile_m)[b.query]
        if b.clip is not None:
            spans["q_end"], spans["k_end"] = spans["q1"], spans["k1"]
            for axis, (begin, end) in (("q", b.clip.T[:2]), ("k", b.clip.T[2:])):
                spans[axis + "1"] = spans[axis + "0"] + end
                spans[axis + "0"] += begin.astype(np.int32)
            spans["padded_q0"] += b.clip[:, 0].astype(np.int32)
        return spans

    def _rectangles(self, b: Band) -> Ints:
        """(n, 4): rows [a, b) of its query segment and keys [c, d) of its key segment, by band."""
        if b.clip is not None:
            return b.clip
        zero = np.zeros(len(b), np.int64)
        return np.stack((zero, self.queries.length[b.query], zero, self.keys.length[b.key]), 1)

    def forward(self, tile_m: int) -> list[Tiling]:
        """A tiling for each hop: tiles of `tile_m` query rows, those with most columns first.

        Tiles that wait for keys come after most of the others, which run while those keys arrive.
        """
        return self._cached((tile_m,), lambda: self._forward(tile_m))

    def single_hop(self, tile_m: int) -> bool:
        """Whether every forward tile has all its keys in one hop, so that none merges."""
        if tile_m not in self._single:
            flags = (tiling.tiles["flags"] for tiling in self.forward(tile_m))
            self._single[tile_m] = all(bool((f == FIRST | LAST).all()) for f in flags)
        return self._single[tile_m]

    def forward_scores(self, tile_m: int, tile_n: int) -> int:
        """Scores of a head that a forward in blocks of (tile_m, tile_n) computes, masked or not.

        The columns of a tile count as one run: their last block is whole.
        """
        if (tile_m, tile_n) not in self._scores:
            columns = [tiling.visited_columns() for tiling in self.forward(tile_m)]
            blocks = sum(int((-(-c // tile_n)).sum()) for c in columns)
            self._scores[tile_m, tile_n] = blocks * tile_m * tile_n
        return self._scores[tile_m, tile_n]

    def backward(self, tile_n: int, tile_m: int, deterministic: bool = False) -> list[Tiling]:
        """A tiling for each hop: tiles of `tile_n` keys; `tile_m` rows are a block of padded rows.

        Tiles with most rows first, as `by_cost`; with `deterministic` in descending order of their
        keys, in which `Tiling.dq_order` counts the additions to a dQ block.
        """
        if deterministic and self.clips:
            raise ValueError("clipped spans have no order of additions to dQ: use ContextPlan.hops")
        key = (tile_n, tile_m, int(deterministic))
        return self._cached(key, lambda: self._backward(tile_n, tile_m, deterministic))

    def _cached(self, key: tuple[int, ...], make: Callable[[], list[Tiling]]) -> list[Tiling]:
        if key not in self._tilings:
            self._tilings[key] = make()
        return self._tilings[key]

    def _forward(self, tile_m: int) -> list[Tiling]:
        b, q, hops = self.bands, self.queries, self.num_hops
        per_segment = -(-q.length // tile_m)
        base = np.cumsum(per_segment) - per_segment
        num_rows = int(per_segment.sum())  # tiles of one hop
        hop = self.key_hop[b.key]
        given = hop * num_rows + base[b.query], tile_m, b, self._rectangles(b), hops * num_rows
        first, count, cost, visits = _visits(*given, share=False)
        hop = hop[visits]
        active = (count > 0).reshape(hops, num_rows)
        first_hop = active.argmax(axis=0)  # 0 for a fully masked tile: hop 0 stores it
        last_hop = np.where(active.any(axis=0), hops - 1 - active[::-1].argmax(axis=0), 0)
        tile = np.arange(num_rows)
        flags = np.zeros((hops, num_rows), np.int32)
        flags[first_hop, tile] |= FIRST
        flags[last_hop, tile] |= LAST

        (fetched,) = np.nonzero((count > 0) | (flags.ravel() > 0))
        waits = np.concatenate(([0], np.cumsum(self.arrival[b.key[visits]] > 0)))
        waiting = (waits[first + count] > waits[first])[fetched]
        part = launch_parts(waiting, cost[fetched])
        fetched = fetched[np.lexsort((-cost[fetched], part, fetched // max(num_rows, 1)))]
        segment = np.repeat(np.arange(len(q)), per_segment)
        start = (tile - base[segment]) * tile_m
        row0 = q.row[segment] + start
        rows = np.minimum(tile_m, q.length[segment] - start)
        fetched_hop, at = np.divmod(fetched, max(num_rows, 1))
        tiles = np.zeros(len(fetched), TILE)
        tiles["row0"], tiles["rows"], tiles["padded_row0"] = row0[at], rows[at], at * tile_m
        tiles["num_spans"], tiles["flags"] = count[fetched], flags.ravel()[fetched]
        spans = self._spans(tile_m)[visits]
        span_ends = _hop_ends(hop, hops)
        offset = span_ends[fetched_hop]
        tiles["first_span"] = np.where(count[fetched] > 0, first[fetched] - offset, 0)
        ends = _hop_ends(fetched_hop, hops), span_ends
        return TileSchedule(tile_m, tiles, spans, np.zeros(0, np.int32), *ends).tilings()

    def _backward(self, tile_n: int, tile_m: int, deterministic: bool) -> list[Tiling]:
        k, hops = self.keys, self.num_hops
        by_key = np.argsort(self.bands.key, kind="stable")  # the spans of a key tile are adjacent
        b = self.bands.take(by_key)
        per_segment = -(-k.length // tile_n)
        base = np.cumsum(per_segment) - per_segment
        num_tiles = int(per_segment.sum())  # of all hops
        swapped = replace(b, lo=-b.hi, hi=-b.lo)
        rectangles = self._rectangles(b)[:, [2, 3, 0, 1]]
        given = base[b.key], tile_n, swapped, rectangles, num_tiles
        first, count, cost, visits = _visits(*given, share=True)
        segment = np.repeat(np.arange(len(k)), per_segment)
        start = (np.arange(num_tiles) - base[segment]) * tile_n
        rows = np.minimum(tile_n, k.length[segment] - start)
        hop = self.key_hop[segment]
        order = (-np.arange(num_tiles),) if deterministic else by_cost(cost, segment)
        fetched = np.lexsort((*order, hop))

        tiles = np.zeros(len(fetched), TILE)
        tiles["row0"] = tiles["padded_row0"] = (k.row[segment] + start)[fetched]
        tiles["rows"], tiles["num_spans"] = rows[fetched], count[fetched]
        spans = self._spans(tile_m)[by_key[visits]]
        offset = _hop_ends(self.key_hop[b.key[visits]], hops)
        tiles["first_span"] = np.where(count[fetched] > 0, first[fetched] - offset[hop[fetched]], 0)
        earlier = np.zeros(0, np.int32)
        if deterministic:
            earlier = _earlier(self.key_hop[b.key], b.query, b.key, offset)
        ends = _hop_ends(hop[fetched], hops), offset
        return TileSchedule(tile_n, tiles, spans, earlier, *ends).tilings()


def _earlier(hop: Ints, query: Ints, key: Ints, offset: Ints) -> npt.NDArray[np.int32]:
    """`Tiling.earlier`: per span the next one of the same hop and query segment, or -1. A tile adds
    bands of one pair of segments in their own order. offset: (hops,) first span of each hop.
    """
    at = np.arange(len(hop))
    order = np.lexsort((-at, key, query, hop))
    following = np.full(len(hop), -1, np.int64)
    same = (hop[order][1:] == hop[order][:-1]) & (query[order][1:] == query[order][:-1])
    following[order[:-1][same]] = order[1:][same] - offset[hop[order[:-1][same]]]
    return following.astype(np.int32)


def _visits(
    base: Ints, size: int, bands: Band, rectangles: Ints, num_tiles: int, share: bool
) -> tuple[Ints, Ints, Ints, Ints | slice]:
    """The spans that each tile of `size` rows visits, and the cost of the tile.

    A tile of m rows from row i of a span visits columns [max(0, i+lo), min(columns, i+m+hi)).

    Args:
        base: (spans,) number of the first tile of the span's segment.
        rectangles: (spans, 4) rows of that segment that are the span's, and columns.
        share: whether neighbours that visit the same clipped spans share the visits.

    Returns:
        (num_tiles,) each: the first visit, the number of visits from there on, the columns visited.
        The span of each visit: all in order, or with `clip` tile by tile, for spans of a tile are
        no neighbours then.
    """
    before = rectangles[:, 0]
    rows, columns = np.diff(rectangles, axis=1).T[::2]
    first_row, last_row = np.maximum(0, -bands.hi), np.minimum(rows, columns - bands.lo)
    begin, end = (before + first_row) // size, -(-(before + last_row) // size)
    span = np.repeat(np.arange(len(base)), end - begin)
    index = concat_ranges(begin, end - begin)
    i = index * size - before[span]
    end_row = np.minimum(i + size, rows[span])
    i = np.maximum(i, 0)
    high = np.minimum(columns[span], end_row + bands.hi[span])
    visited = high - np.maximum(0, i + bands.lo[span])
    tile = base[span] + index
    cost = np.bincount(tile, visited, num_tiles).astype(np.int64)
    if bands.clip is not None:
        opens = np.full(num_tiles + 1, not share)
        opens[base + begin] = opens[base + end] = True
        run = np.cumsum(opens) - 1  # of tiles that visit the same spans
        here = np.maximum(run[base + end] - run[base + begin], 0)
        in_run = concat_ranges(run[base + begin], here)
        count = np.bincount(in_run, minlength=num_tiles + 1)
        visits = np.repeat(np.arange(len(base)), here)[np.argsort(in_run, kind="stable")]
        first = np.cumsum(count) - count
        return first[run[:-1]], count[run[:-1]], cost, visits
    first = np.zeros(num_tiles, np.int64)
    last = np.full(num_tiles, -1, np.int64)
    first[tile[::-1]] = span[::-1]  # of several spans the last assignment stays: the lowest
    last[tile] = span
    return first, last - first + 1, cost, slice(None)


def plan_local(q_lengths: Ints, k_lengths: Ints, left: int, right: int) -> Plan:
    """The plan of whole sequences on one device: one hop.

    Args:
        q_lengths, k_lengths: (sequences,) int64 tokens of each sequence, zeros allowed.
        left, right: window, -1 for unlimited; causal is right = 0.

    Raises ValueError: `MAX_ROWS` queries or keys.
    """
    for name, lengths in (("q", q_lengths), ("k", k_lengths)):
        if lengths.sum() >= MAX_ROWS:
            raise ValueError(
                f"{name} has {lengths.sum()} tokens in all sequences: the limit is 2^31 - 1; split "
                "the batch"
            )
    q, k = whole_sequences(q_lengths), whole_sequences(k_lengths)
    bands = band(q, k, *pair_sequences(q, k), k_lengths - q_lengths, left, right)
    return Plan(q, k, np.zeros(len(k), np.int64), bands, 1)
