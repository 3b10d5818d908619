"""Which launch attends to the K/V of each ring step."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ringfa3.planning.exchange.buffers import rows_of_buffers
from ringfa3.planning.exchange.landing import Landing
from ringfa3.planning.kv_exchange import KVExchange
from ringfa3.planning.placement.costs import Ints

BUFFERS = 7  # of K/V at most, each of at most the rows of a launch


def launch_of_step(exchange: KVExchange, landing: Landing, kv_budget: int | None = None) -> Ints:
    """(steps,) ascending, for each `HostRanks.ring_step`: the own keys alone, then several steps.

    A rank sends and receives for a launch at most two thirds of the largest block, or what is
    visible at one step, or what lands on one rank for one distance between hosts. So with one host
    two buffers of arriving and one of leaving rows are no more than two blocks, or three steps. The
    same limit holds for rows that land, and for those that leave to land.

    With a budget the limit is the largest part of it, of a half to a seventh, for which the buffers
    have no more rows than the budget; if none fits, what one ring step or distance needs.

    All rows of one distance land in one chunk. Its steps share a launch or, if they are too many,
    have several launches of their own.

    Raises:
        ValueError: a budget is too small for any of these.
    """
    moved = _MovedRows.of(exchange, landing)
    if kv_budget is None:
        return _launches(moved, max(2 * int(exchange.block_rows.max()) // 3, moved.least))
    parts = (kv_budget // n for n in range(2, BUFFERS + 1))
    for limit in (*(part for part in parts if part > moved.least), moved.least):
        launch = _launches(moved, limit)
        rows = int(rows_of_buffers(exchange, landing, launch).max())
        if rows <= kv_budget:
            return launch
    raise ValueError(
        f"kv_budget={kv_budget}: this plan's smallest buffers by messages have {rows} rows of K/V: "
        f"give kv_budget={rows} or more"
    )


class _MovedRows(NamedTuple):
    """Rows of each rank.

    steps  (2, steps, world) sent and received at each `HostRanks.ring_step`
    lands  (2, hosts, world) sent to land and landed, by distance between hosts
    """

    steps: Ints
    lands: Ints

    @classmethod
    def of(cls, exchange: KVExchange, landing: Landing) -> _MovedRows:
        ranks, world = landing.ranks, len(exchange.tokens)
        hosts, most = ranks.ranks.shape
        owner, hop, begin, end = exchange.runs().T  # `needs` may overlap
        rows = np.bincount(world * owner + hop, end - begin, world * world).astype(np.int64)
        owner, hop = np.divmod(np.arange(world * world), world)
        reader = (owner + hop) % world
        via = landing.rank[owner, ranks.host[reader]]
        ring_step = ranks.ring_step(owner, reader)
        steps = np.zeros((2, hosts * most, world), np.int64)
        np.add.at(steps[0], (ring_step, np.where(via < 0, owner, via)), rows.ravel())
        steps[1, ring_step, reader] = rows.ravel()
        lands = np.zeros((2, hosts, world), np.int64)
        owner, host = np.nonzero(landing.rank >= 0)
        far = (host - ranks.host[owner]) % hosts
        lands[0, far, owner] = landing.rows[owner, host]
        np.add.at(lands[1], (far, landing.rank[owner, host]), landing.rows[owner, host])
        return cls(steps, lands)

    @property
    def least(self) -> int:
        """The least limit of a launch: one ring step, or what lands for one distance."""
        return int(max(self.steps.max(), self.lands.max()))


def _launches(moved: _MovedRows, limit: int) -> Ints:
    """As `launch_of_step`. limit: rows of a launch, `moved.least` or more."""
    steps, lands = moved
    hosts, world = lands.shape[1:]
    count = steps.shape[1]
    most = count // hosts
    launch = np.zeros(count, np.int64)
    number, landed = 0, False
    held = np.full((4, world), limit + 1)
    remote = np.arange(most, count).reshape(-1, most)
    for together in [*([s] for s in range(1, most)), *remote.tolist()]:
        far = together[0] // most
        added = np.concatenate((steps[:, together].sum(1), lands[:, far]))
        if (held + added).max() > limit or (lands[:, far].any() and not landed):
            number, held, landed = number + 1, np.zeros_like(held), False
        landed |= bool(lands[:, far].any())
        launch[together] = number
        held = held + added
        if added.max() > limit:
            launch[together] += _split(steps[:, together], limit)
            number = int(launch[together[-1]])  # `held` is above the limit: the next open one
    return launch


def _split(rows: Ints, limit: int) -> Ints:
    """(steps,) from 0 on, ascending: steps are together as long as all rows are within the limit.

    rows: (2, steps, world).
    """
    launch = np.zeros(rows.shape[1], np.int64)
    held = np.zeros_like(rows[:, 0])
    for i in range(1, rows.shape[1]):
        held = held + rows[:, i - 1]
        opens = (held + rows[:, i]).max() > limit
        launch[i] = launch[i - 1] + opens
        held = np.zeros_like(held) if opens else held
    return launch
