"""Work units of a backward hop: whole key tiles, or parts of them.

A CTA runs a work unit for one KV head at a time: a work item. If the unit is a whole key tile, with
all query heads of the group, dK and dV stay in registers. If whole tiles are too few to fill the
GPU, or have very many heads or rows, the plan splits every tile alike: first between query heads,
then between blocks of rows. A tile that is far longer than the others, such as that of first keys,
to which every query attends, is split between blocks of rows in any case. The units of a tile then
add their dK and dV in float32.

A deterministic backward fetches longest tiles last, so whole tiles leave CTAs idle at its end. It
splits a tile between query heads into two units at most. Two sums, added to 0 in either order, have
the same bits; three do not.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator

import numpy as np

from ringfa3.planning.placement.costs import Ints
from ringfa3.planning.tile_schedule import Table, Tiling, concat_ranges

WORK_UNIT = np.dtype(
    [
        ("row0", np.int32),  # keys [row0, row0+rows)
        ("rows", np.int32),
        ("first_span", np.int32),
        ("flags", np.int32),  # SHARED or none
        ("first_head", np.int32),  # query heads [first_head, first_head+num_heads) of a group
        ("num_heads", np.int32),
        ("skip", np.int32),  # blocks [skip, skip+blocks) of the row blocks that the tile visits
        ("blocks", np.int32),  # at least one: a fully masked tile has no unit
    ]
)
SHARED = 4  # the only flag: other units add to the same keys

FULL = 0.95  # share of the GPU's time that tiles must fill to be split no further
# Fixed cost of a unit, and the cost of adding its dK and dV, in row blocks.
SETUP, REDUCE = 2, 2
# Tiles of more than MANY_HEADS heads are split into units of FEW_HEADS heads, or three, which share
# the L2 cache better. On an H200, 8k tokens causal: 4 heads are 8% faster than 32 and 6% faster
# than 16; 2 heads are 4% slower than 4.
MANY_HEADS, FEW_HEADS = 8, 4
LONG = 64  # row blocks of a typical unit from which this gain exceeds the cost of adding
# Bytes of Q, dO and dQ of a typical unit, from which a unit has one query head and all tiles of a
# head are fetched before those of the next: CTAs drift apart by a part of their unit, and what lies
# between them leaves the L2 cache. On an H200, 32:8 heads of 128, full mask, this is 2% slower at
# 16k tokens (64 MiB), 1% faster at 32k and 2% at 64k; causal 2% at 64k and 128k.
UNIT_BYTES = 160 << 20
# A tile is far longer than the others if it has OUTLIER times the row blocks of a typical one, and
# more than OUTLIER_PART of what a CTA runs. Its units have OUTLIER_UNIT of that. On an H200 the
# backward of a window of 1k with 4 first keys, 64k tokens, takes 0.54 of the time so.
OUTLIER, OUTLIER_PART, OUTLIER_UNIT = 4, 1 / 2, 1 / 8
WAVES = 4  # work items per SM from which nothing is split further: fetching in order evens out


def split_work(
    tiling: Tiling,
    tile_m: int,
    group: int,
    kv_heads: int,
    num_ctas: int,
    head_dim: int,
    deterministic: bool = False,
) -> Table:
    """The work units of a hop's tiles; none for fully masked tiles.

    They have the tiles' order, or, where rows are so long that units have one query head, and in a
    deterministic backward, this order inside of each part of the query heads.

    Args:
        tiling: of the backward.
        tile_m: rows of a block.
        group: query heads of a KV head.
        kv_heads: KV heads; each runs every unit.
        num_ctas: CTAs that run at once.
        head_dim: of Q, dO and dQ.
        deterministic: at most two units a tile, each with all row blocks.
    """
    blocks = visited_blocks(tiling, tile_m)
    uncut = _cut(tiling, blocks, group, 1, 1)
    if deterministic:
        halves = _heads_outer(_cut(tiling, blocks, group, min(2, group), 1))
        of_head = max(1, num_ctas // kv_heads)  # CTAs; one head stands for all
        return min(uncut, halves, key=lambda table: _makespan(_costs(table), 1, of_head))
    work = int(blocks.sum())
    typical = int((blocks * blocks).sum()) / max(1, work)  # blocks of a tile, by work
    share = work * kv_heads / num_ctas  # blocks that a CTA runs, with all heads of a group
    outlier = blocks > max(OUTLIER * typical, OUTLIER_PART * share)
    parts = np.where(outlier, -(-blocks // max(1, int(OUTLIER_UNIT * share))), 1)
    cuts = [(1, 1), *_cuts(group, int(blocks.max(initial=0)))]
    few = [cut for cut in cuts if 2 < group // cut[0] <= FEW_HEADS]
    if few and group > MANY_HEADS and typical * FEW_HEADS >= LONG:
        cuts = cuts[cuts.index(few[0]) :]
    row_bytes = 8 * head_dim  # of Q and dO in 16 bits, and of the float32 dQ
    long = group // cuts[0][0] * typical * tile_m * row_bytes > UNIT_BYTES
    if long:
        cuts = [cut for cut in cuts if cut[0] == group]
    best, least = uncut, math.inf
    for heads, rows in cuts:
        table = _cut(tiling, blocks, group, heads, np.maximum(rows, -(-parts // heads)))
        if long:
            table = _heads_outer(table)
        if len(table) * kv_heads >= WAVES * num_ctas and least == math.inf:
            return table
        costs = _costs(table)
        if int(costs.sum()) * kv_heads >= least * num_ctas:
            break  # the mean of the CTAs, which finer cuts only raise: each unit adds to the costs
        makespan = _makespan(costs, kv_heads, num_ctas)
        if makespan < least:
            best, least = table, makespan
        if work * group * kv_heads >= FULL * least * num_ctas:
            break
    return best


def _heads_outer(table: Table) -> Table:
    """All units of one part of the query heads before those of the next."""
    return table[np.argsort(table["first_head"], kind="stable")]


def visited_blocks(tiling: Tiling, tile_m: int) -> Ints:
    """(num_tiles,) blocks of `tile_m` rows that each key tile visits, for one head."""
    tile, span, j, end_key = tiling.visits("k")
    before = span["padded_q0"] % tile_m  # rows of the first block before the span
    begin = before + np.maximum(0, j - span["hi"])
    end = before + np.minimum(span["q1"] - span["q0"], end_key - span["lo"])
    blocks = np.where(begin < end, -(-end // tile_m) - begin // tile_m, 0)
    return np.bincount(tile, blocks, len(tiling.tiles)).astype(np.int64)


def _cuts(group: int, blocks: int) -> Iterator[tuple[int, int]]:
    """(parts of the group, parts of the rows) to try, ever finer."""
    yield from ((n, 1) for n in range(2, group + 1) if group % n == 0)
    yield from ((group, 2**i) for i in range(1, math.ceil(math.log2(max(blocks, 1))) + 1))


def _cut(tiling: Tiling, blocks: Ints, group: int, heads: int, rows: Ints | int) -> Table:
    """Units of tiles split into `heads` parts of the group and at most `rows` of their blocks.

    rows: (num_tiles,) or one number for all.
    """
    row_parts = np.minimum(blocks, rows)
    count = row_parts * heads
    tile = np.repeat(np.arange(len(count)), count)
    index = concat_ranges(np.zeros(len(count), np.int64), count)
    head, row = index // row_parts[tile], index % row_parts[tile]
    table = np.zeros(len(tile), WORK_UNIT)
    for name in ("row0", "rows", "first_span"):
        table[name] = tiling.tiles[name][tile]
    table["flags"] = np.where(count[tile] > 1, SHARED, 0)
    table["first_head"] = group * head // heads
    table["num_heads"] = group * (head + 1) // heads - table["first_head"]
    table["skip"] = blocks[tile] * row // row_parts[tile]
    table["blocks"] = blocks[tile] * (row + 1) // row_parts[tile] - table["skip"]
    return table


def _costs(table: Table) -> Ints:
    """(num_units,) time of each unit for one KV head, in row blocks."""
    shared = table["flags"] & SHARED > 0
    costs: Ints = table["blocks"] * table["num_heads"] + SETUP + np.where(shared, REDUCE, 0)
    return costs


def _makespan(costs: Ints, kv_heads: int, num_ctas: int) -> int:
    """Time until the last unit is done, in row blocks; a free CTA fetches the next one."""
    free = [0] * num_ctas
    for cost in np.repeat(costs, kv_heads).tolist():
        heapq.heapreplace(free, free[0] + cost)
    return max(free)
