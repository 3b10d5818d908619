"""How the work of a backward hop is dealt out to CTAs: whole key tiles, or portions of them.

A key tile for one KV head, with all query heads of its group, is one piece of work: its dK and dV
never leave the registers. Where such pieces are too few to fill the GPU, or have very many heads,
all tiles are cut alike, first between query heads and then between blocks of rows, and the portions
of a tile add up in float32.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator

import numpy as np

from ringfa3.planning.sharding import Ints
from ringfa3.planning.tiling import Table, Tiling, ramps

PORTION = np.dtype(
    [
        ("row0", np.int32),  # keys [row0, row0+rows)
        ("rows", np.int32),
        ("first_span", np.int32),
        ("flags", np.int32),  # SHARED or none
        ("first_head", np.int32),  # query heads [first_head, first_head+num_heads) of a group
        ("num_heads", np.int32),
        ("skip", np.int32),  # of the blocks of rows that the tile visits, [skip, skip+blocks)
        ("blocks", np.int32),  # at least one: tiles that see nothing are no work
    ]
)
SHARED = 4  # the only flag: other portions add to the same keys

FULL = 0.95  # of the GPU's time that whole tiles must fill to stay whole
# In blocks of rows: what a portion takes beside its blocks, and what adding up takes more.
SETUP, REDUCE = 2, 2
# Tiles of more than so many heads are cut to so many, or three, for the sake of caches: on an H200,
# 8k tokens causal, 8% are gained from 32 heads to 4, 6% from 16 to 4, and 4% lost from 4 to 2.
MANY_HEADS, FEW_HEADS = 8, 4
LONG = 64  # blocks of a typical piece from which on this outweighs adding up
WAVES = 4  # pieces for each processor from which on no more is cut: the order of fetching evens out


def portions(
    tiling: Tiling, tile_m: int, group: int, kv_heads: int, num_ctas: int, whole: bool = False
) -> Table:
    """The portions of a hop's tiles, in the tiles' order; none of tiles that see nothing.

    Args:
        tiling: of the backward.
        tile_m: rows of a block.
        group, kv_heads: query heads of a KV head, and KV heads; each runs every portion.
        num_ctas: how many run at once.
        whole: nothing is cut, as deterministic sums need it.
    """
    blocks = visited_blocks(tiling, tile_m)
    uncut = _cut(tiling, blocks, group, 1, 1)
    if whole:
        return uncut
    work = int(blocks.sum())
    typical = int((blocks * blocks).sum()) / max(1, work)  # blocks of a tile, by work
    cuts = [(1, 1), *_cuts(group, int(blocks.max(initial=0)))]
    few = [cut for cut in cuts if 2 < group // cut[0] <= FEW_HEADS]
    if few and group > MANY_HEADS and typical * FEW_HEADS >= LONG:
        cuts = cuts[cuts.index(few[0]) :]
    best, least = uncut, math.inf
    for heads, rows in cuts:
        table = uncut if (heads, rows) == (1, 1) else _cut(tiling, blocks, group, heads, rows)
        if len(table) * kv_heads >= WAVES * num_ctas and least == math.inf:
            return table
        makespan = _makespan(table, kv_heads, num_ctas)
        if makespan < least:
            best, least = table, makespan
        if work * group * kv_heads >= FULL * least * num_ctas:
            break
    return best


def visited_blocks(tiling: Tiling, tile_m: int) -> Ints:
    """(num_tiles,) blocks of `tile_m` rows that each key tile visits, for one head."""
    tiles = tiling.tiles
    tile = np.repeat(np.arange(len(tiles)), tiles["num_spans"])
    span = tiling.spans[ramps(tiles["first_span"], tiles["num_spans"])]
    here = tiles[tile]
    j = here["row0"].astype(np.int64) - span["k0"]
    begin = np.maximum(0, j - span["hi"])
    end = np.minimum(span["q1"] - span["q0"], j + here["rows"] - span["lo"])
    blocks = np.where(begin < end, -(-end // tile_m) - begin // tile_m, 0)
    return np.bincount(tile, blocks, len(tiles)).astype(np.int64)


def _cuts(group: int, blocks: int) -> Iterator[tuple[int, int]]:
    """(parts of the group, parts of the rows) to try, ever finer."""
    yield from ((n, 1) for n in range(2, group + 1) if group % n == 0)
    yield from ((group, 2**i) for i in range(1, math.ceil(math.log2(max(blocks, 1))) + 1))


def _cut(tiling: Tiling, blocks: Ints, group: int, heads: int, rows: int) -> Table:
    """Portions with every tile in `heads` parts of its group and at most `rows` of its blocks."""
    row_parts = np.minimum(blocks, rows)
    count = row_parts * heads
    tile = np.repeat(np.arange(len(count)), count)
    index = ramps(np.zeros(len(count), np.int64), count)
    head, row = index // row_parts[tile], index % row_parts[tile]
    table = np.zeros(len(tile), PORTION)
    for name in ("row0", "rows", "first_span"):
        table[name] = tiling.tiles[name][tile]
    table["flags"] = np.where(count[tile] > 1, SHARED, 0)
    table["first_head"] = group // heads * head
    table["num_heads"] = group // heads
    table["skip"] = blocks[tile] * row // row_parts[tile]
    table["blocks"] = blocks[tile] * (row + 1) // row_parts[tile] - table["skip"]
    return table


def _makespan(table: Table, kv_heads: int, num_ctas: int) -> int:
    """Blocks of time until the last portion is done, fetched in order by whoever is free."""
    shared = table["flags"] & SHARED > 0
    costs = table["blocks"] * table["num_heads"] + SETUP + np.where(shared, REDUCE, 0)
    free = [0] * num_ctas
    for cost in np.repeat(costs, kv_heads).tolist():
        heapq.heapreplace(free, free[0] + cost)
    return max(free)
