"""A ring pass by messages: K/V blocks between neighbours, dK/dV partials also to their owners.

K/V and the float32 dK/dV partials have two buffers each, for even and odd hops, whatever the world
size. Row counts come from the plan's `KVExchange`.

A backward hop stores its dK/dV in a buffer of its own and adds them to the partial afterwards. So
no kernel waits for a partial, and partials move while kernels run. All transfers during a kernel
are one exchange: over NCCL a second one might find no free SM until the kernel ends.
"""

from __future__ import annotations

from typing import TypeAlias

import torch

from ringfa3.kernels.dispatch import select_local_kv
from ringfa3.kernels.local_kv import LocalKV
from ringfa3.kernels.reference import accum_dtype
from ringfa3.pass_interface import Attend, HopTensors, LocalHeads
from ringfa3.planning.context_plan import ContextPlan
from ringfa3.planning.kv_exchange import KVExchange
from ringfa3.ring.p2p import Exchange, Message, Transport

KV, PARTIAL, RETURN, STATISTICS = range(4)  # message tags

Messages: TypeAlias = tuple[list[Message], list[Message]]  # sends and receives; some may be empty


class Blocks:
    """The blocks that ranks pass on, in two buffers, for even and odd hops.

    published  the rows of this rank's own block, in buffer order, to be filled before hop 0
    """

    def __init__(self, exchange: KVExchange, rank: int, pass_type: str, row: torch.Tensor) -> None:
        """row: a tensor of the shape, dtype and device of the exchange's rows."""
        self._rows, self._rank, self._world = exchange.rows, rank, len(exchange.rows)
        self._pass_type = pass_type
        held = [int(self._rows[(rank - t) % self._world, max(t, 1)]) for t in range(self._world)]
        self._buffers = [
            row.new_empty((max(held[parity::2], default=0), *row.shape)) for parity in range(2)
        ]
        self.published = self._buffers[0][: held[0]]

    def received(self, hop: int) -> torch.Tensor:
        """The rows of a hop's block, hop >= 1."""
        return self._buffers[hop % 2][: self._rows[(self._rank - hop) % self._world, hop]]

    def messages(self, hop: int) -> Messages:
        """Messages during a hop's kernel: they pass its block on, and bring the next one."""
        rank, world = self._rank, self._world
        if hop + 1 >= world:
            return [], []
        out = int(self._rows[(rank - hop) % world, hop + 1])
        what = f"{self._pass_type} hop {hop + 1}: K/V"
        return (
            [Message(self._buffers[hop % 2][:out], (rank + 1) % world, what, KV)],
            [Message(self.received(hop + 1), (rank - 1) % world, what, KV)],
        )


