"""A ring call by messages: its buffers, and what moves from hop to hop, between neighbours or home.

K/V and the float32 dK/dV partials lie in two buffers each, used by even and odd hops, whatever the
number of ranks. Row counts come from the plan's `KVExchange`.

A backward hop stores what it adds to a partial in a buffer of its own: its kernel waits for no
partial, which so may travel beside it, over NCCL too, and is added to afterwards. All that moves
beside a kernel is one exchange: over NCCL a second one could find no SM free until the kernel ends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch

from ringfa3.kernels.reference import statistics_dtype
from ringfa3.planning.context_plan import ContextPlan
from ringfa3.planning.kv_exchange import first_heads
from ringfa3.ring.p2p import Exchange, Message, Transport

KV, PARTIAL, HOME = 0, 1, 2  # message tags

Messages: TypeAlias = tuple[list[Message], list[Message]]  # sends and receives; some may be empty


class Travel:
    """The K/V of a call on their way: two buffers, (rows, 2, hk, d), K and V of a row together."""

    def __init__(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        plan: ContextPlan,
        direction: str,
    ) -> None:
        self.plan, self.direction = plan, direction
        self._local = (k, v)
        rows = plan.kv_exchange.rows
        world, rank = plan.world, plan.rank
        held = [int(rows[(rank - t) % world, max(t, 1)]) for t in range(world)]  # at hop t
        self.buffers = [
            k.new_empty((max(held[parity::2], default=0), 2, *k.shape[1:])) for parity in range(2)
        ]
        if world > 1 and held[0]:
            own = plan.published_rows(k.device)
            for i, x in enumerate((k, v)):
                own.gather(x, self.buffers[0][: held[0], i])

    def block(self, hop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V (rows, hk, d) of a hop."""
        if hop == 0:
            return self._local
        rows = int(self.plan.kv_exchange.rows[(self.plan.rank - hop) % self.plan.world, hop])
        buffer = self.buffers[hop % 2][:rows]
        return buffer[:, 0], buffer[:, 1]

    def messages(self, hop: int) -> Messages:
        """Those that move the blocks of hop `hop`, while it is computed, on to hop + 1."""
        plan, rows = self.plan, self.plan.kv_exchange.rows
        rank, world = plan.rank, plan.world
        if hop + 1 >= world:
            return [], []
        out = int(rows[(rank - hop) % world, hop + 1])
        into = int(rows[(rank - hop - 1) % world, hop + 1])
        what = f"{self.direction} hop {hop + 1}: K/V"
        here, there = self.buffers[hop % 2], self.buffers[(hop + 1) % 2]
        return (
            [Message(here[:out], (rank + 1) % world, what, KV)],
            [Message(there[:into], (rank - 1) % world, what, KV)],
        )


