"""What ranks send and receive by messages, launch by launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ringfa3.planning.kv_exchange import KVExchange
from ringfa3.planning.placement.costs import Ints
from ringfa3.planning.sharding import Segments
from ringfa3.planning.tile_schedule import concat_ranges, join_ranges
from ringfa3.planning.tiling import Band, Plan


class PeerRows(NamedTuple):
    """Rows [begin, end) that go to a peer, or come from it, for a hop of the reader."""

    hop: int
    peer: int
    begin: int
    end: int


@dataclass(frozen=True, eq=False)
class LaunchExchange:
    """What a rank sends and receives by messages. Each launch attends to one hop or several.

    hops      spans of the launches, each in place of a hop. Key segments are cut to what arrives
    rows      rows of each launch's K/V
    arriving  for each launch: rows of its K/V that come from a peer. Their dK/dV go back
    sent      for each launch of the readers: own rows that leave, hop by hop
    leaving   for each launch: entries of `sent` that go to a peer. Their dK/dV come back
    """

    hops: Plan
    rows: list[int]
    arriving: list[list[PeerRows]]
    sent: list[Ints]
    leaving: list[list[PeerRows]]

    @classmethod
    def of(
        cls, exchange: KVExchange, hops: Plan, rank: int, launch: Ints | None = None
    ) -> LaunchExchange:
        """hops: spans of the rank. launch: (world,) of each hop, ascending, 0 for hop 0 alone;
        default `launch_of_hop`.
        """
        launch = launch_of_hop(exchange) if launch is None else launch
        world = len(launch)
        owner, hop, begin, end = exchange.runs(rank).T
        (to,) = np.nonzero(owner == rank)
        rows, _, leaving = _peer_rows(hop[to], (rank + hop[to]) % world, (end - begin)[to], launch)
        own = concat_ranges(begin[to], (end - begin)[to])
        sent = np.split(own, np.cumsum(rows)[:-1])
        (mine,) = np.nonzero((owner + hop) % world == rank)
        mine = mine[np.argsort(hop[mine], kind="stable")]
        size = (end - begin)[mine]
        rows, first, arriving = _peer_rows(hop[mine], owner[mine], size, launch)
        rows[0] = exchange.tokens[rank]

        at = (hop << 32)[mine] + begin[mine]
        plan = _cut_to_runs(exchange, hops, launch, at, first - begin[mine])
        return cls(plan, rows.tolist(), arriving, sent, leaving)


def launch_of_hop(exchange: KVExchange) -> Ints:
    """(world,) the launch that attends to each hop by messages: hop 0 alone, then several.

    A rank sends and receives for a launch at most two thirds of the largest block, or what is
    visible at one hop. So two buffers of arriving and one of leaving rows are no
    more than two blocks, or three hops.
    """
    world = len(exchange.tokens)
    owner, hop, begin, end = exchange.needs
    rows = np.bincount(world * owner + hop, end - begin, world * world).astype(np.int64)
    rows = np.minimum(rows.reshape(world, world), np.diff(exchange.visible)[..., 0])
    hops = np.arange(world)
    both = np.stack((rows, rows[(hops[:, None] - hops) % world, hops]))  # (2, rank, hop)
    most = max(2 * exchange.block_rows.max() // 3, rows.max())
    launch, held = np.zeros(world, np.int64), both[..., 0]
    for t in range(1, world):
        held = held + both[..., t]
        opens = t == 1 or held.max() > most
        held = both[..., t] if opens else held
        launch[t] = launch[t - 1] + opens
    return launch


def _cut_to_runs(exchange: KVExchange, hops: Plan, launch: Ints, runs: Ints, shift: Ints) -> Plan:
    """The spans of launches, of key segments that are cut to what arrives.

    runs: (runs,) ascending, 2^32 * hop + the owner's first local row of each run that arrives.
    shift: (runs,) from an owner's local row to the row in the launch's K/V.
    """
    b, k = hops.bands, hops.keys
    (own,) = np.nonzero(hops.key_hop == 0)  # they stay whole
    needed = b.key, *b.columns(hops.queries, k, max(exchange.grid, exchange.alignment))
    whole = own, np.zeros_like(own), k.length[own]
    joined, key, cut, last = join_ranges(*map(np.concatenate, zip(needed, whole, strict=True)))
    joined, row, hop = joined[: len(b)], k.row[key], hops.key_hop[key]
    (far,) = np.nonzero(hop)
    local = (exchange.key_rows[key] + cut // exchange.grid)[far]
    run = np.searchsorted(runs, (hop << 32)[far] + local, side="right") - 1
    row[far] = exchange.grid * (local + shift[run])
    keys = Segments(row, last - cut, k.sequence[key], k.position[key] + cut)
    lo = np.maximum(b.lo - cut[joined], 1 - hops.queries.length[b.query])
    hi = np.minimum(b.hi - cut[joined], keys.length[joined] - 1)
    bands = Band(b.query, joined, lo, hi)
    return Plan(hops.queries, keys, launch[hop], bands, int(launch[-1]) + 1)


def _peer_rows(
    hop: Ints, peer: Ints, size: Ints, launch: Ints
) -> tuple[Ints, Ints, list[list[PeerRows]]]:
    """Runs one after the other in a buffer for each launch, and those of each hop together.

    hop, peer, size: (runs,) by ascending hop. launch: (world,) of each hop.

    Returns:
        Rows of each launch; the first row of each run; for each launch its hops.
    """
    rows = np.bincount(launch[hop], size, launch[-1] + 1).astype(np.int64)
    first = np.cumsum(size) - size - (np.cumsum(rows) - rows)[launch[hop]]
    parts: list[list[PeerRows]] = [[] for _ in rows]
    for t, at in zip(*np.unique(hop, return_index=True), strict=True):
        begin = int(first[at])
        end = begin + int(size[hop == t].sum())
        parts[launch[t]].append(PeerRows(int(t), int(peer[at]), begin, end))
    return rows, first, parts
