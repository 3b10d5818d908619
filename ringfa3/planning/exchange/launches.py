"""Which launch attends to the K/V of each step."""

from __future__ import annotations

import numpy as np

from ringfa3.planning.exchange.landing import Landing
from ringfa3.planning.kv_exchange import KVExchange
from ringfa3.planning.placement.costs import Ints


def launch_of_step(exchange: KVExchange, landing: Landing) -> Ints:
    """(steps,) ascending, for each `HostRanks.step`: the own keys alone, then several steps.

    A rank sends and receives for a launch at most two thirds of the largest block, or what is
    visible at one step, or what lands on one rank for one distance between hosts. So with one host
    two buffers of arriving and one of leaving rows are no more than two blocks, or three steps. The
    same limit holds for rows that land, and for those that leave to land.

    All rows of one distance land in one batch. Its steps share a launch or, if they are too many,
    have several launches of their own.
    """
    ranks, world = landing.ranks, len(exchange.tokens)
    hosts, most = ranks.ranks.shape
    owner, hop, begin, end = exchange.needs
    rows = np.bincount(world * owner + hop, end - begin, world * world).astype(np.int64)
    rows = np.minimum(rows.reshape(world, world), np.diff(exchange.visible)[..., 0])
    owner, hop = np.divmod(np.arange(world * world), world)
    reader = (owner + hop) % world
    via = landing.rank[owner, ranks.host[reader]]
    step = ranks.step(owner, reader)
    both = np.zeros((2, hosts * most, world), np.int64)  # of each step: sent and received
    np.add.at(both[0], (step, np.where(via < 0, owner, via)), rows.ravel())
    both[1, step, reader] = rows.ravel()
    lands = np.zeros((2, hosts, world), np.int64)  # of each distance: sent to land, and landed
    owner, host = np.nonzero(landing.rank >= 0)
    far = (host - ranks.host[owner]) % hosts
    lands[0, far, owner] = landing.rows[owner, host]
    np.add.at(lands[1], (far, landing.rank[owner, host]), landing.rows[owner, host])

    limit = max(2 * exchange.block_rows.max() // 3, both.max(), lands.max())
    launch = np.zeros(hosts * most, np.int64)
    number, landed = 0, False
    held = np.full((4, world), limit + 1)
    remote = np.arange(most, hosts * most).reshape(-1, most)
    for steps in [*([s] for s in range(1, most)), *remote.tolist()]:
        far = steps[0] // most
        added = np.concatenate((both[:, steps].sum(1), lands[:, far]))
        if (held + added).max() > limit or (lands[:, far].any() and not landed):
            number, held, landed = number + 1, np.zeros_like(held), False
        landed |= bool(lands[:, far].any())
        launch[steps] = number
        held = held + added
        if added.max() > limit:
            launch[steps] += _split(both[:, steps], limit)
            number = int(launch[steps[-1]])  # `held` is above the limit, so the next steps open one
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
