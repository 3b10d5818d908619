"""Counts the K/V rows that the ranks of a plan exchange, by the rule of each transport."""

from __future__ import annotations

import numpy as np

from ringfa3.planning.context_plan import ContextPlan
from ringfa3.planning.exchange.landing import HostRanks
from ringfa3.planning.kv_exchange import KVExchange, PlacedSegments
from ringfa3.planning.placement.costs import TILE, Ints
from ringfa3.planning.tile_schedule import join_ranges
from ringfa3.planning.tiling import band, pair_sequences


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


def tiles_of_launches(plan: ContextPlan, ranks: HostRanks, launch: Ints) -> tuple[Ints, Ints, Ints]:
    """(world,) each: launches that attend to any key; tiles of TILE query rows, once for each
    launch that attends with them; and tiles of TILE keys to which a rank attends.

    launch: (steps,) of each `HostRanks.ring_step`. Tiles begin with a segment, of which all count.
    """
    placed = PlacedSegments.of(plan.shards)
    segments, tiles = placed.segments, -(-placed.segments.length // TILE)
    pairs = pair_sequences(segments, segments)
    bands = band(segments, segments, *pairs, 0, *plan.effective_window)
    reader, owner = placed.owner[bands.query], placed.owner[bands.key]
    at, count = launch[ranks.ring_step(owner, reader)], int(launch[-1]) + 1
    active = np.unique(count * reader + at) // count
    visits = np.unique(count * bands.query + at) // count
    key, by = np.divmod(np.unique(plan.world * bands.key + reader), plan.world)
    sums = (active, None), (placed.owner[visits], tiles[visits]), (by, tiles[key])
    launches, forward, backward = (
        np.bincount(rank, rows, plan.world).astype(np.int64) for rank, rows in sums
    )
    return launches, forward, backward
