"""Ring calls over peers' memory as programs, which the C++ launcher runs.

The first call of a call signature builds its schedule, or finds it prepared; each parity links it.
Python begins the call: checks, agreement, number and parity, settings for the store's monitor, room
in the shared memory. The launcher runs what follows, from the first driver call to the results.
From the next such call on it knows the call by its arguments, and begins it, too.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any, NamedTuple, NoReturn, Protocol, TypeAlias

import torch

from ringfa3.kernels.streams import CurrentStream
from ringfa3.kernels.symbolic import Symbol
from ringfa3.planning.context_plan import ContextPlan
from ringfa3.planning.tiling import Plan
from ringfa3.schedules.encoded import EncodedSchedule, Wait
from ringfa3.schedules.link import Addresses, Signature, link, link_arguments, memory_of
from ringfa3.schedules.program_cache import ProgramCache
from ringfa3.schedules.schedule import ScheduleBuilder
from ringfa3.schedules.steps import DriverCall, MemoryOps
from ringfa3.symmetric import cuda_driver
from ringfa3.symmetric.stream_ops import (
    AttendGathered,
    Buffer,
    BufferSlice,
    Copy,
    Event,
    Operation,
    RecordEvent,
    ResetArrivals,
    SetSignal,
    Stream,
    WaitAndReset,
    WaitEvent,
)

Tensors: TypeAlias = tuple[torch.Tensor, ...]
Inputs: TypeAlias = tuple[torch.Tensor | None, ...]


class Driver(Protocol):
    """What takes the operations of a call, in the order in which the host issues them."""

    def record(self, stream: Stream, event: Event) -> None: ...

    def wait_event(self, stream: Stream, event: Event) -> None: ...

    def copy(self, operation: Copy) -> None: ...

    def words(self, stream: Stream, operations: Sequence[Operation]) -> None:
        """Operations on words in memory, at least one of a stream, in one call. `ResetArrivals` has
        the events of flags alone; `RecordEvent` sets the flag of its event."""


def translate(operations: Sequence[Operation], in_kernel: frozenset[Event], driver: Driver) -> None:
    """Gives a driver all that it does for some operations.

    Operations on words that follow each other on one stream become one call.

    in_kernel: events that are arrival flags, for which kernels wait in place of their stream.
    """
    for stream, run in itertools.groupby(operations, lambda x: x.stream):
        words: list[Operation] = []
        for operation in run:
            if isinstance(operation, (SetSignal, WaitAndReset)):
                words.append(operation)
                continue
            if isinstance(operation, ResetArrivals):
                events = tuple(e for e in operation.events if e in in_kernel)
                words += [ResetArrivals(events)] if events else []
                continue
            if isinstance(operation, RecordEvent) and operation.event in in_kernel:
                words.append(operation)
                continue
            call = _call(operation, in_kernel, driver)
            if call is None:
                continue
            if words:
                driver.words(stream, words)
                words = []
            call()
        if words:
            driver.words(stream, words)


def _call(
    operation: Operation, in_kernel: frozenset[Event], driver: Driver
) -> Callable[[], None] | None:
    """The call of the driver that an operation is; None: it is none."""
    if isinstance(operation, RecordEvent):
        return lambda: driver.record(operation.stream, operation.event)
    if isinstance(operation, WaitEvent):
        return lambda: driver.wait_event(operation.stream, operation.event)
    if isinstance(operation, AttendGathered) and operation.blocks[-1].arrived not in in_kernel:
        last = operation.blocks[-1].arrived  # one stream copies all blocks
        return lambda: driver.wait_event(operation.stream, last)
    if isinstance(operation, Copy):
        return lambda: driver.copy(operation)
    return None


# The symbols of a ring call. Those that differ by parity are of the parity with which it is linked.


def _stream(stream: Stream) -> Symbol:
    return ("stream", stream)


def _event(event: Event) -> Symbol:
    return ("event", *event)


def _slot(part: BufferSlice) -> Symbol:
    by_parity = part.buffer is Buffer.KV_SHARED
    return ("slot", part.rank, part.buffer, None if by_parity else part.slot)


class ScheduleDriver:
    """`Driver` that adds steps to a schedule."""

    def __init__(self, builder: ScheduleBuilder, row_bytes: dict[Buffer, int]) -> None:
        self._builder, self._row_bytes = builder, row_bytes

    def record(self, stream: Stream, event: Event) -> None:
        description = f"{stream.name} records {event.name} {event.number}"
        self._add("cuEventRecord", description, _event(event), _stream(stream))

    def wait_event(self, stream: Stream, event: Event) -> None:
        description = f"{stream.name} waits for {event.name} {event.number}"
        self._add("cuStreamWaitEvent", description, _stream(stream), _event(event))

    def copy(self, operation: Copy) -> None:
        source, target = operation.source, operation.target
        size = (source.end - source.begin) * self._row_bytes[source.buffer]
        description = f"{operation.stream.name} copies {size} bytes, {_described(target)} <- "
        address = self._builder.address
        arguments = self._address(target), self._address(source), size
        step = DriverCall(
            "cuMemcpyDtoDAsync_v2",
            (*arguments, address(_stream(operation.stream))),
            description + _described(source),
        )
        self._builder.add(step)

    def words(self, stream: Stream, operations: Sequence[Operation]) -> None:
        made: list[tuple[int, int, int, int]] = []
        counts: list[tuple[int, int]] = []
        waits: list[Wait] = []
        description: list[str] = []
        address = self._builder.address
        write, wait = (_fields(x) for x in (cuda_driver.write(0, 0), cuda_driver.wait(0, 0)))

        def add(fields: tuple[int, int], symbol: Symbol, offset: int, value: int) -> None:
            made.append((fields[0], address(symbol) + offset, value, fields[1]))

        for x in operations:
            if isinstance(x, SetSignal):
                add(write, ("signal", *x.signal[:3]), 0, 1)
                description.append(f"sets {x.signal.purpose.name} of rank {x.signal.receiver}")
            elif isinstance(x, WaitAndReset):
                add(wait, ("signal", *x.signal[:3]), 0, 1)
                add(write, ("signal", *x.signal[:3]), 0, 0)
                add(write, ("waits", stream), 0, 0)
                counts.append((len(made) - 1, stream))
                waits.append((x.what, x.signal.sender))
                description.append(f"waits for {x.signal.purpose.name} of rank {x.signal.sender}")
            else:
                value = int(isinstance(x, RecordEvent))
                events = (x.event,) if isinstance(x, RecordEvent) else x.events  # type: ignore[union-attr]
                for event in events:
                    add(write, ("arrivals",), ARRIVAL_BYTES * event.number, value)
                    description.append(f"sets arrival {event.number} to {value}")
        step = MemoryOps(
            "cuStreamBatchMemOp_v2",
            address(_stream(stream)),
            tuple(made),
            tuple(counts),
            f"{stream.name} {', '.join(description)}",
        )
        self._builder.add(step)
        if waits:
            self._builder.wait(stream, waits)

    def _add(self, name: str, description: str, *symbols: Symbol) -> None:
        self._builder.add(DriverCall(name, tuple(map(self._builder.address, symbols)), description))

    def _address(self, part: BufferSlice) -> int:
        return self._builder.address(_slot(part)) + part.begin * self._row_bytes[part.buffer]


ARRIVAL_BYTES = 4


def _fields(x: cuda_driver.MemoryOp) -> tuple[int, int]:
    return x.operation, x.flags


def _described(part: BufferSlice) -> str:
    return f"{part.buffer.name} of rank {part.rank} [{part.begin}:{part.end}]"


class Prepared(NamedTuple):
    """Operations of a schedule, in place of driver calls."""

    operations: tuple[Operation, ...]
    in_kernel: frozenset[Event]
    driver: ScheduleDriver

    def add(self) -> None:
        translate(self.operations, self.in_kernel, self.driver)


class ScheduleBackend:
    """`ring_pass.Memory` while a schedule is built."""

    def __init__(
        self,
        builder: ScheduleBuilder,
        world: int,
        device: torch.device,
        row_bytes: dict[Buffer, int],
        adapt: Callable[[list[Operation]], list[Operation]],
    ) -> None:
        self._builder, self._world, self._device = builder, world, device
        self._driver, self.adapt = ScheduleDriver(builder, row_bytes), adapt

    @property
    def arrivals(self) -> torch.Tensor:
        return self._builder.memory(("arrivals",), (self._world,), torch.int32, self._device)

    def rows(self, part: BufferSlice, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Rows of this rank's own memory; shape: of a row."""
        numbers = part.begin
        for size in shape:
            numbers *= size
        whole = (part.end - part.begin, *shape)
        return self._builder.memory(_slot(part), whole, dtype, self._device, numbers)

    def prepare(self, operations: Sequence[Operation], in_kernel: frozenset[Event]) -> Prepared:
        return Prepared(tuple(operations), in_kernel, self._driver)


