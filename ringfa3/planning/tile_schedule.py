"""Tile schedules: the tiles that launches fetch, and the spans that these index."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ringfa3.planning.placement.costs import Ints

SPAN = np.dtype(
    [
        ("q0", np.int32),  # rows [q0, q1) of the local queries
        ("q1", np.int32),
        ("k0", np.int32),  # columns [k0, k1) of this hop's keys
        ("k1", np.int32),
        ("lo", np.int32),  # band, always finite: -(q1-q0-1) <= lo <= hi <= k1-k0-1
        ("hi", np.int32),
        ("arrival", np.int32),  # the arrival flag that these keys wait for; 0: none
        ("padded_q0", np.int32),  # q0 in padded rows, see `Plan.padded_rows`
    ]
)
# A span of a plan with clipped spans: tiles that visit it may reach beyond it.
CLIPPED_SPAN = np.dtype(
    [
        *SPAN.descr,
        ("q_end", np.int32),  # the ends of the query and of the key segment
        ("k_end", np.int32),
    ]
)
# What a forward tile needs of a clipped span that it visits, as in csrc/plan/spans.h.
VISIT = np.dtype(
    [
        ("begin", np.int32),  # columns of the span
        ("end", np.int32),
        ("low", np.int32),  # row r of the tile attends to columns [low + r, high + r] of these
        ("high", np.int32),
        ("key_row", np.int32),  # the span's first key
        ("keys", np.int32),  # from there to the end of the segment
        ("arrival", np.int32),
        ("first_row", np.int32),  # rows of the tile that are the span's
        ("end_row", np.int32),  # EVERY_ROW if the last row is one
    ]
)
EVERY_ROW = 1 << 30
TILE = np.dtype(
    [
        ("row0", np.int32),  # rows [row0, row0+rows): queries forward, keys backward
        ("rows", np.int32),
        ("first_span", np.int32),  # visits spans [first_span, first_span+num_spans)
        ("num_spans", np.int32),
        ("flags", np.int32),
        ("padded_row0", np.int32),  # forward: row0 in padded rows; backward: row0
    ]
)
MAX_ROWS = 1 << 31  # of all queries or keys of a plan: the tables hold rows as int32
# Flags of a forward tile. FIRST: no earlier hop visits its rows, so it stores instead of merging.
# LAST: no later hop visits them, so it also writes the output dtype. Backward tiles have no flags:
# a hop stores dK/dV of all its keys, zeros for keys to which no query attends.
FIRST, LAST = 1, 2

Table = npt.NDArray[np.void]


@dataclass(frozen=True, eq=False)
class Tiling:
    """Tiles of one hop, in fetch order, and the spans that they index.

    size      rows of a full tile
    tiles     (num_tiles,) TILE
    spans     (num_spans,) SPAN, or CLIPPED_SPAN
    earlier   deterministic backward: (num_spans,) int32, the span of the same query rows whose key
              tiles come right before those of this span in fetch order, -1 for none; else empty
    hop       its number
    schedule  of all hops of the plan; None if the tiling belongs to no plan
    """

    size: int
    tiles: Table
    spans: Table
    earlier: npt.NDArray[np.int32]
    hop: int = 0
    schedule: TileSchedule | None = None

    def tilings(self) -> list[Tiling]:
        """As `TileSchedule.tilings`, of this hop alone."""
        return [self]

    @property
    def clips(self) -> bool:
        """Whether a tile may reach beyond its spans: kernels for clipped spans alone run it."""
        return self.spans.dtype == CLIPPED_SPAN

    def visits(self, axis: str) -> tuple[Ints, Table, Ints, Ints]:
        """(tile, span, begin, end) of all visits, in the order of kernels.

        axis: "q" forward, "k" backward: the tile has rows, or keys, [begin, end) of the span.
        """
        tile = np.repeat(np.arange(len(self.tiles)), self.tiles["num_spans"])
        span = self.spans[concat_ranges(self.tiles["first_span"], self.tiles["num_spans"])]
        begin = self.tiles["row0"][tile].astype(np.int64) - span[axis + "0"]
        end = np.minimum(begin + self.tiles["rows"][tile], span[axis + "1"] - span[axis + "0"])
        return tile, span, np.maximum(begin, 0), end

    def visited_columns(self) -> Ints:
        """(num_tiles,) columns that each tile of a forward visits."""
        return np.bincount(*self.visit_columns(), len(self.tiles)).astype(np.int64)

    def visit_columns(self) -> tuple[Ints, Ints]:
        """(tile, number of columns) of all visits of a forward."""
        tile, span, i, end_row = self.visits("q")
        begin = np.maximum(0, i + span["lo"])
        end = np.minimum(span["k1"] - span["k0"], end_row + span["hi"])
        return tile, np.maximum(0, end - begin)

    def span_visits(self) -> Table:
        """(num_spans,) VISIT of a forward with clipped spans, which no tiles share."""
        tile, span, i, end_row = self.visits("q")
        table = np.zeros(len(self.spans), VISIT)
        at = concat_ranges(self.tiles["first_span"], self.tiles["num_spans"])
        row0 = self.tiles["row0"][tile].astype(np.int64) - span["q0"]
        last = end_row - row0 == self.tiles["rows"][tile]
        columns = {
            "begin": np.maximum(0, i + span["lo"]),
            "end": np.minimum(span["k1"] - span["k0"], end_row + span["hi"]),
            "low": row0 + span["lo"],
            "high": row0 + span["hi"],
            "key_row": span["k0"],
            "keys": span["k_end"] - span["k0"],
            "arrival": span["arrival"],
            "first_row": i - row0,
            "end_row": np.where(last, EVERY_ROW, end_row - row0),
        }
        for name, column in columns.items():
            table[name][at] = column
        return table

    def visiting_key_tiles(self, span: int, block: int, tile_m: int) -> tuple[int, int]:
        """Backward: key tiles [first, end) of a span that visit its row block number `block`."""
        s = self.spans[span]
        rows, keys = int(s["q1"] - s["q0"]), int(s["k1"] - s["k0"])
        i = block * tile_m
        begin = max(0, i + int(s["lo"]))
        end = min(keys, min(i + tile_m, rows) + int(s["hi"]))
        return (begin // self.size, -(-end // self.size)) if begin < end else (0, 0)

    def dq_order(self, span: int, key_tile: int, block: int, tile_m: int) -> int:
        """Deterministic backward: tiles that add to a dQ block before `key_tile` of a span."""
        order = self.visiting_key_tiles(span, block, tile_m)[1] - 1 - key_tile
        other = int(self.earlier[span])
        while other >= 0:
            begin, end = self.visiting_key_tiles(other, block, tile_m)
            order += end - begin
            other = int(self.earlier[other])
        return order


@dataclass(frozen=True, eq=False)
class TileSchedule:
    """The tilings of all hops of a plan, in one direction, as parts of one table each.

    size                   rows of a full tile
    tiles, spans, earlier  as in `Tiling`, hop by hop; tiles index the spans of their own hop
    tile_ends, span_ends   (hops + 1,) where the tiles and spans of each hop begin, then the ends
    """

    size: int
    tiles: Table
    spans: Table
    earlier: npt.NDArray[np.int32]
    tile_ends: Ints
    span_ends: Ints

    def tilings(self) -> list[Tiling]:
        """Of all hops. They hold the schedule, which does not hold them: no cycle delays its end,
        and that of its tables in device memory."""
        tiles, spans = (_slices(ends) for ends in (self.tile_ends, self.span_ends))
        return [
            Tiling(self.size, self.tiles[t], self.spans[s], self.earlier[s], hop, self)
            for hop, (t, s) in enumerate(zip(tiles, spans, strict=True))
        ]


def _slices(ends: Ints) -> list[slice]:
    return [slice(a, b) for a, b in itertools.pairwise(ends.tolist())]


def concat_ranges(begin: Ints, count: Ints) -> Ints:
    """The ranges [begin[i], begin[i] + count[i]), concatenated."""
    offset = np.repeat(begin - (np.cumsum(count) - count), count)
    return offset + np.arange(len(offset))


def join_ranges(group: Ints, begin: Ints, end: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """Ranges [begin, end) of each group, joined where they touch or overlap.

    Args: (n,) each, at least 0 and below 2^31.

    Returns:
        (n,) the number of the joined range that holds each one; group, begin and end of the joined
        ranges, ordered by group and begin.
    """
    order = np.lexsort((begin, group))
    base = group[order] << 32
    reached = np.maximum.accumulate(base + end[order])
    starts = np.ones(len(order), bool)
    starts[1:] = base[1:] + begin[order][1:] > reached[:-1]
    joined = np.empty_like(order)
    joined[order] = np.cumsum(starts) - 1
    first = order[starts]
    last = np.zeros(len(first), np.int64)
    np.maximum.at(last, joined, end)
    return joined, group[first], begin[first], last


def by_cost(cost: Ints, segment: Ints) -> tuple[Ints, Ints, Ints]:
    """Keys of `np.lexsort` that put tiles with most cost first, but those of a segment together if
    their costs are in one quarter of an octave: they read the same rows, which the L2 cache holds.
    On an H200 45 documents of up to 16k are 6% faster so. Forwards are not: their blocks are read
    once for many heads, and short documents lose 2%.
    """
    mantissa, exponent = np.frexp(cost.astype(np.float64))  # exact: costs are below 2^53
    quarter = 4 * exponent.astype(np.int64) + np.floor(8 * mantissa).astype(np.int64)
    return -cost, segment, -quarter


def launch_parts(waiting: npt.NDArray[np.bool_], cost: Ints) -> Ints:
    """(tiles,) 0 for tiles that a launch starts with, 1 for those that wait for keys, 2 for the
    cheapest of the others, which even out the ends of CTAs: up to an eighth of all columns, and up
    to half of those of tiles that do not wait. All 0 if no tile waits."""
    if not waiting.any():
        return np.zeros(len(cost), np.int64)
    (others,) = np.nonzero(~waiting)
    others = others[np.argsort(cost[others], kind="stable")]
    work = np.cumsum(cost[others])
    part = waiting.astype(np.int64)
    if len(others):
        part[others[work <= min(cost.sum() // 8, work[-1] // 2)]] = 2
    return part
