"""How many rows the buffers of a ring by messages have."""

from __future__ import annotations

from typing import SupportsIndex

import numpy as np

from ringfa3.planning.exchange.landing import Landing
from ringfa3.planning.kv_exchange import KVExchange
from ringfa3.planning.placement.costs import Bools, Ints
from ringfa3.validation import whole_number


def check_kv_budget(kv_budget: SupportsIndex | None) -> int | None:
    """Raises ValueError or TypeError unless it is None or a number of rows."""
    if kv_budget is None:
        return None
    rows = whole_number("kv_budget", kv_budget)
    if rows < 1:
        raise ValueError(f"kv_budget={rows}: give 1 row or more, or None for no budget")
    return rows


def rows_of_buffers(exchange: KVExchange, landing: Landing, launch: Ints) -> Ints:
    """(world,) rows of all buffers of K/V on each rank: two of arriving rows and one of leaving
    rows; and with two levels, two of rows that land, one of those that leave to land, one of those
    that go on. Buffers of dK/dV have no more rows.

    launch: (steps,) of each `HostRanks.ring_step`.
    """
    ranks = landing.ranks
    most = ranks.ranks.shape[1]
    arriving, leaving, passed = moved_rows(exchange, landing, launch)
    held = _in_two(arriving) + leaving.max(1) + passed.max(1)

    owner, host, begin, end = landing.runs.T
    to, size = landing.rank[owner, host], end - begin
    far = (host - ranks.host[owner]) % len(ranks.ranks)
    at, shape = launch[most * far], arriving.shape  # a chunk lands for one launch
    landed = _sums(to, at, size, to >= 0, shape)
    held = held + _in_two(landed[:, np.unique(at[to >= 0])])
    return np.asarray(held + _sums(owner, at, size, to >= 0, shape).max(1))


def moved_rows(exchange: KVExchange, landing: Landing, launch: Ints) -> tuple[Ints, Ints, Ints]:
    """(world, launches) each: K/V rows that arrive on a rank for a launch; its own that go straight
    to their readers; those that have landed and go on.

    launch: as in `rows_of_buffers`.
    """
    ranks = landing.ranks
    shape = world, _ = len(ranks.host), int(launch[-1]) + 1
    owner, hop, begin, end = exchange.runs().T
    reader, size = (owner + hop) % world, end - begin
    at, via = launch[ranks.ring_step(owner, reader)], landing.rank[owner, ranks.host[reader]]
    return (
        _sums(reader, at, size, via >= -1, shape),
        _sums(owner, at, size, via < 0, shape),
        _sums(via, at, size, via >= 0, shape),
    )


def _sums(rank: Ints, launch: Ints, size: Ints, chosen: Bools, shape: tuple[int, int]) -> Ints:
    """(world, launches), the shape: sums over the chosen runs."""
    at = (shape[1] * rank + launch)[chosen]
    return np.bincount(at, size[chosen], shape[0] * shape[1]).astype(np.int64).reshape(shape)


def _in_two(rows: Ints) -> Ints:
    """Of two buffers, which columns use in turn."""
    return np.asarray(rows[:, ::2].max(1, initial=0) + rows[:, 1::2].max(1, initial=0))