class RingProgram(NamedTuple):
    """A program of the C++ launcher.

    library  that made it
    held     by which the library knows it
    waits    for signals, for each stream, in order
    """

    library: Any
    held: object
    waits: Sequence[tuple[int, Sequence[Wait]]]

    def run(self, inputs: Inputs, stream: CurrentStream, waits: Sequence[int]) -> Tensors:
        """The results of a call on a stream, the current one. waits: of earlier calls, by stream.

        Raises:
            DriverError: the driver refuses a call.
            RuntimeError: CUDA refuses a launch.
        """
        results: Any = self.library.run(self.held, inputs, stream.handle, tuple(waits))
        if isinstance(results[0], str):
            raise cuda_driver.error(*results)
        return tuple(results)


class Beginner(Protocol):
    """What links and begins calls of a rank: a backend.

    group          to which it reports how calls end
    call_cache     of the calls that run on the same stream as the latest one; emptied when the
                   memory or the streams change
    last_compute   the compute stream of the latest call that no graph captured
    cache_version  changes whenever programs are out of date
    """

    group: Any
    call_cache: CallCache
    last_compute: Any
    cache_version: int

    def is_ready(self, schedule: EncodedSchedule, stream: CurrentStream) -> bool:
        """Whether a call that no graph captures may begin on a stream, the current one, without
        `begin`: as the latest call, with room in the shared memory and kernels that are loaded."""

    def addresses(self, stream: CurrentStream, parity: int) -> Addresses:
        """Of the symbols of calls of a parity on a stream."""


