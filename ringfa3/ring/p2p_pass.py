"""A ring pass by messages: K/V go from their owner to each reader, and dK/dV back to the owner.

Each launch attends to the K/V of one hop or several (`launch_of_hop`). K/V and float32
dK/dV have two buffers each, for even and odd launches, whatever the world size.

All transfers during a launch are one exchange: over NCCL a second one might find no free SM until
the kernel ends. Ranks have the same launches in the same order, so the messages of an exchange find
their peers in the exchange of the same number.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import TypeAlias

import torch

from ringfa3.kernels.dispatch import select_local_kv
from ringfa3.kernels.reference import accum_dtype
from ringfa3.kernels.streams import CurrentStream
from ringfa3.kernels.uploads import Packed, Uploads
from ringfa3.pass_interface import Attend, HopTensors, LocalHeads
from ringfa3.planning.context_plan import ContextPlan
from ringfa3.planning.exchange.launch_exchange import LaunchExchange, PeerRows
from ringfa3.planning.placement.costs import Ints
from ringfa3.planning.row_exchange import RowIndex
from ringfa3.planning.tiling import Plan
from ringfa3.ring.p2p import Exchange, Message, Transport

KV, RETURN, STATISTICS = range(3)  # message tags

Messages: TypeAlias = tuple[list[Message], list[Message]]  # sends and receives


def start_exchange(transport: Transport, *messages: Messages) -> Exchange | None:
    """Starts all messages in one exchange; None if there are none."""
    sends, receives = (list(chain(*groups)) for groups in zip(*messages, strict=True))
    return transport.exchange(sends, receives) if sends or receives else None


class _SentRows:
    """`HostTables` of `LaunchExchange.sent`."""

    def __init__(self, sent: Sequence[Ints]) -> None:
        self._runs = [RowIndex.of_run(rows) for rows in sent]
        scattered = zip(sent, self._runs, strict=True)
        self._rows = [rows for rows, run in scattered if run is None]
        self.packed = Packed(*self._rows)

    def at(self, memory: torch.Tensor | None, _address: int) -> list[RowIndex]:
        assert memory is not None  # no schedule sends messages
        parts = (
            memory[offset : offset + rows.nbytes].view(torch.int64)
            for offset, rows in zip(self.packed.addresses(0), self._rows, strict=True)
        )
        return [RowIndex(next(parts)) if run is None else run for run in self._runs]


_uploaded = Uploads[list[RowIndex]]("rows that messages send")


def sent_rows(exchange: LaunchExchange, device: torch.device) -> list[RowIndex]:
    """`exchange.sent`, for tensors on a device."""
    if device.type != "cuda":
        return RowIndex.of_each(exchange.sent, device)
    make = partial(_SentRows, exchange.sent)
    return _uploaded.get(exchange, CurrentStream.of(device), (), make)


class ArrivingKV:
    """The K/V of a rank's launches, in buffers that launches use in turn."""

    def __init__(
        self,
        exchange: LaunchExchange,
        local: Sequence[torch.Tensor],
        pass_type: str,
        num_buffers: int = 2,
    ) -> None:
        """local: the rank's own rows, (rows, ...) each, contiguous: K and V, or both in one."""
        self._exchange, self._local, self._pass_type = exchange, local, pass_type
        self._sent = sent_rows(exchange, local[0].device)
        rows = [max(exchange.rows[1:][n::num_buffers], default=0) for n in range(num_buffers)]
        gathered = zip(exchange.sent, self._sent, strict=True)
        rows.append(max(0 if index.consecutive else len(sent) for sent, index in gathered))
        buffers = [[x.new_empty((n, *x.shape[1:])) for x in local] for n in rows]
        *self._buffers, self._scratch = buffers

    def received(self, launch: int) -> list[torch.Tensor]:
        """(rows, ...) for each tensor of `local`: the K/V of a launch >= 1."""
        buffers = self._buffers[(launch - 1) % len(self._buffers)]
        return [x[: self._exchange.rows[launch]] for x in buffers]

    def messages(self, launch: int) -> Messages:
        """What brings the K/V of a launch >= 1; none for the launch after the last.

        Rows that are not consecutive are gathered, after all earlier messages have been sent.
        """
        if launch == len(self._exchange.rows):
            return [], []
        leaving, arriving = self._exchange.leaving[launch], self._exchange.arriving[launch]
        sent = map(self._sent[launch].read, self._local, self._scratch) if leaving else ()
        return self._of(leaving, list(sent)), self._of(arriving, self.received(launch))

    def _of(self, rows: Sequence[PeerRows], tensors: Sequence[torch.Tensor]) -> list[Message]:
        return [
            Message(
                x[part.begin : part.end], part.peer, f"{self._pass_type} hop {part.hop}: K/V", KV
            )
            for part in rows
            for x in tensors
        ]


