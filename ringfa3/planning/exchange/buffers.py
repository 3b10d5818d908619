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
    ranks, count = landing.ranks, int(launch[-1]) + 1
    world, (host_count, most) = len(ranks.host), ranks.ranks.shape

    def by_launch(rank: Ints, launch: Ints, size: Ints, chosen: Bools) -> Ints:
        """(world, launches) sums over the chosen runs."""
        at = (count * rank + launch)[chosen]
        rows = np.bincount(at, size[chosen], world * count)
        return rows.astype(np.int64).reshape(world, count)

    def in_two(rows: Ints) -> Ints:
        """Of two buffers, which columns use in turn."""
        return np.asarray(rows[:, ::2].max(1, initial=0) + rows[:, 1::2].max(1, initial=0))

    owner, hop, begin, end = exchange.runs().T
    reader, size = (owner + hop) % world, end - begin
    at, via = launch[ranks.ring_step(owner, reader)], landing.rank[owner, ranks.host[reader]]
    arriving = by_launch(reader, at, size, via >= -1)
    held = in_two(arriving) + by_launch(owner, at, size, via < 0).max(1)
    held = held + by_launch(via, at, size, via >= 0).max(1)

    owner, host, begin, end = landing.runs.T
    to, size = landing.rank[owner, host], end - begin
    at = launch[most * ((host - ranks.host[owner]) % host_count)]  # a chunk lands for one launch
    landed = by_launch(to, at, size, to >= 0)
    held = held + in_two(landed[:, np.unique(at[to >= 0])])
    return np.asarray(held + by_launch(owner, at, size, to >= 0).max(1))
