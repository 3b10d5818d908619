"""Which K/V rows go from their owner to each reader, and how their dK/dV return.

A rank's *block* has the keys to which queries of other ranks attend: of each of its segments one
run, from the first such key to the last. Over `symmetric` the rank publishes its block, and a
reader copies one range of it. By messages each reader gets the rows that it needs, and no others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ringfa3.planning.placement.costs import Ints
from ringfa3.planning.sharding import Segments
from ringfa3.planning.tile_schedule import concat_ranges, join_ranges
from ringfa3.planning.tiling import Band, Plan, band, pair_sequences


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

    tokens      (world,) rows of each rank's own keys
    block_rows  (world,) rows of each rank's block
    visible     (world, world, 2): the queries of rank o+t, t >= 1, attend to runs of o's block
                within rows [begin, end) = visible[o, t]; (0, 0) for none
    published   (block_rows[rank],) local rows of this rank's block, in buffer order
    needs       (4, n) owner, hop, and the owner's local rows [begin, end) that the reader needs;
                they may overlap
    key_rows    (keys,) the owner's local row of the first key of each key segment of the plan
    grid, alignment  as in `plan_exchange`
    """

    tokens: Ints
    block_rows: Ints
    visible: Ints
    published: Ints
    needs: Ints
    key_rows: Ints
    grid: int
    alignment: int

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__.copy()  # other threads may add cached properties

    @cached_property
    def consecutive(self) -> bool:
        """Whether each row of `published` follows the one before."""
        return bool((np.diff(self.published) == 1).all())

    def runs(self, chosen: npt.NDArray[np.bool_] | None = None) -> Ints:
        """(n, 4): owner, hop, and the owner's local rows [begin, end) that go to the reader.

        Ordered by owner, hop and begin. Runs of one reader neither overlap nor touch.

        chosen: which `needs` count, all if None.
        """
        world = len(self.tokens)
        owner, hop, begin, end = self.needs if chosen is None else self.needs[:, chosen]
        _, pair, begin, end = join_ranges(world * owner + hop, begin, end)
        return np.stack((*np.divmod(pair, world), begin, end), 1)

    def gathered_layout(self, rank: int) -> tuple[Ints, int]:
        """Where all K/V that a rank attends to lie in one buffer: (first, number of rows).

        The rank's own tokens come first, then the visible rows, hop by hop: row r of the block of
        hop t lies in row first[t] + r.
        """
        hops = np.arange(len(self.tokens))
        begin, end = self.visible[(rank - hops) % len(hops), hops].T
        end[0] = self.tokens[rank]
        last = np.cumsum(end - begin)
        return last - end, int(last[-1])

    def grad_returns(self, rank: int) -> list[GradReturn]:
        """How the dK/dV of a rank's block return, in the order of the hops."""
        active = self.visible[..., 1] > 0  # (owner, hop)
        world = len(self.tokens)
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
        ranks = range(len(self.tokens))
        repeated = [run for rank in ranks for x in self.grad_returns(rank) for run in x.repeated]
        return MaxRows(
            local=int(self.tokens.max()),
            published=int(self.block_rows.max()),
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
    everything, owner = placed
    bands = band(everything, everything, *pair_sequences(everything, everything), 0, left, right)
    reader = owner[bands.query]
    needs = reader, bands.key, *bands.columns(everything, everything, 1)
    own = bands.take(np.flatnonzero(reader == rank))
    return plan_exchange(placed, placed, needs, own, rank, len(shards), grid, alignment)


def plan_exchange(
    queries: PlacedSegments,
    keys: PlacedSegments,
    needs: tuple[Ints, Ints, Ints, Ints],
    bands: Band | Callable[[], Band],
    rank: int,
    world: int,
    grid: int = 1,
    alignment: int = 1,
) -> tuple[Plan, KVExchange]:
    """Spans and exchange of `rank`, from what all ranks need and its own bands.

    needs: (n,) each: a rank, a segment of `keys.segments`, and columns [begin, end) of it to which
    queries of the rank attend.

    bands: of pairs of `queries.segments`, those of the rank, and `keys.segments`; or a function
    that makes them, as in `Plan`.

    grid: keys of a tile. Every segment is cut into tiles from its first key on, the last may be
    short. Ranks exchange whole tiles: the exchange's rows are tiles, and tile n of a block has key
    rows [grid * n, grid * (n + 1)) in the plan.

    alignment: every run begins a multiple of so many keys after the first of its segment.
    """
    everything, owner = keys
    reader, key, begin, end = needs
    (far,) = np.nonzero(reader != owner[key])
    reader, key, begin, end = (x[far] for x in (reader, key, begin, end))
    begin = begin - begin % max(grid, alignment)
    hop = (reader - owner[key]) % world
    count = len(everything)
    first = everything.length.copy()  # other ranks attend to columns [first, last)
    last = np.zeros(count, np.int64)
    reach = np.zeros(count, np.int64)  # the last hop at which a rank attends to them
    np.minimum.at(first, key, begin)
    np.maximum.at(last, key, end)
    np.maximum.at(reach, key, hop)
    first[reach == 0] = 0
    size = -(-(last - first) // grid)

    own_size = -(-everything.length // grid)
    tokens = np.bincount(owner, own_size, world).astype(np.int64)
    block_rows = np.bincount(owner, size, world).astype(np.int64)

    # runs in buffer order, and their first rows there
    (run,) = np.nonzero(reach)
    run = run[np.lexsort((everything.row[run], -reach[run], owner[run]))]
    buffer_row = np.zeros(count, np.int64)
    buffer_row[run] = _first_rows(size[run], owner[run])
    by_row = np.lexsort((everything.row, owner))
    own_row = np.zeros(count, np.int64)
    own_row[by_row] = _first_rows(own_size[by_row], owner[by_row])
    pair = world * owner[key] + hop
    begins, ends = np.repeat(block_rows, world), np.zeros(world * world, np.int64)
    np.minimum.at(begins, pair, buffer_row[key])
    np.maximum.at(ends, pair, (buffer_row + size)[key])
    begins[ends == 0] = 0
    visible = np.stack((begins, ends), 1).reshape(world, world, 2)
    mine = run[owner[run] == rank]
    published = concat_ranges(own_row[mine] + first[mine] // grid, size[mine])
    needed = own_row[key] + begin // grid, own_row[key] - (-end // grid)
    moved = np.stack((owner[key], hop, *needed))

    # this rank's key segments: its own, then hop by hop the runs within the visible rows
    arrives = (rank - owner) % world
    begins, ends = visible[owner, arrives].T
    inside = (begins <= buffer_row) & (buffer_row + size <= ends)
    (local,) = np.nonzero(owner == rank)
    (remote,) = np.nonzero((arrives > 0) & (reach >= arrives) & inside)
    remote = remote[np.lexsort((buffer_row[remote], arrives[remote]))]
    own_keys = Segments(
        grid * np.concatenate((own_row[local], buffer_row[remote])),
        np.concatenate((everything.length[local], (last - first)[remote])),
        np.concatenate((everything.sequence[local], everything.sequence[remote])),
        np.concatenate((everything.position[local], (everything.position + first)[remote])),
    )
    key_hop = np.concatenate((np.zeros_like(local), arrives[remote]))
    key_rows = np.concatenate((own_row[local], (own_row + first // grid)[remote]))
    key_index = np.zeros(count, np.int64)
    key_index[local] = np.arange(len(local))
    key_index[remote] = len(local) + np.arange(len(remote))

    (mine,) = np.nonzero(queries.owner == rank)
    own_queries = queries.segments.take(mine)
    query_index = np.zeros(len(queries.owner), np.int64)
    query_index[mine] = np.arange(len(mine))
    shift = np.where(owner == rank, 0, first)  # a run may start inside a segment
    given = query_index, key_index, shift, own_queries.length, own_keys.length
    own = _renumbered(bands, *given) if isinstance(bands, Band) else partial(_made, bands, *given)
    plan = Plan(own_queries, own_keys, key_hop, own, world)
    exchange = tokens, block_rows, visible, published, moved, key_rows, grid, alignment
    return plan, KVExchange(*exchange)


def _made(make: Callable[[], Band], *given: Ints) -> Band:
    return _renumbered(make(), *given)


def _renumbered(
    bands: Band, query_index: Ints, key_index: Ints, shift: Ints, rows: Ints, columns: Ints
) -> Band:
    """Bands of a rank's segments, from those of all segments.

    query_index, key_index: the rank's numbers of all segments. shift: (keys,) column of a key
    segment at which the rank's begins. rows, columns: lengths of the rank's segments.
    """
    query, key = query_index[bands.query], key_index[bands.key]
    lo = np.maximum(bands.lo - shift[bands.key], 1 - rows[query])
    hi = np.minimum(bands.hi - shift[bands.key], columns[key] - 1)
    return Band(query, key, lo, hi)


def _first_rows(sizes: Ints, owner: Ints) -> Ints:
    """The first row of each run in the buffer of its owner; runs of an owner are neighbours."""
    begin = np.cumsum(sizes) - sizes
    return np.asarray(begin - begin[np.searchsorted(owner, owner)])
