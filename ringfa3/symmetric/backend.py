"""The `symmetric` transport on one GPU: turns the operations of a schedule into driver calls.

Copy engines pull from the peers' memory; stream memory operations set and wait for signals.
`schedule` decides what is done and in which order.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from ringfa3.kernels.streams import CurrentStream
from ringfa3.schedules.encoded import EncodedSchedule, Part, Wait
from ringfa3.schedules.link import Addresses, Resolvers, kernel_resolvers, kernels_loaded
from ringfa3.schedules.settings import Settings
from ringfa3.symmetric import cuda_driver
from ringfa3.symmetric.cuda_driver import entry_address
from ringfa3.symmetric.cuda_graphs import ReplayWaits, fork_join
from ringfa3.symmetric.ipc_memory import IpcMemory
from ringfa3.symmetric.ring_program import (
    ARRIVAL_BYTES,
    CallCache,
    Inputs,
    RingProgram,
    Tensors,
    translate,
)
from ringfa3.symmetric.signals import Signals
from ringfa3.symmetric.stream_ops import (
    Buffer,
    BufferSlice,
    Copy,
    Event,
    Operation,
    Purpose,
    RecordEvent,
    ResetArrivals,
    SetSignal,
    Signal,
    Slots,
    Stream,
    WaitAndReset,
)
from ringfa3.symmetric.watchdog import Watchdog

MASK = (1 << 32) - 1  # of a stream's counter


class Group(Protocol):
    """What the transport needs of `RingGroup`."""

    ranks: list[int]
    rank: int
    world: int

    @property
    def failure(self) -> str | None:
        """Why the group is lost."""

    @property
    def timeout_s(self) -> float: ...

    def gather(self, line: str) -> list[str]:
        """Passes a line, returns those of all ranks."""

    def peer_failure(self) -> str | None:
        """The message of a rank that has given up; None if none has."""

    def lose(self, message: str) -> None:
        """Makes the group unusable, reports that to the other ranks and interrupts the caller."""

    @property
    def call(self) -> int:
        """Number of the call under way."""

    def agreed(self, settings: Settings, direction: str) -> Any:
        """The same for calls in a direction with settings; None if ranks must agree again."""

    def agreement_snapshot(self) -> Any:
        """With which the C++ launcher begins calls like the one under way."""

    def report_failure(self, problem: Exception) -> None:
        """Reports to the other ranks that an error ends a call, unless they know."""


class DriverCalls(NamedTuple):
    """Operations as calls of the driver.

    waits  for each stream, in order: its waits for signals, and the operations that write their
           numbers to the stream's counter
    """

    calls: list[cuda_driver.Call]
    waits: list[tuple[Stream, list[Wait], list[cuda_driver.MemoryOp]]]


class _EagerDriver:
    """`Driver` that prepares calls for `issue`."""

    def __init__(self, backend: SymmetricBackend) -> None:
        self._backend, self.prepared = backend, DriverCalls([], [])

    def record(self, stream: Stream, event: Event) -> None:
        backend = self._backend
        self._add(cuda_driver.record(backend.handle(stream), backend.event(*event)))

    def wait_event(self, stream: Stream, event: Event) -> None:
        backend = self._backend
        self._add(cuda_driver.wait_event(backend.handle(stream), backend.event(*event)))

    def copy(self, operation: Copy) -> None:
        backend, source, target = self._backend, operation.source, operation.target
        size = (source.end - source.begin) * backend.row_bytes[source.buffer]
        handle = backend.handle(operation.stream)
        self._add(cuda_driver.copy(handle, backend.address(target), backend.address(source), size))

    def words(self, stream: Stream, operations: Sequence[Operation]) -> None:
        """A wait also resets the signal and counts itself in the stream's counter."""
        backend, signals = self._backend, self._backend.signals
        made: list[cuda_driver.MemoryOp] = []
        counts: list[int] = []
        waits: list[Wait] = []
        for operation in operations:
            if isinstance(operation, SetSignal):
                made.append(cuda_driver.write(signals.address(operation.signal), 1))
            elif isinstance(operation, WaitAndReset):
                address = signals.address(operation.signal)
                wait = cuda_driver.wait(address, 1), cuda_driver.write(address, 0)
                waits.append((operation.what, operation.signal.sender))
                if backend.captured:
                    name = backend.described(waits[-1])
                    made.extend((backend.replays.awaiting(stream, name), *wait))
                else:
                    made.extend((*wait, cuda_driver.write(signals.counter(stream), 0)))
                    counts.append(len(made) - 1)
            elif isinstance(operation, RecordEvent):
                made.append(cuda_driver.write(backend.arrival(operation.event), 1))
            elif isinstance(operation, ResetArrivals):
                made.extend(cuda_driver.write(backend.arrival(e), 0) for e in operation.events)
        if backend.captured and waits:
            made.extend(backend.replays.passed_ops(stream))
        call, read = cuda_driver.batch_memory_ops(backend.handle(stream), made)
        self._add(call)
        if counts:
            self.prepared.waits.append((stream, waits, [read[i] for i in counts]))

    def _add(self, call: cuda_driver.Call) -> None:
        self.prepared.calls.append(call)


