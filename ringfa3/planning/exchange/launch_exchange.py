"""What ranks send and receive by messages, launch by launch.

Inside a host K/V rows go from their owner straight to each reader. Between hosts a row goes to one
*landing rank* of each host that needs it, and from there to the readers. Their dK/dV return the
same way, and the landing rank adds them up: one sum crosses for each row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ringfa3.planning.exchange.buffers import moved_rows
from ringfa3.planning.exchange.landing import Landing
from ringfa3.planning.exchange.launches import launch_of_step
from ringfa3.planning.kv_exchange import KVExchange
from ringfa3.planning.placement.costs import Bools, Ints
from ringfa3.planning.sharding import Segments
from ringfa3.planning.tile_schedule import concat_ranges, join_ranges
from ringfa3.planning.tiling import Band, Plan


class PeerRows(NamedTuple):
    """Rows [begin, end) that go to a peer, or come from it.

    hop  ranks from the sender of K/V to the receiver
    """

    hop: int
    peer: int
    begin: int
    end: int


@dataclass(frozen=True, eq=False)
class RowFlow:
    """K/V rows that go from a buffer of some ranks to a buffer of others, in numbered transfers.

    A rank that is its own peer copies the rows.

    sent      of each transfer: rows of the sender's buffer, peer by peer
    leaving   of each transfer: entries of `sent` that go to a peer. Their dK/dV come back
    arriving  of each transfer: rows of the receiver's buffer that come from a peer. Their dK/dV go
              back
    """

    sent: list[Ints]
    leaving: list[list[PeerRows]]
    arriving: list[list[PeerRows]]


class Chunk(NamedTuple):
    """Rows that land together, for launches [first, last]: how many land on this rank."""

    first: int
    last: int
    rows: int


@dataclass(frozen=True, eq=False)
class LaunchExchange:
    """What a rank sends and receives by messages. Each launch attends to one hop or several.

    rank     of the CP group
    hops     spans of the launches, each in place of a hop. Key segments are cut to what arrives
    rows     rows of each launch's K/V: those of `direct` come first, then those of `onward`
    direct   from own rows to the K/V of a launch; transfers are launches
    landing  from own rows to landed rows; transfers are chunks
    onward   from landed rows of a launch's chunk to the K/V of the launch; transfers are launches
    chunks   of rows that land, in the order of launches; no two have one launch
    exchange, by_host, launch  what the flows of every rank follow from
    """

    rank: int
    hops: Plan
    rows: list[int]
    direct: RowFlow
    landing: RowFlow
    onward: RowFlow
    chunks: list[Chunk]
    exchange: KVExchange
    by_host: Landing
    launch: Ints

    @classmethod
    def of(
        cls,
        exchange: KVExchange,
        hops: Plan,
        rank: int,
        hosts: tuple[int, ...],
        launch: Ints | None = None,
        kv_budget: int | None = None,
    ) -> LaunchExchange:
        """hops: spans of the rank. hosts: of each rank. launch: (steps,) of each
        `HostRanks.ring_step`, ascending, 0 for step 0 alone; default `launch_of_step` for a budget.
        """
        landing = Landing.of(exchange, hosts)
        launch = launch_of_step(exchange, landing, kv_budget) if launch is None else launch
        made = _RankFlows.of(exchange, landing, rank, launch)
        world, count = len(hosts), int(launch[-1]) + 1
        rows = made.rows.copy()
        rows[0] = exchange.tokens[rank]
        owners = (rank - np.arange(world)) % world
        of_hop = launch[landing.ranks.ring_step(owners, np.full_like(owners, rank))]
        by_hop = np.argsort(made.at)
        plan = _cut_to_runs(exchange, hops, of_hop, count, made.at[by_hop], made.shift[by_hop])
        flows = made.direct, made.landed.flow, made.onward
        return cls(rank, plan, rows.tolist(), *flows, made.landed.chunks, exchange, landing, launch)

    @property
    def between_hosts(self) -> Ints:
        """As `Landing.between_hosts`."""
        return self.by_host.between_hosts

    @cached_property
    def host_offsets(self) -> HostOffsets:
        """Where rows lie on the other ranks of this rank's host."""
        return HostOffsets.of(self.exchange, self.by_host, self.rank, self.launch)

    @property
    def flows(self) -> list[RowFlow]:
        """`direct`, and `landing` and `onward` if rows land on any rank."""
        return [self.direct, *([self.landing, self.onward] if self.chunks else [])]

    def landing_before(self, launch: int) -> int | None:
        """The chunk that lands in the exchange that brings the K/V of `launch`: one launch before
        its first rows go on."""
        return self._chunk(lambda chunk: chunk.first == launch + 1)

    def landed_for(self, launch: int) -> int | None:
        """The chunk from which rows go on to `launch`."""
        return self._chunk(lambda chunk: chunk.first <= launch <= chunk.last)

    def summed_after(self, launch: int) -> int | None:
        """The chunk whose sums of dK/dV go back in the exchange that returns those of `launch`."""
        return self._chunk(lambda chunk: chunk.last == launch - 1)

    def _chunk(self, chosen: Callable[[Chunk], bool]) -> int | None:
        return next((n for n, chunk in enumerate(self.chunks) if chosen(chunk)), None)


