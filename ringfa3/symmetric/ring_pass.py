"""A ring call over peers' memory: its schedule, with tensors where the schedule has rows.

What depends on the plan and the shapes alone is prepared at the first such call and issued by the
others.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeAlias, get_args

import torch

from ringfa3.kernels.reference import statistics_dtype
from ringfa3.planning.context_plan import ContextPlan
from ringfa3.planning.kv_exchange import first_heads
from ringfa3.planning.row_index import copy_rows, view_16_bytes
from ringfa3.planning.tiling import Plan
from ringfa3.symmetric import schedule
from ringfa3.symmetric.stream_ops import (
    Add,
    Attend,
    AttendAll,
    Buffer,
    Event,
    Keep,
    Operation,
    Part,
    Place,
    Prepare,
    Publish,
    Work,
)


class Machine(Protocol):
    """One rank's three streams, and the memory of all ranks.

    routes  what calls like the one that has begun have prepared; dropped when their memory or
            streams are others
    landed  (world,) int32: word t is 1 from the event "landed" of number t on, until the kernel
            that has awaited it has ended
    """

    routes: Routes
    landed: torch.Tensor

    def arranged(self, operations: list[Operation]) -> list[Operation]:
        """The operations of the call that has begun, as the machine needs them."""

    def begin(self, row_bytes: Mapping[Buffer, int], rows: Mapping[Buffer, int]) -> int:
        """Begins a call, equal on all ranks, and returns its parity, 0 and 1 in turn.

        row_bytes: of a row in each buffer. rows: that a slot must hold.
        """

    def local(self, buffer: Buffer, slot: int) -> torch.Tensor:
        """This rank's own memory, uint8."""

    def prepared(self, operations: Sequence[Operation], inside: frozenset[Event]) -> Any:
        """Operations that are no work, and what work among them waits for, for `issue`.

        inside: events that kernels await by the words `landed` themselves, not their stream.
        """

    def issue(self, prepared: Any) -> None:
        """Puts prepared operations into their streams."""

    def compute(self, operation: Operation, work: Callable[[], None]) -> None:
        """Runs `work`, which is the operation, on the compute stream."""


class Step(NamedTuple):
    """Prepared operations, and the work behind them with its tensors; no work at the end."""

    prepared: Any
    work: Work | None
    tensors: tuple[Any, ...]


class Route(NamedTuple):
    """Steps of a call before and after what its caller prepares."""

    before: list[Step]
    after: list[Step]


Routes: TypeAlias = MutableMapping[Plan, dict[object, Route]]


class Cargo:
    """What the calls of a plan, direction and kind of keys have in common.

    row        shape of a row in any buffer: K and V, or dK and dV, of a row lie together
    dtypes     of the buffers that the calls use
    row_bytes  of the same
    rows       that a slot of each must hold
    """

    def __init__(self, plan: ContextPlan, direction: str, k: torch.Tensor) -> None:
        self.row = (2, *k.shape[1:])
        most = plan.kv_exchange.max_rows
        if direction == "gathered":
            self.rows = {Buffer.SRC: most.published, Buffer.ALL: most.gathered}
        else:
            self.rows = {Buffer.SRC: most.published, Buffer.IN: most.published}
        self.dtypes = dict.fromkeys(self.rows, k.dtype)
        if direction == "backward":
            self.rows |= {
                Buffer.D: most.published,
                Buffer.SUM: most.published,
                Buffer.COME: most.returned,
            }
            floats = (Buffer.D, Buffer.SUM, Buffer.COME)
            self.dtypes |= dict.fromkeys(floats, statistics_dtype(k.dtype))
        numbers = 2 * k.shape[1] * k.shape[2]
        self.row_bytes = {b: numbers * dtype.itemsize for b, dtype in self.dtypes.items()}


