"""Which K/V rows a ring moves at each hop, and how their dK/dV return.

A rank publishes the keys to which queries of other ranks attend: one *run* of keys of each of its
segments. Its *block*, all runs in one buffer, goes around the ring one rank a hop. Runs that travel
farthest lie first, so the rows that any hop sends are a prefix of the buffer: one message.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from ringfa3.planning.placement.costs import Ints
from ringfa3.planning.sharding import Segments
from ringfa3.planning.tile_schedule import concat_ranges
from ringfa3.planning.tiling import Band, Plan, band, pair_sequences

# Tokens of a rank up to which its backward splits the heads of its own keys. Measured: 2 H200 gain
# 3% at 8k tokens and lose 5% at 16k; 2 H200 that rehearse 4 ranks gain 4% at 4k and 0 to 3% at 8k.
MAX_SPLIT_TOKENS = 8192


class RowIndex(NamedTuple):
    """Rows in a given order: a slice where they are consecutive, else an int64 index."""

    rows: slice | torch.Tensor

    @classmethod
    def of(cls, rows: Ints, device: torch.device) -> RowIndex:
        """rows: (n,) row numbers; the index is for tensors on `device`."""
        if len(rows) and (np.diff(rows) == 1).all():
            return cls(slice(int(rows[0]), int(rows[-1]) + 1))
        return cls(torch.from_numpy(rows).to(device))

    def part(self, begin: int, end: int) -> RowIndex:
        """Rows [begin, end) of the index."""
        if isinstance(self.rows, slice):
            return RowIndex(slice(self.rows.start + begin, self.rows.start + end))
        return RowIndex(self.rows[begin:end])

    def gather(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Copies the rows from x (tokens, h, d) to out (n, h, d)."""
        if isinstance(self.rows, slice):
            out.copy_(x[self.rows])
        else:
            torch.index_select(x, 0, self.rows, out=out)

    def add(self, gradients: torch.Tensor, to: torch.Tensor) -> None:
        """Adds (n, ...) to the rows of `to` (tokens, ...)."""
        if isinstance(self.rows, slice):
            to[self.rows].add_(gradients)
        else:
            to.index_add_(0, self.rows, gradients)


class MaxRows(NamedTuple):
    """Maxima over ranks, in rows, for sizing buffers: local K/V; published K/V; gathered K/V;
    returned dK/dV, up to the last row that returns more than once."""

    local: int
    published: int
    gathered: int
    returned: int


class GradReturn(NamedTuple):
    """The dK/dV rows of a rank's block that the peer of one hop returns.

    active_index  number of earlier hops at which the peer computes on another rank's block
    new           runs [begin, end) of rows that no earlier hop returns, in buffer order
    repeated      runs of rows that an earlier hop returns too
    """

    hop: int
    active_index: int
    new: tuple[tuple[int, int], ...]
    repeated: tuple[tuple[int, int], ...]