class ReplayableCall:
    """A call that the host library begins and runs whenever its arguments come again, by these
    attributes: `begin_again` of csrc/host/begin_again.h.

    backend        of the rank
    agreed         of the group, by which it begins again
    compute        the compute stream
    cache_version  of the backend's call cache
    waits          for signals, for each stream, in order
    programs       by parity, as the library holds them; None before the first call
    links          by parity, what the library makes a program of; None where Python has to

    It holds no plan, which would never die.
    """

    agreed: Any

    def __init__(
        self,
        backend: Beginner,
        library: Any,
        schedule: EncodedSchedule,
        stream: CurrentStream,
    ) -> None:
        self.backend, self._library = backend, library
        self._schedule, self._stream = schedule, stream
        self.compute, self.cache_version = backend.last_compute, backend.cache_version
        self.waits = schedule.waits
        self.programs: list[object] = [None, None]
        self.links: list[tuple[object, ...] | None] = [None, None]

    def program(self, parity: int) -> RingProgram:
        """The program of a parity, which its first call links.

        Raises what `link` raises, after it has told the other ranks.
        """
        if self.programs[parity] is None:
            given = self._library, self._schedule, self._stream
            try:
                self.programs[parity] = link(*given, self.backend.addresses(self._stream, parity))
            except Exception as error:
                self.backend.group.report_failure(error)
                raise
        return RingProgram(self._library, self.programs[parity], self.waits)

    def prepare_links(self, even: Addresses, odd: Addresses) -> None:
        """Lets the library link both parities, with their addresses, as soon as each has a call."""
        schedule = self._schedule
        memory = memory_of(schedule, self._stream, even)
        self.links = [
            link_arguments(schedule, memory, even),
            link_arguments(schedule, memory, odd),
        ]

    def refused(self, name: str, status: int) -> NoReturn:
        """The driver has refused a call of the program: tells the other ranks and raises."""
        error = cuda_driver.error(name, status)
        self.backend.group.report_failure(error)
        raise error

    def failed(self, memory: bool, text: str) -> None:
        """The program has failed, for lack of memory or otherwise: tells the other ranks."""
        error_type = torch.OutOfMemoryError if memory else RuntimeError
        self.backend.group.report_failure(error_type(text))


class CachedCalls(NamedTuple):
    """The calls of one plan: prepared steps, and calls that start in C++."""

    steps: dict[object, Any]
    programs: ProgramCache[ReplayableCall]

    @classmethod
    def of(cls, backend: Beginner, plan: ContextPlan) -> CachedCalls:
        """Those on the stream of the latest call."""
        known = backend.call_cache.get(plan.hops)
        if known is None:
            known = backend.call_cache.setdefault(plan.hops, cls({}, ProgramCache()))
        return known

    def call(
        self,
        backend: Beginner,
        library: Any,
        signature: Signature,
        schedule: EncodedSchedule,
        on: CurrentStream,
    ) -> ReplayableCall:
        """The call with a signature on a stream, the current one."""
        given = backend, library, schedule, on
        return self.programs.get((signature, on.id), lambda: ReplayableCall(*given))


CallCache: TypeAlias = MutableMapping[Plan, CachedCalls]
