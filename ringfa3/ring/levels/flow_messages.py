"""What ranks send each other for the launches of a pass, as messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import islice
from typing import NamedTuple, TypeAlias

import torch

from ringfa3.kernels.streams import CurrentStream
from ringfa3.kernels.uploads import Packed, Uploads
from ringfa3.planning.exchange.launch_exchange import FlowOffsets, LaunchExchange, PeerRows, RowFlow
from ringfa3.planning.placement.costs import Ints
from ringfa3.planning.row_exchange import RowIndex
from ringfa3.ring.p2p import Message

KV, RETURN, STATISTICS = range(3)  # message tags

Messages: TypeAlias = tuple[list[Message], list[Message]]  # sends and receives


class _SentRows:
    """`HostTables` of `RowFlow.sent`."""

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


class FlowMessages:
    """The messages of a `RowFlow`, in buffers that the caller gives.

    scratch_rows  of a buffer for rows that leave and are not consecutive
    """

    def __init__(
        self,
        rank: int,
        flow: RowFlow,
        sent: Sequence[RowIndex],
        what: str,
        region: Region | None = None,
    ) -> None:
        """sent: `flow.sent`, for tensors on a device. what: for error messages."""
        self._rank, self._flow, self._sent, self._what = rank, flow, sent, what
        self._region = region
        gathered = zip(flow.sent, sent, strict=True)
        self.scratch_rows = max((len(s) for s, i in gathered if not i.consecutive), default=0)

    @classmethod
    def of(
        cls,
        exchange: LaunchExchange,
        device: torch.device,
        what: str,
        regions: Regions = UNPUBLISHED,
    ) -> list[FlowMessages]:
        """Of `exchange.flows`, for tensors on a device."""
        sent = [rows for flow in exchange.flows for rows in flow.sent]
        if device.type == "cuda":
            make = partial(_SentRows, sent)
            index = iter(_uploaded.get(exchange, CurrentStream.of(device), (), make))
        else:
            index = iter(RowIndex.of_each(sent, device))
        names = what, f"{what} to land", f"landed {what}"
        direct, onward = regions
        each = zip(exchange.flows, names, (direct, None, onward), strict=False)
        return [
            cls(exchange.rank, flow, list(islice(index, len(flow.sent))), name, region)
            for flow, name, region in each
        ]

    def send(
        self,
        transfer: int,
        source: Sequence[torch.Tensor],
        scratch: Sequence[torch.Tensor],
        into: Sequence[torch.Tensor],
        direction: str,
    ) -> Messages:
        """What sends rows of `source` to `into` on other ranks. Rows for this rank are copied.

        source, into: the buffers of both ends, one tensor or more each.

        Rows that are not consecutive are gathered, after all earlier messages have been sent.
        """
        leaving, arriving = self._flow.leaving[transfer], self._flow.arriving[transfer]
        sent = list(map(self._sent[transfer].read, source, scratch)) if leaving else []
        for x, y in zip(self._own(arriving, into), self._own(leaving, sent), strict=True):
            x.copy_(y)
        there = self._region.offsets.arriving[transfer] if self._region else {}
        receives = self._of(transfer, arriving, into, direction, KV, there)
        return self._of(transfer, leaving, sent, direction, KV), receives

    def send_back(self, transfer: int, grads: torch.Tensor, returned: torch.Tensor) -> Messages:
        """What returns the rows of `grads`, which other ranks receive in `returned`."""
        arriving, leaving = self._flow.arriving[transfer], self._flow.leaving[transfer]
        there = self._region.offsets.leaving[transfer] if self._region else {}
        sends = self._of(transfer, arriving, [grads], "backward", RETURN)
        return sends, self._of(transfer, leaving, [returned], "backward", RETURN, there)

    def add(
        self, transfer: int, grads: torch.Tensor, returned: torch.Tensor, to: torch.Tensor
    ) -> None:
        """Adds what `send_back` has returned, peer by peer, to the rows of `to` that were sent."""
        for part in self._flow.leaving[transfer]:
            rows = returned[part.begin : part.end]
            if part.peer == self._rank:
                (rows,) = self._own(self._flow.arriving[transfer], [grads])
            self._sent[transfer].part(part.begin, part.end).add(rows, to)

    def _own(self, rows: Sequence[PeerRows], tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        own = [part for part in rows if part.peer == self._rank]
        return [x[part.begin : part.end] for part in own for x in tensors]

    def _of(
        self,
        transfer: int,
        rows: Sequence[PeerRows],
        tensors: Sequence[torch.Tensor],
        direction: str,
        tag: int,
        there: Mapping[int, int] | None = None,
    ) -> list[Message]:
        """there: by peer of this host, the row at which it has what comes from it; None: this rank
        sends.

        An exchange has K/V of a launch, and dK/dV of the launch two before: one slot for both.
        """
        messages = []
        for part in rows:
            if part.peer == self._rank:
                continue
            what = f"{direction} hop {part.hop}: {self._what}"
            row = part.begin if there is None else there.get(part.peer)
            first = 0 if self._region is None else self._region.begin
            for x in tensors:
                at = None
                if self._region is not None and row is not None:
                    row_bytes = x.shape[1:].numel() * x.itemsize
                    at, first = first + row * row_bytes, first + self._region.rows * row_bytes
                rows_of = x[part.begin : part.end]
                messages.append(Message(rows_of, part.peer, what, tag, transfer % 2, at))
        return messages
