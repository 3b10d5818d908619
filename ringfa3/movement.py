"""What a rank computes and moves at each hop of a ring.

K/V travel in *pieces*: the run of a segment's keys that queries of other ranks see. A block (the
pieces of one rank) goes around the ring one rank a hop, pieces that travel farthest first, so
that what goes on at any hop is a prefix of the buffer and is sent as one message.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ringfa3.layout import Ints, Segments
from ringfa3.plan import Plan, band, pair_sequences, ramps


class Most(NamedTuple):
    """Rows of K/V of the rank with most of them: its own, of those what leaves it, all it sees."""

    tokens: int
    travelling: int
    gathered: int


@dataclass(frozen=True)
class Movement:
    """Which K/V rows travel.

    rows         (world, world + 1): rows[o, t] of rank o's keys are with rank o+t at hop t >= 1;
                 never more than rows[o, t-1], and 0 at t = world
    first_visit  (world,) first hop >= 1 at which rank o's keys are seen, `world` for never
    seen         (world, world, 2): the pieces of rank o that queries of rank o+t see, t >= 1, lie
                 between rows seen[o, t] of its buffer, [begin, end); (0, 0) for none
    own          (rows[rank, 1],) local rows that leave this rank, in the order of the buffers
    """

    rows: Ints
    first_visit: Ints
    seen: Ints
    own: Ints

    def gathered(self, rank: int) -> tuple[Ints, int]:
        """Where all that a rank's queries see lies in one buffer, and how many rows that takes.

        Its own rows come first, all of them, then those between `seen` of each hop. Row r of the
        block of hop t has row first[t] + r; first is (world,).
        """
        hops = np.arange(len(self.rows))
        begin, end = self.seen[(rank - hops) % len(hops), hops].T
        end[0] = self.rows[rank, 0]
        last = np.cumsum(end - begin)
        return last - end, int(last[-1])

    @cached_property
    def most(self) -> Most:
        gathered = max(self.gathered(rank)[1] for rank in range(len(self.rows)))
        return Most(int(self.rows[:, 0].max()), int(self.rows[:, 1].max()), gathered)


def plan_ring(shards: list[Segments], rank: int, left: int, right: int) -> tuple[Plan, Movement]:
    """Spans and movement of `rank` when rank o holds shards[o] of self-attending documents."""
    world = len(shards)
    owner = np.repeat(np.arange(world), [len(s) for s in shards])
    columns = [
        np.concatenate([getattr(s, name) for s in shards])
        for name in ("row", "length", "sequence", "position")
    ]
    order = np.lexsort((columns[3], columns[2]))
    owner = owner[order]
    everything = Segments(*(x[order] for x in columns))
    bands = band(everything, everything, *pair_sequences(everything, everything), 0, left, right)

    hop = (owner[bands.query] - owner[bands.key]) % world
    far = hop > 0
    nq, nk = everything.length[bands.query], everything.length[bands.key]
    count = len(everything)
    first = everything.length.copy()  # columns [first, end) of a segment that other ranks see
    end = np.zeros(count, np.int64)
    reach = np.zeros(count, np.int64)  # the last hop at which they are seen
    np.minimum.at(first, bands.key[far], np.maximum(bands.lo, 0)[far])
    np.maximum.at(end, bands.key[far], np.minimum(nk, nq + bands.hi)[far])
    np.maximum.at(reach, bands.key[far], hop[far])
    first[reach == 0] = 0
    first_visit = np.full(world, world, np.int64)
    np.minimum.at(first_visit, owner[bands.key[far]], hop[far])

    rows = np.zeros((world, world + 1), np.int64)
    np.add.at(rows, (owner, reach), end - first)
    rows = np.cumsum(rows[:, ::-1], axis=1)[:, ::-1]
    rows[:, 0] = [s.tokens for s in shards]

    # pieces in buffer order, and their rows there
    (piece,) = np.nonzero(reach)
    piece = piece[np.lexsort((everything.row[piece], -reach[piece], owner[piece]))]
    length = (end - first)[piece]
    begin = np.cumsum(length) - length
    begin -= begin[np.searchsorted(owner[piece], owner[piece])]
    buffer_row = np.zeros(count, np.int64)
    buffer_row[piece] = begin
    seen = np.zeros((world, world, 2), np.int64)
    seen[..., 0] = rows[:, 1:2]
    at = (owner[bands.key[far]], hop[far])
    np.minimum.at(seen[..., 0], at, buffer_row[bands.key[far]])
    np.maximum.at(seen[..., 1], at, (buffer_row + end - first)[bands.key[far]])
    seen[seen[..., 1] == 0] = 0
    mine = piece[owner[piece] == rank]
    own = ramps(everything.row[mine] + first[mine], (end - first)[mine])

    # this rank's key segments, hop by hop: its own, then the pieces that come to it
    home = owner == rank
    arrives = (rank - owner) % world
    comes = (arrives > 0) & (reach >= arrives)
    (local,) = np.nonzero(home)
    (travelling,) = np.nonzero(comes)
    travelling = travelling[np.lexsort((buffer_row[travelling], arrives[travelling]))]
    keys = Segments(
        np.concatenate((everything.row[local], buffer_row[travelling])),
        np.concatenate((everything.length[local], (end - first)[travelling])),
        np.concatenate((everything.sequence[local], everything.sequence[travelling])),
        np.concatenate((everything.position[local], (everything.position + first)[travelling])),
    )
    key_hop = np.concatenate((np.zeros_like(local), arrives[travelling]))
    key_index = np.zeros(count, np.int64)
    key_index[local] = np.arange(len(local))
    key_index[travelling] = len(local) + np.arange(len(travelling))

    queries = shards[rank]
    query_index = np.zeros(count, np.int64)
    query_index[local] = np.arange(len(local))
    visits = home[bands.query]
    own_bands = band(
        queries,
        keys,
        query_index[bands.query[visits]],
        key_index[bands.key[visits]],
        0,
        left,
        right,
    )  # again: a piece starts behind its segment
    stores = first_visit[(rank - np.arange(world)) % world] == np.arange(world)
    stores[0] = True
    travels = tuple(np.concatenate((x[local], np.zeros_like(travelling))) for x in (first, end))
    plan = Plan(queries, keys, key_hop, own_bands, stores, (travels[0], travels[1]))
    return plan, Movement(rows, first_visit, seen, own)
