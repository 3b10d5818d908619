"""A ring pass by messages: K/V go from their owner to each reader, and dK/dV back to the owner.

Each launch attends to the K/V of one hop or several (`launch_of_step`). K/V and float32 dK/dV have
two buffers each, for even and odd launches, whatever the world size.

Rows for another host land there first (`LaunchExchange`), in the exchange before the one that sends
them on to their readers.

All transfers during a launch are one exchange: over NCCL a second one might find no free SM until
the kernel ends. Ranks have the same launches in the same order, so the messages of an exchange find
their peers in the exchange of the same number.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

import torch

from ringfa3.attention_op import with_columns
from ringfa3.kernels.dispatch import select_local_kv
from ringfa3.kernels.reference import accum_dtype
from ringfa3.kernels.symbolic import current_builder
from ringfa3.pass_interface import Attend, HopTensors, HostCode, LocalHeads
from ringfa3.planning.context_plan import ContextPlan
from ringfa3.planning.exchange.launch_exchange import LaunchExchange
from ringfa3.planning.row_exchange import RowIndex
from ringfa3.planning.tiling import Plan
from ringfa3.ring.levels.flow_messages import (
    UNPUBLISHED,
    FlowMessages,
    Messages,
    Regions,
    sent_rows,
)
from ringfa3.ring.levels.message_program import ScheduledExchange, run_program
from ringfa3.ring.p2p import Exchange, Transport


def start_exchange(transport: Transport, messages: Sequence[Messages]) -> Exchange | None:
    """Starts all messages in one exchange; None if there are none."""
    sends, receives = ([m for groups in messages for m in groups[n]] for n in range(2))
    if not sends and not receives:
        return None
    if current_builder() is not None:
        return ScheduledExchange(sends, receives)
    return transport.exchange(sends, receives)


class ArrivingKV:
    """The K/V of a rank's launches, in buffers that launches use in turn.

    Landed rows have two buffers, for even and odd chunks: one may land while the chunk before it
    goes on.
    """

    def __init__(
        self,
        exchange: LaunchExchange,
        local: Sequence[torch.Tensor],
        pass_type: str,
        sent: Sequence[RowIndex],
        num_buffers: int = 2,
        regions: Regions = UNPUBLISHED,
    ) -> None:
        """local: the rank's own rows, (rows, ...) each, contiguous: K and V, or both in one. sent:
        `sent_rows`."""
        self._exchange, self._local = exchange, local
        self._flows = FlowMessages.of(exchange, sent, pass_type, "K/V", regions)
        landed = [chunk.rows for chunk in exchange.chunks]
        buffers = self._new(exchange.rows[1:], num_buffers)
        self._received = [
            [x[:rows] for x in buffers[number % num_buffers]]
            for number, rows in enumerate(exchange.rows[1:])
        ]
        self._scratch = [self._new([flow.parts.scratch_rows], 1)[0] for flow in self._flows]
        self._landed = self._new(landed, 2) if landed else []

    def _new(self, rows: Sequence[int], count: int) -> list[list[torch.Tensor]]:
        """`count` buffers, which hold so many rows in turn."""
        most = [max(rows[n::count], default=0) for n in range(count)]
        return [[x.new_empty((n, *x.shape[1:])) for x in self._local] for n in most]

    def received(self, launch: int) -> list[torch.Tensor]:
        """(rows, ...) for each tensor of `local`: the K/V of a launch >= 1."""
        return self._received[launch - 1]

    def messages(self, launch: int) -> list[Messages]:
        """What brings the K/V of a launch >= 1, and what lands for the next one; none for the
        launch after the last."""
        exchange, found = self._exchange, []
        if launch < len(exchange.rows):
            direct = self._local, self._scratch[0], self.received(launch)
            found.append(self._flows[0].send(launch, *direct))
        if (chunk := exchange.landing_before(launch)) is not None:
            landing = self._local, self._scratch[1], self._landed[chunk % 2]
            found.append(self._flows[1].send(chunk, *landing))
        if (chunk := exchange.landed_for(launch)) is not None:
            onward = self._landed[chunk % 2], self._scratch[2], self.received(launch)
            found.append(self._flows[2].send(launch, *onward))
        return found


class ReturningGradients:
    """The dK/dV of a backward pass, (rows, 2, hk, d), dK and dV of a row together.

    In the accumulation dtype. A launch stores them, and they return while the next one runs: to the
    owners of the keys, or to the landing rank. The landing rank adds up those of a chunk, and sends
    the sums to the owners after the chunk's last launch. All adds follow the order of launches,
    then that of a flow's peers. So the order of each sum is the same in every run.

    local        (local_keys, 2, hk, d): of this rank's own keys
    first_heads  KV heads of `local` that are stored before the hops; 0: all
    """

    def __init__(
        self,
        k: torch.Tensor,
        exchange: LaunchExchange,
        sent: Sequence[RowIndex],
        regions: Regions = UNPUBLISHED,
    ) -> None:
        """sent: `sent_rows`."""
        self._exchange = exchange
        self._flows = FlowMessages.of(exchange, sent, "backward", "dK/dV", regions)
        shape, dtype = (2, *k.shape[1:]), accum_dtype(k.dtype)
        self.local = k.new_empty((len(k), *shape), dtype=dtype)
        rows = [max(exchange.rows[1:][n::2], default=0) for n in range(2)]
        self._buffers = [k.new_empty((n, *shape), dtype=dtype) for n in rows]
        rows = [max(map(len, flow.sent)) for flow in exchange.flows]
        self._returned = [k.new_empty((n, *shape), dtype=dtype) for n in rows]
        if landed := [chunk.rows for chunk in exchange.chunks]:
            self._sums = k.new_empty((max(landed), *shape), dtype=dtype)
        # Without transfers in the last exchange there is nothing for the last heads to hide.
        moves_last = exchange.direct.leaving[-1] or exchange.direct.arriving[-1] or landed
        self.first_heads = LocalHeads.of(k).first if len(exchange.rows) > 1 and moves_last else 0
        self._last_heads = self.local[:, :, self.first_heads :]
        returns = any(exchange.direct.leaving[:-1]) or any(exchange.landing.leaving)
        self._adds_last_heads = bool(self.first_heads) and returns
        if self._adds_last_heads:  # contributions arrive before these heads are stored
            self._last_heads.zero_()

    def of_launch(self, launch: int) -> torch.Tensor:
        """(rows, 2, hk, d) for a launch to store; no message reads or writes them meanwhile."""
        if launch == 0:
            return self.local
        return self._buffers[(launch - 1) % 2][: self._exchange.rows[launch]]

    def messages(self, launch: int) -> list[Messages]:
        """What returns the dK/dV of a launch, and the sums of the chunk that ended before it; none
        for launches < 1."""
        if launch < 1:
            return []
        return [
            flow.send_back(transfer, grads, returned)
            for flow, transfer, grads, returned, _ in self._moves(launch)
        ]

    def add(self, launch: int) -> None:
        """Adds the rows that `messages` of a launch have returned."""
        if launch < 1:
            return
        chunk = self._exchange.landed_for(launch)
        if chunk is not None and self._exchange.chunks[chunk].first == launch:
            self._sums.zero_()  # after all sums of the chunk before have left
        for flow, transfer, grads, returned, to in self._moves(launch):
            flow.add(transfer, grads, returned, to)

    def _moves(
        self, launch: int
    ) -> Iterator[tuple[FlowMessages, int, torch.Tensor, torch.Tensor, torch.Tensor]]:
        """The flows that return rows after a launch: transfer, rows to return, those returned, and
        where to add them."""
        exchange, returned = self._exchange, self._returned
        if launch < len(exchange.rows):
            yield self._flows[0], launch, self.of_launch(launch), returned[0], self.local
        if exchange.landed_for(launch) is not None:
            yield self._flows[2], launch, self.of_launch(launch), returned[2], self._sums
        if (chunk := exchange.summed_after(launch)) is not None:
            yield self._flows[1], chunk, self._sums, returned[1], self.local

    def last_heads(self) -> torch.Tensor:
        """(local_keys, 2, heads, d) for the heads that come last, to be stored."""
        if self._adds_last_heads:
            return self._last_heads.new_empty(self._last_heads.shape)
        return self._last_heads

    def add_last_heads(self, stored: torch.Tensor) -> None:
        """stored: from `last_heads`."""
        if self._adds_last_heads:
            self._last_heads.add_(stored)


class P2PRingPass:
    """`ringfa3.pass_interface.RingPass` by messages."""

    grads: tuple[torch.Tensor, torch.Tensor]
    precision = "native"
    first_heads = 0

    def __init__(self, transport: Transport, plan: ContextPlan, pass_type: str) -> None:
        """pass_type: "forward" or "backward"."""
        self._transport, self._plan, self._pass_type = transport, plan, pass_type
        self._exchange = plan.by_messages()

    @property
    def hops(self) -> Plan:
        """As `RingPass.hops`."""
        return self._exchange.hops

    def run_schedule(
        self,
        k: torch.Tensor,
        inputs: tuple[torch.Tensor | None, ...],
        settings: Hashable,
        code: HostCode,
    ) -> tuple[torch.Tensor, ...] | None:
        """As `RingPass.run_schedule`. Python runs the backward of 8 bits."""
        if self.precision != "native":
            return None
        given = self._transport, self._plan, self._pass_type
        return run_program(*given, k, inputs, settings, code)

    def start(self, k: torch.Tensor, v: torch.Tensor, waits_in_kernel: bool = False) -> None:
        """As `RingPass.start`; makes the buffers. `run` starts all transfers."""
        self._local, self._v_dim = (k, with_columns(v, k.shape[2])), v.shape[2]
        contiguous = [x.contiguous() for x in self._local]
        kv, grads = self._regions(k, v)
        sent = sent_rows(self._exchange, k.device)
        self._kv = ArrivingKV(self._exchange, contiguous, self._pass_type, sent, regions=kv)
        if self._pass_type == "backward":
            self._grads = ReturningGradients(k, self._exchange, sent, grads)
            self.first_heads = self._grads.first_heads

    def _regions(self, k: torch.Tensor, v: torch.Tensor) -> tuple[Regions, Regions]:
        """Where K/V and dK/dV are published to ranks of this host."""
        del k, v
        return UNPUBLISHED, UNPUBLISHED

    def run(self, attend: Attend) -> None:
        """As `RingPass.run`. Hop 0 comes first; some of its KV heads may come last."""
        backward = self._pass_type == "backward"
        for launch in range(len(self._exchange.rows)):
            messages = self._kv.messages(launch + 1)
            if backward:
                messages += self._grads.messages(launch - 1)
            moving = start_exchange(self._transport, messages)
            kv = self._kv.received(launch) if launch else self._local
            dkv = self._grads.of_launch(launch).unbind(1) if backward else ()
            tensors = [*kv, *dkv]
            if launch == 0 and self.first_heads:
                tensors = [x[:, : self.first_heads] for x in tensors]
            attend(launch, HopTensors.of(tensors))
            if moving is not None:
                moving.wait()
            if backward:
                self._grads.add(launch - 1)
        if backward:
            self._finish_backward(attend)

    def _finish_backward(self, attend: Attend) -> None:
        """The last rows return while the other heads of the own keys are computed. Then landing
        ranks send the last sums."""
        del self._kv  # whose memory the last heads may take
        grads, last = self._grads, len(self._exchange.rows) - 1
        moving = start_exchange(self._transport, grads.messages(last))
        if self.first_heads:
            stored = grads.last_heads()
            local = [x[:, self.first_heads :] for x in self._local]
            attend(0, HopTensors.of((*local, *stored.unbind(1)), self.first_heads))
            grads.add_last_heads(stored)
        for launch in (last, last + 1):
            if moving is not None:
                moving.wait()
            grads.add(launch)
            moving = start_exchange(self._transport, grads.messages(launch + 1))
        dtype = self._local[0].dtype
        k = self._local[0]
        local_kv = select_local_kv("backward", k, self._plan, self.precision, self._v_dim)
        self.grads = local_kv.round_gradients(grads.local, None, dtype)
        del self._grads
