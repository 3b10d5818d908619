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
    spans     (num_spans,) SPAN
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

    def visited_columns(self) -> Ints:
        """(num_tiles,) columns that each tile of a forward visits."""
        tile = np.repeat(np.arange(len(self.tiles)), self.tiles["num_spans"])
        span = self.spans[concat_ranges(self.tiles["first_span"], self.tiles["num_spans"])]
        here = self.tiles[tile]
        i = here["row0"].astype(np.int64) - span["q0"]
        begin = np.maximum(0, i + span["lo"])
        end = np.minimum(span["k1"] - span["k0"], i + here["rows"] + span["hi"])
        columns = np.bincount(tile, np.maximum(0, end - begin), len(self.tiles))
        return columns.astype(np.int64)

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