class Course:
    """The "forward", "gathered" forward or "backward" call of one rank; `run` issues its hops.

    home   backward: (local_tokens, 2, hk, d) statistics dtype, dK and dV of this rank's own keys
    """

    def __init__(
        self,
        machine: Machine,
        plan: ContextPlan,
        direction: str,
        k: torch.Tensor,
        v: torch.Tensor,
        waits: bool = False,
    ) -> None:
        """Publishes k and v, (local_tokens, hk, d), and starts the first transfers.

        What the caller computes before `run` goes on beside them. waits: `attend` of a gathered
        forward takes words to wait for, where there is something to wait for.
        """
        self.machine, self._local = machine, (k, v)
        kind = (direction, waits, k.dtype, k.shape[1], k.shape[2])
        cargoes = _known.setdefault(plan.hops, {})
        cargo = cargoes.get(kind)
        if cargo is None:
            cargo = cargoes[kind] = Cargo(plan, direction, k)
        parity = machine.begin(cargo.row_bytes, cargo.rows)
        routes = machine.routes.setdefault(plan.hops, {})
        route = routes.get((kind, parity))
        if route is None:
            route = _route(machine, plan, direction, cargo, parity, k.device, waits)
            routes[kind, parity] = route
        self._home = (plan.local_tokens, *cargo.row), cargo.dtypes.get(Buffer.D)
        self._issue(route.before)
        self._after = route.after

    def run(self, attend: Callable[..., None]) -> None:
        """Calls attend(hop, k, v), backward attend(hop, k, v, dk, dv), for each hop with work.

        k, v: (rows, hk, d) of the hop's block; rows that the hop's spans do not have may be
        anything. dk, dv: the same in the statistics dtype, to be stored. Hop 0 comes last; then
        what others have found of its rows is added. Some of its KV heads may come first:
        attend(0, k, v, dk, dv) of these, attend(0, k, v, dk, dv, head) of those from `head` on.

        Gathered, it is called once with the rows of `ContextPlan.gathered`: attend(0, k, v), or if
        it waits, and keys of other ranks are seen, attend(0, k, v, words), where rows of hop t may
        be read once words[t] is not 0.
        """
        self._attend = attend
        self._grads: tuple[torch.Tensor, ...] = ()
        shape, statistics = self._home
        if statistics is not None:  # made behind what the caller has, which is larger
            self.home = self._local[0].new_empty(shape, dtype=statistics)
            self._grads = self.home.unbind(1)
        self._issue(self._after)

    def _issue(self, steps: Iterable[Step]) -> None:
        for prepared, work, tensors in steps:
            self.machine.issue(prepared)
            if work is not None:
                self.machine.compute(work, partial(self._run, work, tensors))

    def _run(self, work: Work, tensors: tuple[Any, ...]) -> None:
        if isinstance(work, Publish):
            self._publish(tensors)
        elif isinstance(work, Keep):
            for x, out in zip(self._local, tensors, strict=True):
                copy_rows(x, out)
        elif isinstance(work, Attend):
            self._run_hop(work, tensors)
        elif isinstance(work, AttendAll):
            self._attend(0, *tensors)
        elif isinstance(work, Add):
            for total, rows in zip(tensors[::2], tensors[1::2], strict=True):
                total.add_(rows)
        else:
            for own, rows in zip(tensors[::2], tensors[1::2], strict=True):
                own.add(rows, self.home)

    def _publish(self, tensors: tuple[Any, ...]) -> None:
        own, *rows = tensors
        for x, out in zip(self._local, rows, strict=True):
            own.gather(x, out)

    def _run_hop(self, operation: Attend, tensors: tuple[Any, ...]) -> None:
        if operation.kv is not None:
            self._attend(operation.hop, *tensors)
            return
        tokens, kv_heads, _ = self._local[0].shape
        own, first = (*self._local, *self._grads), first_heads(kv_heads, tokens)
        if operation.part is Part.ALL or (operation.part is Part.LAST and not first):
            self._attend(0, *own)
        elif operation.part is Part.LAST:
            self._attend(0, *(x[:, first:] for x in own), first)
        elif first:
            self._attend(0, *(x[:, :first] for x in own))


_known: weakref.WeakKeyDictionary[Plan, dict[object, Cargo]] = weakref.WeakKeyDictionary()


def _route(
    machine: Machine,
    plan: ContextPlan,
    direction: str,
    cargo: Cargo,
    parity: int,
    device: torch.device,
    waits: bool,
) -> Route:
    """The steps of a call on what is the machine's memory now."""
    own = plan.published_rows(device)
    operations = getattr(schedule, direction)(plan.kv_exchange, plan.rank, parity)
    operations = machine.arranged(operations)
    inside = frozenset(_awaited_inside(operations) if waits else ())

    def rows(place: Place, end: int | None = None) -> torch.Tensor:
        """(n, 2, hk, d): the place's rows, or all up to `end` of its slot, which is this rank's."""
        size = cargo.row_bytes[place.buffer]
        begin, end = (place.begin, place.end) if end is None else (0, end)
        memory = machine.local(place.buffer, place.slot)[begin * size : end * size]
        return memory.view(cargo.dtypes[place.buffer]).view(-1, *cargo.row)

    def tensors(work: Work) -> tuple[Any, ...]:
        """Publish: own, K, V. Keep: K, V. Attend: K, V, dK, dV. AttendAll: K, V, words. Add: each
        place's sum, rows. Collect: each place's own, rows."""
        if isinstance(work, Publish):
            return own, *(own.as_out(x) for x in rows(work.place).unbind(1))
        if isinstance(work, Keep):
            return tuple(view_16_bytes(x) for x in rows(work.place).unbind(1))
        if isinstance(work, AttendAll):
            both = rows(work.own, plan.kv_exchange.gathered_layout(plan.rank)[1]).unbind(1)
            return *both, *((machine.landed,) if waits else ())
        if isinstance(work, Attend):
            count = int(plan.kv_exchange.rows[(plan.rank - work.hop) % plan.world, work.hop])
            places = [p for p in (work.kv, work.found) if p is not None]
            return tuple(x for p in places for x in rows(p, count).unbind(1))
        if isinstance(work, Add):
            sums = (p._replace(buffer=Buffer.SUM) for p in work.places)
            return tuple(rows(x) for both in zip(sums, work.places, strict=True) for x in both)
        return tuple(x for p in work.places for x in (own.part(p.begin, p.end), rows(p)))

    steps: list[Step] = []
    count = 0
    pending: list[Operation] = []
    for operation in operations:
        if isinstance(operation, Prepare):
            steps.append(Step(machine.prepared(pending, inside), None, ()))
            count, pending = len(steps), []
            continue
        pending.append(operation)
        if isinstance(operation, get_args(Work)):
            steps.append(Step(machine.prepared(pending, inside), operation, tensors(operation)))
            pending = []
    steps.append(Step(machine.prepared(pending, inside), None, ()))
    return Route(steps[:count], steps[count:])


def _awaited_inside(operations: Iterable[Operation]) -> Iterator[Event]:
    """Events that kernels may await themselves."""
    for work in operations:
        if isinstance(work, AttendAll):
            yield from (block.landed for block in work.blocks)