class KVBuffers(Blocks):
    """The K/V blocks of a pass, (rows, 2, hk, d), K and V of a row together."""

    def __init__(
        self, k: torch.Tensor, v: torch.Tensor, plan: ContextPlan, pass_type: str, local_kv: LocalKV
    ) -> None:
        super().__init__(plan.kv_exchange, plan.rank, pass_type, k.new_empty((2, *k.shape[1:])))
        self._local = (k, v)
        local_kv.publish(k, v, self.published, None)

    def block(self, hop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V (rows, hk, d) of a hop."""
        if hop == 0:
            return self._local
        rows = self.received(hop)
        return rows[:, 0], rows[:, 1]


class GradBuffers:
    """The dK/dV partials of a backward pass, (rows, 2, hk, d), dK and dV of a row together.

    In the accumulation dtype. The first rank that computes on a block stores its contribution as
    the partial. Later ranks write to `_contribution`, a scratch buffer that is never sent, and add
    it once the partial arrives. At most one block; empty for world size 2.

    The partial of hop t is in the first rows of `_buffers[t % 2]`; after it are the rows of this
    rank's own partial that return after hop t - 1.

    dkv   (local_keys, 2, hk, d): of this rank's own keys
    """

    def __init__(self, k: torch.Tensor, plan: ContextPlan) -> None:
        self.plan = plan
        shape, dtype = (2, *k.shape[1:]), accum_dtype(k.dtype)
        self.dkv = k.new_empty((plan.local_keys, *shape), dtype=dtype)
        sizes = [0, 0]
        for t in range(1, plan.world + 1):
            sizes[t % 2] = max(sizes[t % 2], self._held(t) + self._returned(t - 1))
        self._buffers = [k.new_empty((n, *shape), dtype=dtype) for n in sizes]
        later = [t for t in range(1, plan.world) if self._active_before(t)]
        rows = max((self._visible(t)[1] for t in later), default=0)
        self._contribution = k.new_empty((rows, *shape), dtype=dtype)

    def _owner(self, hop: int) -> int:
        return (self.plan.rank - hop) % self.plan.world

    def _held(self, hop: int) -> int:
        """Rows of the partial that this rank holds at a hop, 1 <= hop <= world."""
        return int(self.plan.kv_exchange.rows[self._owner(hop), hop])

    def _visible(self, hop: int) -> tuple[int, int]:
        """Rows [begin, end) of the partial that a hop stores, 1 <= hop < world."""
        begin, end = self.plan.kv_exchange.visible[self._owner(hop), hop].tolist()
        return begin, end

    def _active_before(self, hop: int) -> bool:
        """Whether other ranks have added to the partial before this hop."""
        return hop > int(self.plan.kv_exchange.first_active[self._owner(hop)])

    def _carried(self, owner: int, hop: int) -> int:
        """Rows of an owner's partial that go on to the next rank after a hop."""
        exchange = self.plan.kv_exchange
        return int(exchange.rows[owner, hop + 1]) if hop >= exchange.first_active[owner] else 0

    def _returned(self, hop: int) -> int:
        """Rows of this rank's own partial that return after a hop."""
        rows = self.plan.kv_exchange.rows[self.plan.rank]
        return int(rows[hop] - rows[hop + 1]) if hop >= 1 else 0

    @property
    def returned_at_the_end(self) -> bool:
        """Whether rows of this rank's own partial return, and all of them after the last hop."""
        hops = [t for t in range(1, self.plan.world) if self._returned(t)]
        return hops == [self.plan.world - 1]

    def block(self, hop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """dK and dV (rows, hk, d) for a hop to store; no message reads or writes them meanwhile."""
        rows = self.dkv
        if hop > 0:
            begin, end = self._visible(hop)
            if self._active_before(hop):
                rows = self._contribution[:end]
            else:
                partial = self._buffers[hop % 2][: self._held(hop)]
                rows = partial[:end]
                if end:
                    partial[:begin].zero_(), partial[end:].zero_()
        return rows[:, 0], rows[:, 1]

    def messages(self, hop: int) -> Messages:
        """Messages that move the partial of hop - 1 during the kernel of a hop.

        Rows to which other ranks add go on to the next rank; the others return to their owner.
        """
        if hop <= 1:
            return [], []
        plan, last = self.plan, hop - 1
        rank, world, owner = plan.rank, plan.world, self._owner(last)
        here, there = self._buffers[last % 2], self._buffers[hop % 2]
        on, held = self._carried(owner, last), self._held(last)
        into = self._carried(self._owner(hop), last)
        complete = plan.kv_exchange.rows[owner, hop]  # rows from here on
        returned = there[self._held(hop) :][: self._returned(last)]
        what = f"backward hop {last}: dK/dV"
        return (
            [
                Message(here[:on], (rank + 1) % world, what, PARTIAL),
                Message(here[complete:held], owner, what + " returning", RETURN),
            ],
            [
                Message(there[:into], (rank - 1) % world, what, PARTIAL),
                Message(returned, (rank + last) % world, what + " returning", RETURN),
            ],
        )

    def add(self, hop: int) -> None:
        """Adds a hop's contribution to the partial, and returned rows to `dkv`."""
        plan, there = self.plan, self._buffers[hop % 2]
        if 0 < hop < plan.world and self._active_before(hop):
            begin, end = self._visible(hop)
            there[begin:end].add_(self._contribution[begin:end])
        back = self._returned(hop - 1)
        if back:
            end = int(plan.kv_exchange.rows[plan.rank, hop - 1])
            rows = plan.published_rows(self.dkv.device).part(end - back, end)
            rows.add(there[self._held(hop) :][:back], self.dkv)


class P2PRingPass:
    """`ringfa3.pass_interface.RingPass` by messages."""

    grads: tuple[torch.Tensor, torch.Tensor]
    precision = "native"
    first_heads = 0

    def __init__(self, transport: Transport, plan: ContextPlan, pass_type: str) -> None:
        """pass_type: "forward" or "backward"."""
        self._transport, self._plan, self._pass_type = transport, plan, pass_type

    def run_schedule(self, *_: object) -> None:
        """As `RingPass.run_schedule`: the C++ launcher sends no messages."""

    def start(self, k: torch.Tensor, v: torch.Tensor, waits_in_kernel: bool = False) -> None:
        """As `RingPass.start`; makes the buffers. `run` starts all transfers."""
        self._local_kv = select_local_kv(self._pass_type, k, self._plan, self.precision)
        self._kv = KVBuffers(k, v, self._plan, self._pass_type, self._local_kv)
        self._grads = GradBuffers(k, self._plan) if self._pass_type == "backward" else None
        # No split where rows return earlier: they would be added to heads that are not yet stored.
        split = self._grads is not None and self._grads.returned_at_the_end
        self._heads = LocalHeads.of(k) if split else LocalHeads(0)
        self.first_heads = self._heads.first

    def run(self, attend: Attend) -> None:
        """As `RingPass.run`. Hop 0 comes first; some of its KV heads may come last."""
        for hop in range(self._plan.world):
            exchange = self._exchange(hop)
            if hop == 0 and self._heads.first:
                self._heads.attend_first(attend, *self._tensors(0))
            else:
                attend(hop, HopTensors.of(self._tensors(hop)))
            if exchange is not None:
                exchange.wait()
            if self._grads is not None:
                self._grads.add(hop)
        if self._grads is not None:
            exchange = self._exchange(self._plan.world)
            if self._heads.first:
                self._heads.attend_last(attend, *self._tensors(0))
            if exchange is not None:
                exchange.wait()
            self._grads.add(self._plan.world)
            dtype = self._kv.published.dtype
            self.grads = self._local_kv.round_gradients(self._grads.dkv, None, dtype)
            del self._kv, self._grads

    def _tensors(self, hop: int) -> tuple[torch.Tensor, ...]:
        """K and V of a hop, in a backward also dK and dV."""
        grads = () if self._grads is None else self._grads.block(hop)
        return *self._kv.block(hop), *grads

    def _exchange(self, hop: int) -> Exchange | None:
        """Starts all messages that move during a hop's kernel; None if there are none."""
        both = [self._kv.messages(hop)]
        if self._grads is not None:
            both.append(self._grads.messages(hop))
        sends, receives = (
            [m for messages in group for m in messages if len(m.tensor)]
            for group in zip(*both, strict=True)
        )
        if not (sends or receives):
            return None
        return self._transport.exchange(sends, receives)