class FlowOffsets(NamedTuple):
    """Where the parts of a `RowFlow` lie in the buffers of the other ranks of a host.

    Each transfer has a dictionary: the peer, and the first row of the part in the peer's buffer.

    leaving   parts that go to the peer
    arriving  parts that come from it
    """

    leaving: list[dict[int, int]]
    arriving: list[dict[int, int]]

    @classmethod
    def empty(cls, transfers: int) -> FlowOffsets:
        return cls([{} for _ in range(transfers)], [{} for _ in range(transfers)])


class HostOffsets(NamedTuple):
    """Where rows that ranks of one host exchange lie at the other end.

    No launch has rows of both flows, as chunks open launches.

    most  rows of the largest buffer on any rank: sent for a launch, and K/V of a launch
    """

    direct: FlowOffsets
    onward: FlowOffsets
    most: tuple[int, int]

    @classmethod
    def of(cls, exchange: KVExchange, landing: Landing, rank: int, launch: Ints) -> HostOffsets:
        count = int(launch[-1]) + 1
        direct, onward = (FlowOffsets.empty(count) for _ in range(2))
        (mates,) = np.nonzero(landing.ranks.host == landing.ranks.host[rank])
        for peer in set(mates.tolist()) - {rank}:
            there = _RankFlows.of(exchange, landing, peer, launch)
            for (leaving, arriving), flow in ((direct, there.direct), (onward, there.onward)):
                for here, parts in ((leaving, flow.arriving), (arriving, flow.leaving)):
                    for transfer, of_peers in zip(here, parts, strict=True):
                        transfer.update((peer, x.begin) for x in of_peers if x.peer == rank)
        arrived, own, landed = (int(x.max()) for x in moved_rows(exchange, landing, launch))
        return cls(direct, onward, (max(own, landed), arrived))


@dataclass(frozen=True, eq=False)
class _RankFlows:
    """What one rank sends and receives.

    rows   (launches,) K/V rows that arrive for each launch
    at     (runs,) 2^32 * hop + the owner's first row of each run that arrives
    shift  (runs,) from an owner's local row to the row in the launch's K/V
    """

    direct: RowFlow
    landed: _Landed
    onward: RowFlow
    rows: Ints
    at: Ints
    shift: Ints

    @classmethod
    def of(cls, exchange: KVExchange, landing: Landing, rank: int, launch: Ints) -> _RankFlows:
        runs = _Runs.of(exchange, landing, rank, launch)
        world, count = len(landing.rank), int(launch[-1]) + 1
        came = runs.ordered((runs.reader == rank) & (runs.via < 0), runs.launch)
        goes = runs.ordered((runs.owner == rank) & (runs.via < 0), runs.launch)
        into = _lay_out(count, came.launch, came.owner, came.hop, came.size)
        direct = _flow(
            goes.rows(), _lay_out(count, goes.launch, goes.reader, goes.hop, goes.size), into
        )

        landed = _Landed.of(landing, rank, launch)
        again = runs.ordered((runs.reader == rank) & (runs.via >= 0), runs.launch, runs.via)
        hop = (rank - again.via) % world
        last = _lay_out(count, again.launch, again.via, hop, again.size, into.rows)
        on = runs.ordered(runs.via == rank, runs.launch, runs.reader)
        hop = (on.reader - rank) % world
        passed = _lay_out(count, on.launch, on.reader, hop, on.size)
        onward = _flow(landed.rows_of(on), passed, last)

        at = np.concatenate((came.at_hop, again.at_hop))
        shift = np.concatenate((into.first - came.begin, last.first - again.begin))
        return cls(direct, landed, onward, into.rows + last.rows, at, shift)