class SymmetricBackend:
    """`ringfa3.symmetric.ring_pass.Backend` on one GPU."""

    def __init__(
        self,
        group: Group,
        device: torch.device,
        timeout_s: float,
        lost: Callable[[str], None],
    ) -> None:
        """lost(message) is called if a peer does not answer within `timeout_s`."""
        self.group, self.ranks, self.device = group, group.ranks, device
        self.calls = 0
        self.call_cache: CallCache = weakref.WeakKeyDictionary()
        self._call_caches: dict[torch.cuda.Stream, CallCache] = {}  # by compute stream
        self.cache_version = 0  # changes whenever `_call_caches` is emptied
        self.last_compute: torch.cuda.Stream | None = None  # of the last call that was not captured
        self._computes: dict[torch.cuda.Stream, torch.cuda.Stream] = {}  # one object a stream
        self._stream_id: int | None = None  # its driver's id, if the C++ launcher has looked it up
        self.captured = False  # the call under way is
        self.joins = False  # calls fork and join: some have been captured
        self._graphs: list[CallCache] = []  # of captured calls: graphs have their addresses
        self.memory = IpcMemory(group.rank, group.world, device, group.gather)
        self.signals = Signals(group.rank, group.world, group.gather)
        torch.cuda.synchronize(device)  # makes its context the current one
        self._enter = [cuda_driver.set_context(cuda_driver.current_context())]
        side = (Stream.KV, Stream.GRADIENTS)
        self._streams: dict[Stream, torch.cuda.Stream] = {s: _stream(device) for s in side}
        self.waits = [0] * len(Stream)  # for signals so far, by stream
        self._events: dict[Event, int] = {}
        self._addresses: dict[object, Addresses] = {}  # by compute stream and parity
        self.arrivals = torch.zeros(group.world, dtype=torch.int32, device=device)
        self.row_bytes: Mapping[Buffer, int] = {}
        reached, release = self.signals.reached, self.signals.set_all
        given = group.peer_failure, lost, release, self.described
        self._watchdog = Watchdog(lambda: timeout_s, reached, *given)
        self.posted = self._watchdog.posted
        self.replays = ReplayWaits(self.signals)

    def is_ready(self, schedule: EncodedSchedule, stream: CurrentStream) -> bool:
        """As `Beginner.is_ready`."""
        ready = stream.id == self._stream_id and not self.joins and kernels_loaded(schedule)
        return ready and self.memory.holds(schedule.spec.slot_bytes)

    def begin(self, spec: Slots, stream: CurrentStream | None = None) -> int:
        """As `Backend.begin`. A captured call has the same parity in all replays."""
        self.row_bytes = spec.row_bytes
        again = stream is not None and stream.id == self._stream_id
        compute = self.last_compute if again else None
        if compute is None:
            cuda_driver.issue(self._enter)
            compute = torch.cuda.current_stream(self.device)
            compute = self._computes.setdefault(compute, compute)
            self._stream_id = None if stream is None else stream.id
        self.captured = stream is None and torch.cuda.is_current_stream_capturing()
        if not self.memory.holds(spec.slot_bytes):
            self._clear_call_caches()
            self.call_cache = {}  # their tensors view the old memory
            self.memory.reserve(spec.slot_bytes)
        if self.captured:
            if not self.joins:
                self._start_fork_join()
            self.memory.pin()
            self.call_cache = {}
            self._graphs.append(self.call_cache)
        else:
            if self.last_compute not in (None, compute):
                compute.wait_stream(self.last_compute)  # the schedule knows one compute stream
            self.last_compute = compute
            if compute not in self._call_caches:
                self._call_caches[compute] = weakref.WeakKeyDictionary()
            self.call_cache = self._call_caches[compute]
        self._streams[Stream.COMPUTE] = compute
        self.calls += 1
        return (self.calls - 1) % 2

    def _clear_call_caches(self) -> None:
        self._call_caches.clear()
        self._addresses.clear()
        self.cache_version += 1

    def _start_fork_join(self) -> None:
        """Before the first captured call: waits until earlier calls have ended.

        Their side streams do not join the compute stream, so the host waits for their signals.
        """
        while self.group.failure is None and not all(
            self.signals.reached(stream, count) for stream, count in enumerate(self.waits)
        ):
            time.sleep(0.001)
        self.joins = True
        self._clear_call_caches()
        self._watchdog.poll_graphs(self.replays.poll)

    def adapt(self, operations: list[Operation]) -> list[Operation]:
        return fork_join(operations, self.captured) if self.joins else operations

    def local(self, buffer: Buffer, slot: int) -> torch.Tensor:
        """This rank's own memory, uint8."""
        return self.memory.local(buffer, slot)

    def rows(self, part: BufferSlice, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        size = self.row_bytes[part.buffer]
        memory = self.local(part.buffer, part.slot)[part.begin * size : part.end * size]
        return memory.view(dtype).view(-1, *shape)

    def compute(self, operation: Operation, work: Callable[[], None]) -> None:
        work()

    def prepare(self, operations: Sequence[Operation], in_kernel: frozenset[Event]) -> DriverCalls:
        driver = _EagerDriver(self)
        translate(operations, in_kernel, driver)
        return driver.prepared

    # Addresses

    def handle(self, stream: Stream) -> int:
        return self._streams[stream].cuda_stream

    def event(self, name: str, number: int) -> int:
        event = Event(name, number)
        if event not in self._events:
            self._events[event] = cuda_driver.new_event()
        return self._events[event]

    def arrival(self, event: Event) -> int:
        return self.arrivals.data_ptr() + event.number * ARRIVAL_BYTES

    def address(self, rows: BufferSlice) -> int:
        begin = rows.begin * self.row_bytes[rows.buffer]
        return self.memory.address(rows.rank, rows.buffer, rows.slot) + begin

    def addresses(self, stream: CurrentStream, parity: int) -> Addresses:
        """As `Beginner.addresses`."""
        if self.last_compute is not None:  # a captured call may have had another one since
            self._streams[Stream.COMPUTE] = self.last_compute
        key = self._streams[Stream.COMPUTE], stream.id, parity
        found = self._addresses.get(key)
        if found is None:
            found = Addresses(self._resolvers(stream, parity), self._tensor_of)
            self._addresses[key] = found
        return found

    def _resolvers(self, stream: CurrentStream, parity: int) -> Resolvers:
        def slot(rank: int, buffer: Buffer, number: int | None) -> int:
            return self.memory.address(rank, buffer, parity if number is None else number)

        def signal(sender: int, receiver: int, purpose: Purpose) -> int:
            return self.signals.address(Signal(sender, receiver, purpose, parity))

        return {
            **kernel_resolvers(stream),
            "stream": self.handle,
            "event": self.event,
            "signal": signal,
            "waits": self.signals.counter,
            "arrivals": self.arrivals.data_ptr,
            "slot": slot,
            "driver": entry_address,
        }

    def _tensor_of(self, part: Part) -> torch.Tensor:
        """This rank's own memory. Kernels compute on no slot that a parity selects."""
        _, _, buffer, slot = part.symbol
        memory = self.memory.local(buffer, slot).view(part.dtype)
        return memory.as_strided(part.shape, part.stride, memory.storage_offset() + part.offset)

    def issue(self, prepared: DriverCalls) -> None:
        for stream, waits, counts in prepared.waits:
            for i, count in enumerate(counts, self.waits[stream] + 1):
                count.value = i & MASK
            self.waits[stream] += len(waits)
            self._watchdog.post(stream, waits, self.group.call)
        cuda_driver.issue(prepared.calls)

    def replay(self, program: RingProgram, inputs: Inputs, stream: CurrentStream) -> Tensors:
        """As `Backend.replay`. Raises as `RingProgram.run`."""
        return program.run(inputs, stream, self._count_waits(program))

    def _count_waits(self, program: RingProgram) -> tuple[int, ...]:
        """Counts the waits of a launch, and passes them to the watchdog. Returns earlier counts."""
        before = tuple(self.waits)
        for stream, waits in program.waits:
            self.waits[stream] += len(waits)
        self.posted.append((self.group.call, program.waits))
        return before

    def described(self, wait: Wait) -> str:
        what, sender = wait
        return f"{what} rank {self.ranks[sender]}"

    def serve(self) -> None:
        """After the self-test: a peer that does not answer in time loses the group."""
        self._watchdog.timeout_s = lambda: self.group.timeout_s
        self._watchdog.lost = self.group.lose

    def close(self, meet: Callable[[], bool] | None = None) -> None:
        """Ends the watchdog and frees all memory; may wait for this rank's streams and for peers.

        The memory stays if peers may still have it mapped, or if a CUDA graph has its addresses.

        meet: whether all ranks of the group have called it; None: they will not close together
        """
        together = False
        try:
            if meet is not None and not self._graphs:
                with torch.cuda.device(self.device):
                    for stream in self._streams.values():  # the watchdog ends waits in vain
                        stream.synchronize()
                    self._watchdog.end()  # before the words that it reads are unmapped
                    self._clear_call_caches()
                    self.call_cache = {}  # their tensors view the memory
                    self.memory.unmap()
                    together = meet()
                    if together:
                        self.memory.free()
                        self.signals.close()
                        while self._events:
                            cuda_driver.destroy_event(self._events.popitem()[1])
        finally:
            if not together:
                self.memory.pin()
            self._watchdog.end()

    def completed_before(self, call: int) -> bool:
        """Whether this rank's streams have what they need from calls before `call`."""
        return self._watchdog.completed_before(call)

    def abandon(self) -> None:
        """Releases the streams of calls that peers will never answer; raises no error."""
        self.memory.pin()
        self._watchdog.give_up()


def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
