"""A ring call by messages between neighbours: its buffers, and what moves from hop to hop.

K/V and the float32 dK/dV partials lie in two buffers each, used by even and odd hops, whatever the
number of ranks. Row counts come from the plan's `Movement`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ringfa3.context import ContextPlan
from ringfa3.reference import statistics_dtype
from ringfa3.transports import Exchange, Message, Transport

KV, PARTIAL, HOME = 0, 1, 2  # message tags


class Travel:
    """The K/V of a call on their way: two buffers, (rows, 2, hk, d), K and V of a row together."""

    def __init__(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        plan: ContextPlan,
        transport: Transport | None,
        direction: str,
    ) -> None:
        self.plan, self.transport, self.direction = plan, transport, direction
        self._local = (k, v)
        rows = plan.movement.rows
        world, rank = plan.world, plan.rank
        held = [int(rows[(rank - t) % world, max(t, 1)]) for t in range(world)]  # at hop t
        self.buffers = [
            k.new_empty((max(held[parity::2], default=0), 2, *k.shape[1:])) for parity in range(2)
        ]
        if world > 1 and held[0]:
            own = plan.own_rows(k.device)
            for i, x in enumerate((k, v)):
                own.read(x, self.buffers[0][: held[0], i])

    def block(self, hop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V (rows, hk, d) of a hop."""
        if hop == 0:
            return self._local
        rows = int(self.plan.movement.rows[(self.plan.rank - hop) % self.plan.world, hop])
        buffer = self.buffers[hop % 2][:rows]
        return buffer[:, 0], buffer[:, 1]

    def advance(self, hop: int) -> Exchange | None:
        """Starts moving the blocks of hop `hop` on to hop + 1; None if nothing moves."""
        plan, rows = self.plan, self.plan.movement.rows
        if hop + 1 >= plan.world:
            return None
        assert self.transport is not None
        rank, world = plan.rank, plan.world
        out = int(rows[(rank - hop) % world, hop + 1])
        into = int(rows[(rank - hop - 1) % world, hop + 1])
        what = f"{self.direction} hop {hop + 1}: K/V"
        here, there = self.buffers[hop % 2], self.buffers[(hop + 1) % 2]
        return self.transport.exchange(
            [Message(here[:out], (rank + 1) % world, what, KV)] if out else [],
            [Message(there[:into], (rank - 1) % world, what, KV)] if into else [],
        )


class Partials:
    """The float32 dK/dV of a backward on their way, (rows, 2, hk, d), dK and dV together.

    home   (local_tokens, 2, hk, d): of this rank's own keys
    """

    def __init__(self, k: torch.Tensor, plan: ContextPlan, transport: Transport | None) -> None:
        self.plan, self.transport = plan, transport
        shape, dtype = (2, *k.shape[1:]), statistics_dtype(k.dtype)
        self.home = k.new_empty((plan.local_tokens, *shape), dtype=dtype)
        sizes = [0, 0]
        for t in range(1, plan.world + 1):
            sizes[t % 2] = max(sizes[t % 2], self._held(t) + self._returned(t - 1))
        self._buffers = [k.new_empty((n, *shape), dtype=dtype) for n in sizes]
        self._pending: Exchange | None = None

    def _held(self, hop: int) -> int:
        """Rows of the partial that this rank works on at a hop, 1 <= hop <= world."""
        world = self.plan.world
        return int(self.plan.movement.rows[(self.plan.rank - hop) % world, hop])

    def _carried(self, owner: int, hop: int) -> int:
        """Rows of an owner's partial that go on to the next rank after a hop."""
        move = self.plan.movement
        return int(move.rows[owner, hop + 1]) if hop >= move.first_visit[owner] else 0

    def _returned(self, hop: int) -> int:
        """Rows of this rank's own partial that come home after a hop."""
        rows = self.plan.movement.rows[self.plan.rank]
        return int(rows[hop] - rows[hop + 1]) if hop >= 1 else 0

    def block(self, hop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """dK and dV (rows, hk, d) to add to at a hop, once they are here."""
        if hop == 0:
            return self.home[:, 0], self.home[:, 1]
        self.settle(hop - 1)
        partial = self._buffers[hop % 2][: self._held(hop)]
        return partial[:, 0], partial[:, 1]

    def advance(self, hop: int) -> None:
        """Sends a hop's partial: on, as far as others add to it, the rest home to its owner."""
        if hop == 0:
            return
        assert self.transport is not None
        plan = self.plan
        rank, world = plan.rank, plan.world
        owner = (rank - hop) % world
        here, there = self._buffers[hop % 2], self._buffers[(hop + 1) % 2]
        on, held = self._carried(owner, hop), self._held(hop)
        into = self._carried((owner - 1) % world, hop)
        done = plan.movement.rows[owner, hop + 1]
        back = self._returned(hop)
        what = f"backward hop {hop}: dK/dV"
        sends = [
            Message(here[:on], (rank + 1) % world, what, PARTIAL),
            Message(here[done:held], owner, what + " going home", HOME),
        ]
        receives = [
            Message(there[:into], (rank - 1) % world, what, PARTIAL),
            Message(there[into : into + back], (rank + hop) % world, what + " coming home", HOME),
        ]
        self._pending = self.transport.exchange(
            [m for m in sends if len(m.tensor)], [m for m in receives if len(m.tensor)]
        )

    def settle(self, hop: int) -> None:
        """Waits for what `advance(hop)` started, and adds what has come home."""
        if self._pending is None:
            return
        self._pending.wait()
        self._pending = None
        back = self._returned(hop)
        if back:
            plan = self.plan
            into = self._carried((plan.rank - hop - 1) % plan.world, hop)
            end = int(plan.movement.rows[plan.rank, hop])
            rows = plan.own_rows(self.home.device).part(end - back, end)
            rows.add(self._buffers[(hop + 1) % 2][into : into + back], self.home)


class Relay:
    """The forward or backward call of one rank, as `ringfa3.course.Course` is over peers' memory.

    home   backward: (local_tokens, 2, hk, d) statistics dtype, dK and dV of this rank's own keys
    """

    def __init__(
        self,
        plan: ContextPlan,
        transport: Transport | None,
        direction: str,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> None:
        self.world = plan.world
        self.travel = Travel(k, v, plan, transport, direction)
        self.partials = Partials(k, plan, transport) if direction == "backward" else None

    @property
    def home(self) -> torch.Tensor:
        assert self.partials is not None
        return self.partials.home

    def run(self, attend: Callable[..., None]) -> None:
        """Calls attend(hop, k, v), backward attend(hop, k, v, dk, dv), for each hop."""
        partials = self.partials
        for hop in range(self.world):
            pending = self.travel.advance(hop)
            grads = () if partials is None else partials.block(hop)
            attend(hop, *self.travel.block(hop), *grads)
            if partials is not None:
                partials.advance(hop)
            if pending is not None:
                pending.wait()
        if partials is not None:
            partials.settle(self.world - 1)
