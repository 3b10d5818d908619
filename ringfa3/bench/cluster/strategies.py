"""Ways to share out a batch over a cluster, each as what it asks of every rank.

RingFA3's own have the placement of `plan_context`, which cuts few documents. In the others each
document is cut over all ranks of a group, an early and a late chunk for each, and K/V pass all of
them.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from ringfa3.bench.cluster.time_model import Floats, Heads, Launches, Load, Traffic, Work
from ringfa3.bench.cluster.traffic import (
    bounding_rows,
    forwarded_rows,
    rows_to,
    tiles_of_launches,
)
from ringfa3.planning.context_plan import ContextPlan, plan_context
from ringfa3.planning.exchange.buffers import rows_of_buffers
from ringfa3.planning.exchange.landing import HostRanks, Landing
from ringfa3.planning.exchange.launches import launch_of_step
from ringfa3.planning.placement.costs import TILE, Cost, Ints, block_cost
from ringfa3.symmetric.forward_mode import select_forward_mode
from ringfa3.symmetric.ipc_memory import ring_bytes

TWO_LEVELS, DIRECT, SYMMETRIC, FLAT_RING = "two levels", "direct", "symmetric", "flat ring"
ULYSSES = "Ulysses x ring"
OWN = TWO_LEVELS, DIRECT, SYMMETRIC  # RingFA3's


@dataclass(frozen=True)
class Batch:
    """Documents on the GPUs of some hosts.

    lengths   (documents,) tokens
    world     GPUs, a multiple of per_host
    per_host  GPUs of a host
    left      the causal window: keys before a query, -1 for all
    """

    lengths: Ints
    world: int
    per_host: int
    heads: Heads
    left: int = -1

    @property
    def hosts(self) -> int:
        return self.world // self.per_host

    @property
    def host(self) -> Ints:
        """(world,) the number of each rank's host."""
        return np.arange(self.world) // self.per_host

    @property
    def cost(self) -> Cost:
        left = self.lengths if self.left < 0 else np.minimum(self.left, self.lengths)
        return block_cost(self.lengths, left, np.zeros_like(left))

    @property
    def ideal(self) -> Work:
        """Of a rank if documents were uncut and work were equal."""
        document = np.arange(len(self.lengths))
        blocks = self.cost(document, 0 * document, self.lengths).sum()
        return Work(blocks / self.world, (-(-self.lengths // TILE)).sum() / self.world)

    @property
    def cumulative(self) -> list[int]:
        """Lengths from 0 to the total."""
        return [0, *np.cumsum(self.lengths).tolist()]

    @cached_property
    def plan(self) -> ContextPlan:
        """RingFA3's, of rank 0. All ranks have the same tables of what they exchange."""
        group, window = (0, self.world), (self.left, -1)
        return plan_context(self.cumulative, group, window_size=window, hosts=self.hosts)

    @cached_property
    def placed(self) -> tuple[Floats, Floats]:
        """(world,) blocks and tokens of each rank of the plan."""
        blocks = [self.cost(s.sequence, s.position, s.length).sum() for s in self.plan.shards]
        return np.array(blocks, float), np.array(self.plan.tokens_per_rank, float)


def loads(batch: Batch, cp: Sequence[int]) -> dict[str, Load]:
    """By the name of each strategy. cp: sizes of the static groups."""
    found = {TWO_LEVELS: two_levels(batch)} if batch.hosts > 1 else {}
    found[DIRECT] = direct(batch)
    if batch.hosts == 1:
        found[SYMMETRIC] = symmetric(batch)
    found[FLAT_RING] = flat_ring(batch)
    found[ULYSSES] = ulysses_ring(batch)
    return found | {f"static cp={size}": static_groups(batch, size) for size in cp}


def direct(batch: Batch) -> Load:
    """Each row goes from its owner straight to every rank that needs it."""
    rows = rows_to(batch.plan.kv_exchange, np.arange(batch.world))
    launches, held = _by_messages(batch, [0] * batch.world)
    return Load(*batch.placed, launches, *_by_link(batch, rows), held)


def two_levels(batch: Batch) -> Load:
    """Each row crosses once per destination host, over all NICs alike, then goes over NVLink.

    A row lands on any rank of a host alike.
    """
    exchange, host, per_host = batch.plan.kv_exchange, batch.host, batch.per_host
    to_rank = rows_to(exchange, np.arange(batch.world)).astype(float)
    to_host = rows_to(exchange, host).astype(float)
    near = host[:, None] == host
    to_host[np.arange(batch.world), host] = 0
    far = np.where(near, 0, to_rank).sum(0)  # of each reader
    inside = _traffic(np.where(near, to_rank, 0))
    passed_on = far * (per_host - 1) / per_host
    relayed = _by_host(batch, passed_on) / per_host
    peers = (per_host - 1) * (far > 0)
    nvlink = Traffic(
        inside.received + passed_on,
        inside.sent + relayed,
        np.maximum(inside.messages, np.maximum(peers, _by_host(batch, peers) / per_host)),
    )
    arrives = to_host.sum(0)[host] / per_host
    pairs = np.maximum((to_host > 0).sum(0)[host], _by_host(batch, (to_host > 0).sum(1)))
    nic = Traffic(arrives, _by_host(batch, to_host.sum(1)) / per_host, pairs / per_host)
    launches, held = _by_messages(batch, batch.plan.hosts)
    return Load(*batch.placed, launches, nvlink, nic, held)


def symmetric(batch: Batch) -> Load:
    """One host: each reader copies one range of the rows that an owner publishes."""
    nvlink, nic = _by_link(batch, bounding_rows(batch.plan.kv_exchange))
    q, k = (
        torch.empty((0, heads, batch.heads.head_dim), dtype=torch.bfloat16)
        for heads in (batch.heads.heads, batch.heads.kv_heads)
    )
    held = np.full(batch.world, float(ring_bytes(batch.plan, k)))
    hops = _by_hop(batch)
    one = select_forward_mode(batch.plan, q, k) == "gathered"
    forward = _launches(batch, np.zeros(batch.world, np.int64))[0] if one else hops[0]
    return Load(*batch.placed, (forward, hops[1]), nvlink, nic, held)


def flat_ring(batch: Batch) -> Load:
    """Each row passes every rank from its owner to its farthest reader."""
    passing = forwarded_rows(batch.plan.kv_exchange)
    nvlink, nic = _ring_links(batch, passing.sum(0), (passing > 0).sum(0))
    held = _two_buffers(batch, batch.placed[1])
    return Load(*batch.placed, _by_hop(batch), nvlink, nic, held)


def static_groups(batch: Batch, cp: int) -> Load:
    """Groups of `cp` ranks, data parallel: a document goes to the group with fewest tokens so far,
    in the order of the batch, and K/V go around the ring of its ranks."""
    group = _deal(batch.lengths, batch.world // cp)
    blocks, tokens, tiles = _cut_over(batch, group, batch.world // cp, cp)
    in_group = np.repeat(tokens.reshape(-1, cp).sum(1), cp)
    hops = np.full(batch.world, cp - 1.0)
    nvlink, nic = _ring_links(batch, in_group - tokens, hops, cp)
    held = _two_buffers(batch, tokens) * (cp > 1)
    return Load(blocks, tokens, _around(tiles, cp), nvlink, nic, held)


def ulysses_ring(batch: Batch) -> Load:
    """All-to-alls of heads and tokens inside a host, a ring of all its ranks between hosts."""
    heads, per_host, hosts = batch.heads, batch.per_host, batch.hosts
    blocks, tokens, tiles = _cut_over(batch, np.zeros(len(batch.lengths), np.int64), 1, hosts)
    copies = max(1.0, per_host / heads.kv_heads)  # of K/V, so that each rank has a head
    share = -(-heads.heads // per_host) / heads.heads  # of a rank's heads
    tokens = tokens.repeat(per_host) / per_host
    ring = (tokens.sum() / per_host - tokens) * copies
    hops = np.full(batch.world, float(hosts - 1))
    held = tokens * copies * (3 if hosts > 1 else 1)  # gathered heads, and a ring's two buffers
    q_row = 2 * heads.heads * heads.head_dim
    kv_row = heads.kv_bytes * copies
    moved = float(tokens.max()) * (per_host - 1) / per_host
    return Load(
        blocks.repeat(per_host) * share,
        tokens,
        _around(tiles.repeat(per_host) * share, hosts),
        Traffic.none(batch.world),
        Traffic(ring, ring, hops, True) if hosts > 1 else Traffic.none(batch.world),
        held * heads.row_bytes,
        # Q, K, V and O; then dO, dQ, dK and dV
        (moved * (2 * q_row + kv_row), moved * (2 * q_row + kv_row)),
    )


def _by_messages(batch: Batch, hosts: Sequence[int]) -> tuple[tuple[Launches, Launches], Floats]:
    """Launches, and (world,) bytes of buffers. hosts: of each rank; where all are equal, owners
    send to all readers."""
    exchange = batch.plan.kv_exchange
    landing = Landing.of(exchange, tuple(hosts))
    launch = launch_of_step(exchange, landing)
    rows = rows_of_buffers(exchange, landing, launch).astype(float)
    return _launches(batch, launch, landing.ranks), rows * batch.heads.row_bytes


def _by_hop(batch: Batch) -> tuple[Launches, Launches]:
    """A launch for each hop."""
    return _launches(batch, np.arange(batch.world))


def _launches(
    batch: Batch, launch: Ints, ranks: HostRanks | None = None
) -> tuple[Launches, Launches]:
    """launch: (steps,) of each step; ranks: default one host."""
    one_host = (0,) * batch.world
    found = tiles_of_launches(batch.plan, ranks or HostRanks.of(one_host), launch)
    count = int(found[0].max())
    forward, backward = (Launches(count, tiles.astype(float)) for tiles in found[1:])
    return forward, backward


def _around(tiles: Floats, ring: int) -> tuple[Launches, Launches]:
    """tiles: (world,) of a rank's own rows, of which a causal ring attends with three quarters at
    each hop."""
    of_ring = Launches(ring, tiles * (1 + 0.75 * (ring - 1)))
    return of_ring, of_ring


def _by_link(batch: Batch, rows: Ints) -> tuple[Traffic, Traffic]:
    """rows: (owner, reader); those of other hosts go over the NICs of both."""
    near = batch.host[:, None] == batch.host
    return _traffic(np.where(near, rows, 0)), _traffic(np.where(near, 0, rows))


def _traffic(rows: Ints) -> Traffic:
    """rows: (owner, reader)."""
    some = rows > 0
    messages = np.maximum(some.sum(0), some.sum(1)).astype(float)
    return Traffic(rows.sum(0).astype(float), rows.sum(1).astype(float), messages)


def _ring_links(
    batch: Batch, into: Ints | Floats, messages: Ints | Floats, ring: int | None = None
) -> tuple[Traffic, Traffic]:
    """Of rings of `ring` ranks each, default one of all, from the rows and messages that each rank
    receives from the one before it."""
    size = ring or batch.world
    rank = np.arange(batch.world)
    after = rank // size * size + (rank + 1) % size
    far_in = batch.host != batch.host[np.argsort(after)]
    received, messages = np.asarray(into, float), np.asarray(messages, float)
    found = []
    for over in (~far_in, far_in):
        rows, count = received * over, messages * over
        found.append(Traffic(rows, rows[after], np.maximum(count, count[after]), True))
    return found[0], found[1]


def _two_buffers(batch: Batch, tokens: Floats) -> Floats:
    """(world,) bytes of a ring: a block arrives while another is in use."""
    return np.full(batch.world, 2 * tokens.max() * batch.heads.row_bytes)


def _by_host(batch: Batch, x: Ints | Floats) -> Floats:
    """(world,) the sums of (world,) over the ranks of each rank's host."""
    return np.bincount(batch.host, x, batch.hosts)[batch.host].astype(float)


def _deal(lengths: Ints, groups: int) -> Ints:
    """(documents,) groups: in order, each document to the group with fewest tokens so far."""
    held = [(0, group) for group in range(groups)]
    dealt = []
    for length in lengths.tolist():
        tokens, group = held[0]
        heapq.heapreplace(held, (tokens + length, group))
        dealt.append(group)
    return np.array(dealt, np.int64)


def _cut_over(batch: Batch, group: Ints, groups: int, ranks: int) -> tuple[Floats, Floats, Floats]:
    """(groups * ranks,) blocks, tokens and tiles where each document of a group is cut over its
    ranks.

    Of 2 * ranks equal chunks each rank has an early and a late one, and the last rank both in the
    middle as one.
    """
    chunk = np.arange(2 * ranks - 1)
    edges = np.delete(np.arange(2 * ranks + 1), ranks)
    edges = batch.lengths[:, None] * edges // (2 * ranks)
    length = np.diff(edges)
    document = np.broadcast_to(np.arange(len(edges))[:, None], length.shape)
    owner = ((ranks * group)[:, None] + np.minimum(chunk, 2 * ranks - 2 - chunk)).ravel()
    cost = batch.cost(document, edges[:, :-1], length)
    blocks, tokens, tiles = (
        np.bincount(owner, x.ravel(), groups * ranks).astype(float)
        for x in (cost, length, -(-length // TILE))
    )
    return blocks, tokens, tiles