@dataclass(frozen=True, eq=False)
class KVExchange:
    """Which K/V rows ranks exchange; on a grid of keys, which tiles of the grid.

    rows          (world, world + 1): at hop t >= 1 rank o+t holds the first rows[o, t] rows of rank
                  o's block; rows[o, t] <= rows[o, t-1], and 0 at t = world. rows[o, 0]: o's tokens
    first_active  (world,) first hop >= 1 at which a rank attends to keys of rank o, else `world`
    visible       (world, world, 2): the queries of rank o+t, t >= 1, attend to runs of o's block
                  within rows [begin, end) = visible[o, t]; (0, 0) for none
    published     (rows[rank, 1],) local rows of this rank's block, in buffer order
    """

    rows: Ints
    first_active: Ints
    visible: Ints
    published: Ints

    @cached_property
    def consecutive(self) -> bool:
        """Whether each row of `published` follows the one before."""
        return bool((np.diff(self.published) == 1).all())

    def gathered_layout(self, rank: int) -> tuple[Ints, int]:
        """Where all K/V that a rank attends to lie in one buffer: (first, number of rows).

        As `launch_layout`, of one launch. The rank's own tokens come first.
        """
        first, rows = self.launch_layout(rank, np.zeros(len(self.rows), np.int64))
        return first, int(rows[0])

    def launch_layout(self, rank: int, launch: Ints) -> tuple[Ints, Ints]:
        """Where the K/V of each launch lie, in a buffer of its own: (first, rows).

        The visible rows of a launch's hops come one after the other. Row r of the block of hop t
        lies in row first[t] + r of the buffer of launch[t], which has rows[launch[t]] rows.

        launch: (world,) of each hop, ascending from 0.
        """
        hops = np.arange(len(self.rows))
        begin, end = self.visible[(rank - hops) % len(hops), hops].T
        end[0] = self.rows[rank, 0]
        last = np.cumsum(end - begin)
        rows = np.bincount(launch, end - begin).astype(np.int64)
        return last - end - (np.cumsum(rows) - rows)[launch], rows

    def grad_returns(self, rank: int) -> list[GradReturn]:
        """How the dK/dV of a rank's block return, in the order of the hops."""
        active = self.visible[..., 1] > 0  # (owner, hop)
        world = len(self.rows)
        returns: list[GradReturn] = []
        received: list[tuple[int, int]] = []  # runs of rows so far: disjoint, in order
        for hop in np.flatnonzero(active[rank]).tolist():
            peer = rank + hop
            index = sum(bool(active[(peer - t) % world, t]) for t in range(1, hop))
            begin, end = self.visible[rank, hop].tolist()
            repeated = tuple(
                (max(a, begin), min(b, end)) for a, b in received if a < end and begin < b
            )
            edges = [begin, *(edge for run in repeated for edge in run), end]
            new = tuple((a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b)
            returns.append(GradReturn(hop, index, new, repeated))
            received = _join_runs(sorted((*received, *new)))
        return returns

    @cached_property
    def max_rows(self) -> MaxRows:
        ranks = range(len(self.rows))
        repeated = [run for rank in ranks for x in self.grad_returns(rank) for run in x.repeated]
        return MaxRows(
            local=int(self.rows[:, 0].max()),
            published=int(self.rows[:, 1].max()),
            gathered=max(self.gathered_layout(rank)[1] for rank in ranks),
            returned=max((end for _, end in repeated), default=0),
        )


def _join_runs(runs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Sorted runs with adjacent ones joined."""
    joined: list[tuple[int, int]] = []
    for begin, end in runs:
        if joined and joined[-1][1] == begin:
            begin = joined.pop()[0]
        joined.append((begin, end))
    return joined


def first_heads(kv_heads: int, tokens: int) -> int:
    """Number of KV heads of a rank's own keys that a backward computes first; the others last.

    The first heads run during the first K/V transfers, the others during the last transfers of
    float32 dK/dV, which have twice as many bytes. 0 for long shards: there the tail of a second
    kernel takes longer than what it hides.
    """
    return -(-kv_heads // 3) if kv_heads > 1 and tokens <= MAX_SPLIT_TOKENS else 0


class PlacedSegments(NamedTuple):
    """Segments of all ranks, in the order of their tokens, and the rank that holds each.

    The segments of one rank are in the order of their rows.
    """

    segments: Segments
    owner: Ints

    @classmethod
    def of(cls, shards: list[Segments]) -> PlacedSegments:
        """shards[o]: the segments of rank o."""
        owner = np.repeat(np.arange(len(shards)), [len(s) for s in shards])
        columns = [
            np.concatenate([getattr(s, name) for s in shards])
            for name in ("row", "length", "sequence", "position")
        ]
        order = np.lexsort((columns[3], columns[2]))
        return cls(Segments(*(x[order] for x in columns)), owner[order])


def plan_ring(
    shards: list[Segments], rank: int, left: int, right: int, grid: int = 1, alignment: int = 1
) -> tuple[Plan, KVExchange]:
    """Spans and exchange of `rank` where rank o holds shards[o] of self-attending documents.

    grid, alignment: as in `plan_exchange`.
    """
    placed = PlacedSegments.of(shards)
    everything = placed.segments
    bands = band(everything, everything, *pair_sequences(everything, everything), 0, left, right)
    return plan_exchange(placed, placed, bands, rank, len(shards), grid, alignment)


def plan_exchange(
    queries: PlacedSegments,
    keys: PlacedSegments,
    bands: Band,
    rank: int,
    world: int,
    grid: int = 1,
    alignment: int = 1,
) -> tuple[Plan, KVExchange]:
    """Spans and exchange of `rank`, from the bands of all ranks' segments.

    bands: of pairs of `queries.segments` and `keys.segments`.

    grid: keys of a tile. Every segment is cut into tiles from its first key on, the last may be
    short. Ranks exchange whole tiles: the exchange's rows are tiles, and tile n of a block has key
    rows [grid * n, grid * (n + 1)) in the plan.

    alignment: every run begins a multiple of so many keys after the first of its segment.
    """
    everything, owner = keys
    asks = queries.owner[bands.query]
    hop = asks - owner[bands.key]
    (far,) = np.nonzero(hop)
    hop, query, key = hop[far], bands.query[far], bands.key[far]
    hop += world * (hop < 0)
    count = len(everything)
    first = everything.length.copy()  # other ranks attend to columns [first, end)
    end = np.zeros(count, np.int64)
    reach = np.zeros(count, np.int64)  # the last hop at which a rank attends to them
    np.minimum.at(first, key, np.maximum(bands.lo[far], 0))
    last = np.minimum(everything.length[key], queries.segments.length[query] + bands.hi[far])
    np.maximum.at(end, key, last)
    np.maximum.at(reach, key, hop)
    first[reach == 0] = 0
    first -= first % max(grid, alignment)
    size = -(-(end - first) // grid)
    first_active = np.full(world, world, np.int64)
    np.minimum.at(first_active, owner[key], hop)

    own_size = -(-everything.length // grid)
    rows = np.zeros((world, world + 1), np.int64)
    np.add.at(rows, (owner, reach), size)
    rows = np.cumsum(rows[:, ::-1], axis=1)[:, ::-1]
    rows[:, 0] = np.bincount(owner, own_size, world)

    # runs in buffer order, and their first rows there
    (run,) = np.nonzero(reach)
    run = run[np.lexsort((everything.row[run], -reach[run], owner[run]))]
    buffer_row = np.zeros(count, np.int64)
    buffer_row[run] = _first_rows(size[run], owner[run])
    by_row = np.lexsort((everything.row, owner))
    own_row = np.zeros(count, np.int64)
    own_row[by_row] = _first_rows(own_size[by_row], owner[by_row])
    begins, ends = np.repeat(rows[:, 1], world), np.zeros(world * world, np.int64)
    at = world * owner[key] + hop
    np.minimum.at(begins, at, buffer_row[key])
    np.maximum.at(ends, at, (buffer_row + size)[key])
    begins[ends == 0] = 0
    visible = np.stack((begins, ends), 1).reshape(world, world, 2)
    mine = run[owner[run] == rank]
    published = concat_ranges(own_row[mine] + first[mine] // grid, size[mine])

    # this rank's key segments: its own, then hop by hop the runs within the visible rows
    arrives = (rank - owner) % world
    begins, ends = visible[owner, arrives].T
    inside = (begins <= buffer_row) & (buffer_row + size <= ends)
    (local,) = np.nonzero(owner == rank)
    (remote,) = np.nonzero((arrives > 0) & (reach >= arrives) & inside)
    remote = remote[np.lexsort((buffer_row[remote], arrives[remote]))]
    own_keys = Segments(
        grid * np.concatenate((own_row[local], buffer_row[remote])),
        np.concatenate((everything.length[local], (end - first)[remote])),
        np.concatenate((everything.sequence[local], everything.sequence[remote])),
        np.concatenate((everything.position[local], (everything.position + first)[remote])),
    )
    key_hop = np.concatenate((np.zeros_like(local), arrives[remote]))
    key_index = np.zeros(count, np.int64)
    key_index[local] = np.arange(len(local))
    key_index[remote] = len(local) + np.arange(len(remote))

    (mine,) = np.nonzero(queries.owner == rank)
    own_queries = queries.segments.take(mine)
    query_index = np.zeros(len(queries.owner), np.int64)
    query_index[mine] = np.arange(len(mine))
    (kept,) = np.nonzero(asks == rank)
    query, key = query_index[bands.query[kept]], key_index[bands.key[kept]]
    shift = np.where(owner == rank, 0, first)[bands.key[kept]]  # a run may start inside a segment
    lo = np.maximum(bands.lo[kept] - shift, 1 - own_queries.length[query])
    hi = np.minimum(bands.hi[kept] - shift, own_keys.length[key] - 1)
    plan = Plan(own_queries, own_keys, key_hop, Band(query, key, lo, hi), world)
    return plan, KVExchange(rows, first_active, visible, published)


def _first_rows(sizes: Ints, owner: Ints) -> Ints:
    """The first row of each run in the buffer of its owner; runs of an owner are neighbours."""
    begin = np.cumsum(sizes) - sizes
    return np.asarray(begin - begin[np.searchsorted(owner, owner)])
