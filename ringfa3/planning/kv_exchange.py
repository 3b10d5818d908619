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

from ringfa3.planning.sharding import Ints, Segments
from ringfa3.planning.tiling import Plan, band, pair_sequences, ramps

# Tokens of a rank up to which it does its own keys in two parts. On 2 H200 that gained 3% at 8k
# tokens and lost 5% at 16k; on two that rehearse four, 4% at 4k and 0 to 3% at 8k.
LONGEST_PARTED = 8192


class Most(NamedTuple):
    """Rows of K/V of the rank with most of them: its own, of those what leaves it, all it sees; and
    of the dK/dV that come home those up to the last that comes more than once."""

    tokens: int
    travelling: int
    gathered: int
    again: int


class Return(NamedTuple):
    """What comes home of a rank's dK/dV from the peer that has found it at a hop.

    visit  how many blocks the peer visits before
    first  rows [begin, end) that no earlier hop has brought, in the order of the buffers
    more   those that one has
    """

    hop: int
    visit: int
    first: tuple[tuple[int, int], ...]
    more: tuple[tuple[int, int], ...]


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

    def returns(self, rank: int) -> list[Return]:
        """How the dK/dV of a rank's keys come home, in the order of the hops."""
        visited = self.seen[..., 1] > 0  # (owner, hop)
        world = len(self.rows)
        found: list[Return] = []
        home: list[tuple[int, int]] = []  # rows brought so far: apart from each other, in order
        for hop in np.flatnonzero(visited[rank]).tolist():
            peer = rank + hop
            visit = sum(bool(visited[(peer - t) % world, t]) for t in range(1, hop))
            begin, end = self.seen[rank, hop].tolist()
            more = tuple((max(a, begin), min(b, end)) for a, b in home if a < end and begin < b)
            edges = [begin, *(edge for part in more for edge in part), end]
            first = tuple((a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b)
            found.append(Return(hop, visit, first, more))
            home = _joined(sorted((*home, *first)))
        return found

    @cached_property
    def most(self) -> Most:
        ranks = range(len(self.rows))
        gathered = max(self.gathered(rank)[1] for rank in ranks)
        again = [end for rank in ranks for back in self.returns(rank) for _, end in back.more]
        travelling = int(self.rows[:, 1].max())
        return Most(int(self.rows[:, 0].max()), travelling, gathered, max(again, default=0))


def _joined(parts: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Parts in order, those that follow on each other as one."""
    joined: list[tuple[int, int]] = []
    for begin, end in parts:
        if joined and joined[-1][1] == begin:
            begin = joined.pop()[0]
        joined.append((begin, end))
    return joined


def first_heads(kv_heads: int, tokens: int) -> int:
    """How many KV heads of a rank's own keys come first in a backward, beside the K/V of the first
    hops. The others come last, beside float32 dK/dV, which are twice as many bytes.

    None of long shards: a second kernel, with its tail, takes longer there than what it hides.
    """
    return -(-kv_heads // 3) if kv_heads > 1 and tokens <= LONGEST_PARTED else 0


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

    # this rank's key segments, hop by hop: its own, then of the pieces that come to it those from
    # the first that it sees to the last
    home = owner == rank
    arrives = (rank - owner) % world
    begins, ends = seen[owner, arrives].T
    inside = (begins <= buffer_row) & (buffer_row + end - first <= ends)
    (local,) = np.nonzero(home)
    (travelling,) = np.nonzero((arrives > 0) & (reach >= arrives) & inside)
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
    plan = Plan(queries, keys, key_hop, own_bands, world)
    return plan, Movement(rows, first_visit, seen, own)
