"""A ring call over peers' memory: its schedule, with tensors where the schedule has rows."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

import torch

from ringfa3 import schedule
from ringfa3.context import ContextPlan
from ringfa3.plan import Plan
from ringfa3.reference import statistics_dtype
from ringfa3.schedule import Attend, Buffer, Collect, Operation, Place, Prepare, Publish


class Machine(Protocol):
    """One rank's three streams, and the memory of all ranks."""

    def begin(self, row_bytes: Mapping[Buffer, int], rows: Mapping[Buffer, int]) -> int:
        """Begins a call, equal on all ranks, and returns its parity, 0 and 1 in turn.

        row_bytes: of a row in each buffer. rows: that a slot must hold.
        """

    def local(self, buffer: Buffer, slot: int) -> torch.Tensor:
        """This rank's own memory, uint8."""

    def compute(self, operation: Operation, work: Callable[[], None]) -> None:
        """Runs `work` on the compute stream, as the operation says."""

    def issue(self, operation: Operation) -> None:
        """Puts any other operation into its stream."""


class Course:
    """The forward or backward call of one rank; `run` issues its hops.

    home   backward: (local_tokens, 2, hk, d) statistics dtype, dK and dV of this rank's own keys
    """

    def __init__(
        self,
        machine: Machine,
        plan: ContextPlan,
        direction: str,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> None:
        """Publishes k and v, (local_tokens, hk, d), and starts the first transfers.

        What the caller computes before `run` goes on beside them.
        """
        self.machine, self.plan, self.direction = machine, plan, direction
        self._local = (k, v)
        self._row = (2, *k.shape[1:])  # K and V, or dK and dV, of a row lie together
        self._dtypes = {Buffer.SRC: k.dtype, Buffer.IN: k.dtype}
        if direction == "backward":
            statistics = statistics_dtype(k.dtype)
            self._dtypes |= {Buffer.D: statistics, Buffer.EARLY: statistics}
            self.home = k.new_empty((plan.local_tokens, *self._row), dtype=statistics)
        numbers = 2 * k.shape[1] * k.shape[2]
        self._row_bytes = {b: numbers * dtype.itemsize for b, dtype in self._dtypes.items()}
        move = plan.movement.rows
        most = int(move[:, 1].max())
        rows = dict.fromkeys(self._dtypes, most)
        if direction == "backward":
            rows[Buffer.EARLY] = int((move[:, 1] - move[:, -2]).max())
        parity = machine.begin(self._row_bytes, rows)
        self._operations = _operations(plan, direction, parity)
        self._issued = 0
        self._work: dict[type, Callable[..., None]] = {
            Publish: self._publish,
            Attend: self._run_hop,
            Collect: self._collect,
        }
        while not isinstance(self._operations[self._issued], Prepare):
            self._issue_next()
        self._issued += 1

    def run(self, attend: Callable[..., None]) -> None:
        """Calls attend(hop, k, v), backward attend(hop, k, v, dk, dv), for each hop with work.

        k, v: (rows, hk, d) of the hop's block; rows that the hop's spans do not have may be
        anything. dk, dv: the same in the statistics dtype; they are added to, or stored where the
        tiling says FIRST. Hop 0 stores; what others have added to its rows comes after it.
        """
        self._attend = attend
        while self._issued < len(self._operations):
            self._issue_next()

    def _issue_next(self) -> None:
        operation = self._operations[self._issued]
        self._issued += 1
        work = self._work.get(type(operation))
        if work is None:
            self.machine.issue(operation)
        else:
            self.machine.compute(operation, partial(work, operation))

    def _rows(self, place: Place, rows: int) -> torch.Tensor:
        """(rows, 2, hk, d): the first rows of a buffer of this rank."""
        memory = self.machine.local(place.buffer, place.slot)
        memory = memory[: rows * self._row_bytes[place.buffer]]
        return memory.view(self._dtypes[place.buffer]).view(-1, *self._row)

    def _publish(self, operation: Publish) -> None:
        rows = self._rows(operation.place, operation.place.end)
        own = self.plan.own_rows(self._local[0].device)
        for i, x in enumerate(self._local):
            torch.index_select(x, 0, own, out=rows[:, i])

    def _run_hop(self, operation: Attend) -> None:
        plan, hop = self.plan, operation.hop
        rows = int(plan.movement.rows[(plan.rank - hop) % plan.world, hop])
        kv = operation.kv
        block = self._local if kv is None else self._rows(kv, rows).unbind(1)
        if self.direction == "forward":
            self._attend(hop, *block)
        else:
            place = operation.partial
            grads = self.home if place is None else self._rows(place, rows)
            self._attend(hop, *block, *grads.unbind(1))

    def _collect(self, operation: Collect) -> None:
        own = self.plan.own_rows(self.home.device)
        for place in operation.places:
            self.home.index_add_(0, own[: place.end], self._rows(place, place.end))
            own = own[place.end :]


_known: weakref.WeakKeyDictionary[Plan, dict[tuple[str, int], list[Operation]]]
_known = weakref.WeakKeyDictionary()


def _operations(plan: ContextPlan, direction: str, parity: int) -> list[Operation]:
    """The schedule of a call, made once."""
    known = _known.setdefault(plan.hops, {})
    if (direction, parity) not in known:
        make = schedule.forward if direction == "forward" else schedule.backward
        known[direction, parity] = make(plan.movement, plan.rank, parity)
    return known[direction, parity]