class _Transfers(NamedTuple):
    """Runs one after the other in a buffer of each transfer.

    rows   (transfers,)
    first  (runs,) row of the transfer's buffer
    parts  of each transfer: its peers
    """

    rows: Ints
    first: Ints
    parts: list[list[PeerRows]]


def _lay_out(
    transfers: int, transfer: Ints, peer: Ints, hop: Ints, size: Ints, start: Ints | int = 0
) -> _Transfers:
    """transfer, peer, hop, size: (runs,) by ascending transfer, the runs of a peer together.

    start: the row at which each transfer begins in its buffer.
    """
    rows = np.bincount(transfer, size, transfers).astype(np.int64)
    first = np.cumsum(size) - size + (start - (np.cumsum(rows) - rows))[transfer]
    parts: list[list[PeerRows]] = [[] for _ in range(transfers)]
    opens = np.ones(len(transfer), bool)
    opens[1:] = (np.diff(transfer) != 0) | (np.diff(peer) != 0)
    (at,) = np.nonzero(opens)
    end = (first + size)[np.append(at[1:], len(transfer)) - 1] if len(at) else at
    columns = (x.tolist() for x in (transfer[at], hop[at], peer[at], first[at], end))
    for number, *part in zip(*columns, strict=True):
        parts[number].append(PeerRows(*part))
    return _Transfers(rows, first, parts)


def _flow(rows: Ints, leaving: _Transfers, arriving: _Transfers) -> RowFlow:
    """rows: of the sender's buffer, transfer by transfer."""
    sent = np.split(rows, np.cumsum(leaving.rows)[:-1])[: len(leaving.rows)]
    return RowFlow(sent, leaving.parts, arriving.parts)


class _Runs(NamedTuple):
    """(runs,) each: rows [begin, begin + size) of an owner that a reader needs.

    via     the landing rank, -1 if the owner sends them to the reader
    launch  of the reader
    """

    owner: Ints
    hop: Ints
    begin: Ints
    size: Ints
    reader: Ints
    via: Ints
    ring_step: Ints
    launch: Ints

    @classmethod
    def of(cls, exchange: KVExchange, landing: Landing, rank: int, launch: Ints) -> _Runs:
        """What a rank owns, reads or passes on, in any order."""
        host, world = landing.ranks.host, len(landing.rank)
        owner, hop = exchange.needs[:2]
        reader = (owner + hop) % world
        passed = landing.rank[owner, host[reader]] == rank
        owner, hop, begin, end = exchange.runs((owner == rank) | (reader == rank) | passed).T
        reader = (owner + hop) % world
        ring_step = landing.ranks.ring_step(owner, reader)
        via = landing.rank[owner, host[reader]]
        return cls(owner, hop, begin, end - begin, reader, via, ring_step, launch[ring_step])

    def ordered(self, chosen: Bools, *keys: Ints) -> _Runs:
        """The chosen ones by keys, then ring step and begin. chosen: (runs,)."""
        (found,) = np.nonzero(chosen)
        order = np.lexsort([key[found] for key in (self.begin, self.ring_step, *reversed(keys))])
        return _Runs(*(x[found[order]] for x in self))

    def rows(self) -> Ints:
        """The owner's rows of all runs."""
        return concat_ranges(self.begin, self.size)

    @property
    def at_hop(self) -> Ints:
        """2^32 * hop + the first row."""
        return (self.hop << 32) + self.begin


