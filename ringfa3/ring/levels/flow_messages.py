"""What ranks send each other for the launches of a pass, as messages."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

import torch

from ringfa3.kernels.streams import CurrentStream
from ringfa3.kernels.symbolic import current_builder, indices_at
from ringfa3.kernels.uploads import Packed, Uploads
from ringfa3.planning.exchange.launch_exchange import FlowOffsets, LaunchExchange, PeerRows, RowFlow
from ringfa3.planning.placement.costs import Ints
from ringfa3.planning.row_exchange import RowIndex
from ringfa3.ring.p2p import Message

KV, RETURN, STATISTICS = range(3)  # message tags

T = TypeVar("T")
Messages: TypeAlias = tuple[list[Message], list[Message]]  # sends and receives


class _SentRows:
    """`HostTables` of `RowFlow.sent`."""

    def __init__(self, sent: Sequence[Ints]) -> None:
        self._runs = [RowIndex.of_run(rows) for rows in sent]
        scattered = zip(sent, self._runs, strict=True)
        self._rows = [rows for rows, run in scattered if run is None]
        self.packed = Packed(*self._rows)

    def at(self, memory: torch.Tensor | None, begin: int) -> list[RowIndex]:
        parts = (
            indices_at(begin + offset, len(rows))
            if memory is None
            else memory[offset : offset + rows.nbytes].view(torch.int64)
            for offset, rows in zip(self.packed.addresses(0), self._rows, strict=True)
        )
        return [RowIndex(next(parts)) if run is None else run for run in self._runs]


_uploaded = Uploads[list[RowIndex]]("rows that messages send")
# What calls share, by exchange and what it depends on besides.
_made: WeakKeyDictionary[LaunchExchange, dict[Hashable, Any]] = WeakKeyDictionary()


def _once(exchange: LaunchExchange, key: Hashable, make: Callable[[], T]) -> T:
    of_exchange = _made.setdefault(exchange, {})
    found: T | None = of_exchange.get(key)
    return of_exchange.setdefault(key, make()) if found is None else found


def sent_rows(exchange: LaunchExchange, device: torch.device) -> list[RowIndex]:
    """`RowFlow.sent` of all flows, one after the other, for tensors on a device."""
    sent = [rows for flow in exchange.flows for rows in flow.sent]
    if device.type != "cuda" and current_builder() is None:
        return _once(exchange, device, lambda: RowIndex.of_each(sent, device))
    return _uploaded.get(exchange, CurrentStream.of(device), (), partial(_SentRows, sent))


class Region(NamedTuple):
    """Where a rank publishes the rows of a flow to ranks of its host, buffer after buffer.

    begin    byte of the first buffer
    rows     of each buffer
    offsets  of the flow's parts at the other end
    """

    begin: int
    rows: int
    offsets: FlowOffsets


Regions: TypeAlias = tuple[Region | None, Region | None]  # of `direct`, and of `onward`
UNPUBLISHED: Regions = (None, None)


class _Part(NamedTuple):
    """Rows [begin, end) to or from a peer. what: for error messages."""

    peer: int
    begin: int
    end: int
    what: str


class FlowParts:
    """What the messages of a `RowFlow` have in every call: by transfer, what leaves and arrives.

    rank          this one
    first         number of the flow's first transfer in `sent_rows`
    own           of each transfer: rows that leave and arrive on this rank itself
    scratch_rows  of a buffer for rows that leave and are not consecutive
    """

    def __init__(self, rank: int, flow: RowFlow, first: int, what: str) -> None:
        """what: of the messages, with a gap for the hop."""

        def others(transfers: list[list[PeerRows]]) -> list[list[_Part]]:
            return [
                [
                    _Part(x.peer, x.begin, x.end, what.format(hop=x.hop))
                    for x in parts
                    if x.peer != rank
                ]
                for parts in transfers
            ]

        def own(parts: list[PeerRows]) -> slice | None:
            return next((slice(x.begin, x.end) for x in parts if x.peer == rank), None)

        self.rank, self.flow, self.first = rank, flow, first
        self.leaving, self.arriving = others(flow.leaving), others(flow.arriving)
        both = zip(flow.leaving, flow.arriving, strict=True)
        self.own = [(own(leaving), own(arriving)) for leaving, arriving in both]
        self.scratch_rows = max(
            (len(rows) for rows in flow.sent if RowIndex.of_run(rows) is None), default=0
        )

    @classmethod
    def of(cls, exchange: LaunchExchange, direction: str, what: str) -> list[FlowParts]:
        """Of `exchange.flows`."""
        names = what, f"{what} to land", f"landed {what}"
        made, first = [], 0
        for flow, name in zip(exchange.flows, names, strict=False):
            made.append(cls(exchange.rank, flow, first, f"{direction} hop {{hop}}: {name}"))
            first += len(flow.sent)
        return made


class FlowMessages(NamedTuple):
    """The messages of a `RowFlow`, in buffers that the caller gives.

    sent    `sent_rows`, for tensors on the device of these buffers
    region  where this rank's part of the flow is published
    """

    parts: FlowParts
    sent: Sequence[RowIndex]
    region: Region | None = None

    @classmethod
    def of(
        cls,
        exchange: LaunchExchange,
        sent: Sequence[RowIndex],
        direction: str,
        what: str,
        regions: Regions = UNPUBLISHED,
    ) -> list[FlowMessages]:
        """Of `exchange.flows`. direction, what: for error messages."""
        key = direction, what
        parts = _once(exchange, key, lambda: FlowParts.of(exchange, direction, what))
        direct, onward = regions
        each = zip(parts, (direct, None, onward), strict=False)
        return [cls(of_flow, sent, region) for of_flow, region in each]

    def send(
        self,
        transfer: int,
        source: Sequence[torch.Tensor],
        scratch: Sequence[torch.Tensor],
        into: Sequence[torch.Tensor],
    ) -> Messages:
        """What sends rows of `source` to `into` on other ranks. Rows for this rank are copied.

        source, into: the buffers of both ends, one tensor or more each.

        Rows that are not consecutive are gathered, after all earlier messages have been sent.
        """
        parts, sends = self.parts, []
        if parts.flow.leaving[transfer]:
            sent = list(map(self._index(transfer).read, source, scratch))
            sends = self._of(transfer, parts.leaving[transfer], sent, KV)
            leaves, arrives = parts.own[transfer]
            if leaves is not None:
                for x, y in zip(into, sent, strict=True):
                    x[arrives].copy_(y[leaves])
        there = self.region.offsets.arriving[transfer] if self.region else {}
        return sends, self._of(transfer, parts.arriving[transfer], into, KV, there)

    def send_back(self, transfer: int, grads: torch.Tensor, returned: torch.Tensor) -> Messages:
        """What returns the rows of `grads`, which other ranks receive in `returned`."""
        parts = self.parts
        there = self.region.offsets.leaving[transfer] if self.region else {}
        sends = self._of(transfer, parts.arriving[transfer], [grads], RETURN)
        return sends, self._of(transfer, parts.leaving[transfer], [returned], RETURN, there)

    def add(
        self, transfer: int, grads: torch.Tensor, returned: torch.Tensor, to: torch.Tensor
    ) -> None:
        """Adds what `send_back` has returned, peer by peer, to the rows of `to` that were sent."""
        _, arrives = self.parts.own[transfer]
        for _, peer, begin, end in self.parts.flow.leaving[transfer]:
            rows = grads[arrives] if peer == self.parts.rank else returned[begin:end]
            self._index(transfer).part(begin, end).add(rows, to)

    def _index(self, transfer: int) -> RowIndex:
        return self.sent[self.parts.first + transfer]

    def _of(
        self,
        transfer: int,
        parts: Sequence[_Part],
        tensors: Sequence[torch.Tensor],
        tag: int,
        there: Mapping[int, int] | None = None,
    ) -> list[Message]:
        """there: by peer of this host, the row at which it has what comes from it; None: this rank
        sends.

        An exchange has K/V of a launch, and dK/dV of the launch two before: one slot for both.
        """
        if self.region is None:
            return [
                Message(x[begin:end], peer, what, tag, transfer % 2)
                for peer, begin, end, what in parts
                for x in tensors
            ]
        messages = []
        for peer, begin, end, what in parts:
            row = begin if there is None else there.get(peer)
            first = self.region.begin
            for x in tensors:
                at = None
                if row is not None:
                    row_bytes = x.shape[1:].numel() * x.itemsize
                    at, first = first + row * row_bytes, first + self.region.rows * row_bytes
                messages.append(Message(x[begin:end], peer, what, tag, transfer % 2, at))
        return messages
