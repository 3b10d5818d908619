"""Counts the K/V rows that the ranks of a plan exchange, by the rule of each transport."""

from __future__ import annotations

import numpy as np

from ringfa3.planning.kv_exchange import KVExchange
from ringfa3.planning.placement.costs import Ints
from ringfa3.planning.tile_schedule import join_ranges


def rows_to(exchange: KVExchange, destination: Ints) -> Ints:
    """(world, destinations) rows of each owner that readers of a destination need, each once.

    destination: (world,) of each reader: its own number, or that of its host.
    """
    owner, hop, begin, end = exchange.needs
    world, count = len(exchange.tokens), int(destination.max()) + 1
    reader = (owner + hop) % world
    _, pair, begin, end = join_ranges(owner * count + destination[reader], begin, end)
    rows = np.bincount(pair, end - begin, world * count).astype(np.int64)
    return rows.reshape(world, count)


def bounding_rows(exchange: KVExchange) -> Ints:
    """(world, world) rows of each owner in the one range of its block that a reader copies."""
    rows = np.diff(exchange.visible)[..., 0]  # (owner, hop)
    owner = np.arange(len(rows))
    by_reader: Ints = rows[owner[:, None], (owner - owner[:, None]) % len(rows)]
    return by_reader


def forwarded_rows(exchange: KVExchange) -> Ints:
    """(world, world) rows of each owner that pass a rank, if each goes around to its farthest
    reader."""
    world = len(exchange.tokens)
    passing = np.zeros((world, world), np.int64)
    owner, hop, begin, end = exchange.runs().T
    hops = np.arange(1, world)
    for rank, tokens in enumerate(exchange.tokens.tolist()):
        farthest = np.zeros(tokens, np.int64)
        mine = owner == rank
        for t, a, b in zip(*(x[mine].tolist() for x in (hop, begin, end)), strict=True):
            farthest[a:b] = t  # runs are ordered by hop
        rows = tokens - np.searchsorted(np.sort(farthest), hops)
        passing[rank, (rank + hops) % world] = rows
    return passing


def held_by_messages(exchange: KVExchange) -> Ints:
    """(world,) rows of all buffers of K/V, or of dK/dV: two of arriving rows, which launches use in
    turn, and one of leaving rows."""
    owner, hop, begin, end = exchange.runs().T
    world, launch = len(exchange.tokens), exchange.launch_of_hop[hop]
    launches = int(exchange.launch_of_hop[-1]) + 1

    def by_launch(rank: Ints) -> Ints:
        rows = np.bincount(rank * launches + launch, end - begin, world * launches)
        return rows.astype(np.int64).reshape(world, launches)

    arriving, leaving = by_launch((owner + hop) % world), by_launch(owner).max(1)
    of_parity = (arriving[:, first::2].max(1, initial=0) for first in (1, 2))
    rows: Ints = sum(of_parity, leaving)
    return rows