@dataclass(frozen=True, eq=False)
class _Landed:
    """What lands on a rank, and what it sends to land.

    Every chunk opens at launch 2 or later: its rows land in the exchange of the launch before, and
    the first exchange is that of launch 1.

    begins  (runs,) ascending, 2^32 * owner + the first row of each run that lands here
    shift   (runs,) from an owner's row to the row in the chunk's buffer
    """

    flow: RowFlow
    chunks: list[Chunk]
    begins: Ints
    shift: Ints

    @classmethod
    def of(cls, landing: Landing, rank: int, launch: Ints) -> _Landed:
        hosts, most = landing.ranks.ranks.shape
        owner, host, begin, end = landing.runs.T
        peer, size = landing.rank[owner, host], end - begin
        far = (host - landing.ranks.host[owner]) % hosts
        first = launch[most * far]
        opens = np.unique(first[peer >= 0])  # launches: one for each chunk, on all ranks
        assert (opens >= 2).all(), "rows of the first launch would never land"
        chunk, count = np.searchsorted(opens, first), len(opens)
        last = np.zeros(count, np.int64)
        np.maximum.at(last, chunk[peer >= 0], launch[most * (far + 1) - 1][peer >= 0])

        world = len(landing.rank)
        (out,) = np.nonzero((owner == rank) & (peer >= 0))
        out = out[np.lexsort((begin[out], far[out], chunk[out]))]
        goes = _lay_out(count, chunk[out], peer[out], (peer - owner)[out] % world, size[out])
        (into,) = np.nonzero(peer == rank)
        order = np.argsort(chunk[into], kind="stable")
        by_chunk = into[order]
        came = _lay_out(
            count,
            *(x[by_chunk] for x in (chunk, owner, (rank - owner) % world, size)),
        )
        shift = np.empty_like(order)
        shift[order] = came.first - begin[by_chunk]
        chunks = zip(opens.tolist(), last.tolist(), came.rows.tolist(), strict=True)
        return cls(
            _flow(concat_ranges(begin[out], size[out]), goes, came),
            [Chunk(*chunk) for chunk in chunks],
            (owner << 32)[into] + begin[into],
            shift,
        )

    def rows_of(self, runs: _Runs) -> Ints:
        """The rows in the chunks' buffers of runs that land here."""
        at = (runs.owner << 32) + runs.begin
        run = np.searchsorted(self.begins, at, side="right") - 1
        return concat_ranges(runs.begin + self.shift[run], runs.size)


def _cut_to_runs(
    exchange: KVExchange, hops: Plan, launch: Ints, count: int, runs: Ints, shift: Ints
) -> Plan:
    """The spans of launches, of key segments that are cut to what arrives.

    launch: (world,) of each hop of the rank; count: of launches.
    runs: (runs,) ascending, 2^32 * hop + the owner's first local row of each run that arrives.
    shift: (runs,) from an owner's local row to the row in the launch's K/V.
    """
    b, k = hops.bands, hops.keys
    (own,) = np.nonzero(hops.key_hop == 0)  # they stay whole
    needed = b.key, *b.columns(hops.queries, k, max(exchange.grid, exchange.alignment))
    whole = own, np.zeros_like(own), k.length[own]
    joined, key, cut, last = join_ranges(*map(np.concatenate, zip(needed, whole, strict=True)))
    order = np.argsort(launch[hops.key_hop[key]], kind="stable")  # keys of a launch are adjacent
    key, cut, last = key[order], cut[order], last[order]
    joined = np.argsort(order)[joined[: len(b)]]
    row, hop = k.row[key], hops.key_hop[key]
    (far,) = np.nonzero(hop)
    local = (exchange.key_rows[key] + cut // exchange.grid)[far]
    run = np.searchsorted(runs, (hop << 32)[far] + local, side="right") - 1
    row[far] = exchange.grid * (local + shift[run])
    keys = Segments(row, last - cut, k.sequence[key], k.position[key] + cut)
    lo = np.maximum(b.lo - cut[joined], 1 - hops.queries.length[b.query])
    hi = np.minimum(b.hi - cut[joined], keys.length[joined] - 1)
    bands = Band(b.query, joined, lo, hi)
    return Plan(hops.queries, keys, launch[hop], bands, count)