class ReturningGradients:
    """The dK/dV of a backward pass, (rows, 2, hk, d), dK and dV of a row together.

    In the accumulation dtype. A launch stores them, and they return to the owners of the keys while
    the next one runs. An owner adds them launch by launch, in the order of the hops. So the order
    of each sum is the same in every run.

    local        (local_keys, 2, hk, d): of this rank's own keys
    first_heads  KV heads of `local` that are stored before the hops; 0: all
    """

    def __init__(self, k: torch.Tensor, exchange: LaunchExchange) -> None:
        self._exchange, self._sent = exchange, sent_rows(exchange, k.device)
        shape, dtype = (2, *k.shape[1:]), accum_dtype(k.dtype)
        self.local = k.new_empty((len(k), *shape), dtype=dtype)
        rows = [max(exchange.rows[1:][n::2], default=0) for n in range(2)]
        self._buffers = [k.new_empty((n, *shape), dtype=dtype) for n in rows]
        self._returned = k.new_empty((max(map(len, exchange.sent)), *shape), dtype=dtype)
        # Without transfers in the last exchange there is nothing for the last heads to hide.
        moves_last = len(exchange.rows) > 1 and (exchange.leaving[-1] or exchange.arriving[-1])
        self.first_heads = LocalHeads.of(k).first if moves_last else 0
        self._last_heads = self.local[:, :, self.first_heads :]
        self._adds_last_heads = bool(self.first_heads) and any(exchange.leaving[:-1])
        if self._adds_last_heads:  # contributions arrive before these heads are stored
            self._last_heads.zero_()

    def of_launch(self, launch: int) -> torch.Tensor:
        """(rows, 2, hk, d) for a launch to store; no message reads or writes them meanwhile."""
        if launch == 0:
            return self.local
        return self._buffers[(launch - 1) % 2][: self._exchange.rows[launch]]

    def messages(self, launch: int) -> Messages:
        """What returns the dK/dV of a launch to their owners; none for launches < 1."""
        if launch < 1:
            return [], []
        exchange = self._exchange
        rows = (self.of_launch(launch), exchange.arriving), (self._returned, exchange.leaving)
        sends, receives = (
            [
                Message(x[p.begin : p.end], p.peer, f"backward hop {p.hop}: dK/dV", RETURN)
                for p in parts[launch]
            ]
            for x, parts in rows
        )
        return sends, receives

    def add(self, launch: int) -> None:
        """Adds the rows that `messages` of a launch have returned, hop by hop."""
        if launch < 1:
            return
        for _, _, begin, end in self._exchange.leaving[launch]:
            self._sent[launch].part(begin, end).add(self._returned[begin:end], self.local)

    def last_heads(self) -> torch.Tensor:
        """(local_keys, 2, heads, d) for the heads that come last, to be stored."""
        if self._adds_last_heads:
            return torch.empty_like(self._last_heads, memory_format=torch.contiguous_format)
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

    def run_schedule(self, *_: object) -> None:
        """As `RingPass.run_schedule`: the C++ launcher sends no messages."""

    def start(self, k: torch.Tensor, v: torch.Tensor, waits_in_kernel: bool = False) -> None:
        """As `RingPass.start`; makes the buffers. `run` starts all transfers."""
        self._local = (k, v)
        contiguous = [x.contiguous() for x in self._local]
        self._kv = ArrivingKV(self._exchange, contiguous, self._pass_type)
        if self._pass_type == "backward":
            self._grads = ReturningGradients(k, self._exchange)
            self.first_heads = self._grads.first_heads

    def run(self, attend: Attend) -> None:
        """As `RingPass.run`. Hop 0 comes first; some of its KV heads may come last."""
        backward = self._pass_type == "backward"
        for launch in range(len(self._exchange.rows)):
            messages = [self._kv.messages(launch + 1)]
            if backward:
                messages.append(self._grads.messages(launch - 1))
            moving = start_exchange(self._transport, *messages)
            kv = self._kv.received(launch) if launch else self._local
            dkv = self._grads.of_launch(launch).unbind(1) if backward else ()
            heads = slice(0, self.first_heads if launch == 0 and self.first_heads else None)
            attend(launch, HopTensors.of(x[:, heads] for x in (*kv, *dkv)))
            if moving is not None:
                moving.wait()
            if backward:
                self._grads.add(launch - 1)
        if backward:
            self._finish_backward(attend)

    def _finish_backward(self, attend: Attend) -> None:
        """The last rows return while the other heads of the own keys are computed."""
        del self._kv  # whose memory the last heads may take
        grads, last = self._grads, len(self._exchange.rows) - 1
        moving = start_exchange(self._transport, grads.messages(last))
        if self.first_heads:
            stored = grads.last_heads()
            local = [x[:, self.first_heads :] for x in self._local]
            attend(0, HopTensors.of((*local, *stored.unbind(1)), self.first_heads))
            grads.add_last_heads(stored)
        if moving is not None:
            moving.wait()
        grads.add(last)
        dtype = self._local[0].dtype
        local_kv = select_local_kv(self._pass_type, self._local[0], self._plan, self.precision)
        self.grads = local_kv.round_gradients(grads.local, None, dtype)
        del self._grads