class Partials:
    """The dK/dV of a backward on their way, (rows, 2, hk, d), dK and dV together.

    In the statistics dtype. The first visitor of a block stores its contribution as the partial;
    others store it in `_contribution`, which no message has, and add it when the partial is here.
    That has the rows of one block at most, and none between two ranks.
    The partial of hop t lies in the first rows of `_buffers[t % 2]`, and behind it what comes home
    from hop t - 1.

    home   (local_tokens, 2, hk, d): of this rank's own keys
    """

    def __init__(self, k: torch.Tensor, plan: ContextPlan) -> None:
        self.plan = plan
        shape, dtype = (2, *k.shape[1:]), statistics_dtype(k.dtype)
        self.home = k.new_empty((plan.local_tokens, *shape), dtype=dtype)
        sizes = [0, 0]
        for t in range(1, plan.world + 1):
            sizes[t % 2] = max(sizes[t % 2], self._held(t) + self._returned(t - 1))
        self._buffers = [k.new_empty((n, *shape), dtype=dtype) for n in sizes]
        rows = max((self._seen(t)[1] for t in range(1, plan.world) if self._later(t)), default=0)
        self._contribution = k.new_empty((rows, *shape), dtype=dtype)

    def _owner(self, hop: int) -> int:
        return (self.plan.rank - hop) % self.plan.world

    def _held(self, hop: int) -> int:
        """Rows of the partial that this rank has at a hop, 1 <= hop <= world."""
        return int(self.plan.kv_exchange.rows[self._owner(hop), hop])

    def _seen(self, hop: int) -> tuple[int, int]:
        """Between which rows of it a hop, 1 <= hop < world, stores."""
        begin, end = self.plan.kv_exchange.visible[self._owner(hop), hop].tolist()
        return begin, end

    def _later(self, hop: int) -> bool:
        """Whether other ranks have added to the partial before."""
        return hop > int(self.plan.kv_exchange.first_visit[self._owner(hop)])

    def _carried(self, owner: int, hop: int) -> int:
        """Rows of an owner's partial that go on to the next rank after a hop."""
        move = self.plan.kv_exchange
        return int(move.rows[owner, hop + 1]) if hop >= move.first_visit[owner] else 0

    def _returned(self, hop: int) -> int:
        """Rows of this rank's own partial that come home after a hop."""
        rows = self.plan.kv_exchange.rows[self.plan.rank]
        return int(rows[hop] - rows[hop + 1]) if hop >= 1 else 0

    @property
    def come_together(self) -> bool:
        """Whether rows come home, all of them at the end."""
        hops = [t for t in range(1, self.plan.world) if self._returned(t)]
        return hops == [self.plan.world - 1]

    def block(self, hop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """dK and dV (rows, hk, d) for a hop to store, whatever is on its way."""
        rows = self.home
        if hop > 0:
            begin, end = self._seen(hop)
            if self._later(hop):
                rows = self._contribution[:end]
            else:
                partial = self._buffers[hop % 2][: self._held(hop)]
                rows = partial[:end]
                if end:
                    partial[:begin].zero_(), partial[end:].zero_()
        return rows[:, 0], rows[:, 1]

    def messages(self, hop: int) -> Messages:
        """Those that move the partial of hop - 1, while hop `hop` is computed.

        On, as far as others add to it; the rest goes home to its owner.
        """
        if hop <= 1:
            return [], []
        plan, last = self.plan, hop - 1
        rank, world, owner = plan.rank, plan.world, self._owner(last)
        here, there = self._buffers[last % 2], self._buffers[hop % 2]
        on, held = self._carried(owner, last), self._held(last)
        into = self._carried(self._owner(hop), last)
        done = plan.kv_exchange.rows[owner, hop]
        returned = there[self._held(hop) :][: self._returned(last)]
        what = f"backward hop {last}: dK/dV"
        return (
            [
                Message(here[:on], (rank + 1) % world, what, PARTIAL),
                Message(here[done:held], owner, what + " going home", HOME),
            ],
            [
                Message(there[:into], (rank - 1) % world, what, PARTIAL),
                Message(returned, (rank + last) % world, what + " coming home", HOME),
            ],
        )

    def add(self, hop: int) -> None:
        """Adds a hop's contribution to the partial, and what has come home beside it."""
        plan, there = self.plan, self._buffers[hop % 2]
        if 0 < hop < plan.world and self._later(hop):
            begin, end = self._seen(hop)
            there[begin:end].add_(self._contribution[begin:end])
        back = self._returned(hop - 1)
        if back:
            end = int(plan.kv_exchange.rows[plan.rank, hop - 1])
            rows = plan.published_rows(self.home.device).part(end - back, end)
            rows.add(there[self._held(hop) :][:back], self.home)


class Relay:
    """The forward or backward call of one rank, by messages.

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
        self.world, self.transport = plan.world, transport
        self.travel = Travel(k, v, plan, direction)
        self.partials = Partials(k, plan) if direction == "backward" else None
        # KV heads of the own keys that come first; None: all, also where some sums are wanted
        # before the end.
        self._first: int | None = None
        if self.partials is not None and self.partials.come_together:
            tokens, kv_heads, _ = k.shape
            self._first = first_heads(kv_heads, tokens) or None

    @property
    def home(self) -> torch.Tensor:
        assert self.partials is not None
        return self.partials.home

    def run(self, attend: Callable[..., None]) -> None:
        """Calls attend(hop, k, v), backward attend(hop, k, v, dk, dv, head), for each hop.

        k, v: (rows, heads, d) of the hop's block, KV heads from `head` on. dk, dv: the first of
        these rows in the statistics dtype, which are stored as far as the hop's tiles have them.
        All heads come at once, but those of the own keys, hop 0, may come first and last.
        """
        for hop in range(self.world):
            exchange = self._exchange(hop)
            self._attend(attend, hop, slice(0, self._first) if hop == 0 else slice(None))
            if exchange is not None:
                exchange.wait()
            if self.partials is not None:
                self.partials.add(hop)
        if self.partials is not None:
            exchange = self._exchange(self.world)
            if self._first is not None:
                self._attend(attend, 0, slice(self._first, None))
            if exchange is not None:
                exchange.wait()
            self.partials.add(self.world)

    def _attend(self, attend: Callable[..., None], hop: int, heads: slice) -> None:
        keys = (x[:, heads] for x in self.travel.block(hop))
        if self.partials is None:
            attend(hop, *keys)
        else:
            grads = (x[:, heads] for x in self.partials.block(hop))
            attend(hop, *keys, *grads, heads.start or 0)

    def _exchange(self, hop: int) -> Exchange | None:
        """Starts moving all that moves beside a hop; None if nothing does."""
        both = [self.travel.messages(hop)]
        if self.partials is not None:
            both.append(self.partials.messages(hop))
        sends, receives = (
            [m for messages in kind for m in messages if len(m.tensor)]
            for kind in zip(*both, strict=True)
        )
        if not (sends or receives):
            return None
        assert self.transport is not None
        return self.transport.exchange(sends, receives)
