"""Ranks with three streams each in one process, in random interleavings of their operations.

Hosts only issue, as over CUDA. Then `run` advances one stream at a time, at random; some streams
are far faster than others, and their speeds change. Copies and kernels read and write in parts.
Memory that has not been written yet, or that nobody will read again, is NaN.
"""

from __future__ import annotations

import itertools
import random
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import get_args

import numpy as np
import torch

from ringfa3.symmetric.cuda_graphs import fork_join
from ringfa3.symmetric.ring_program import CallCache
from ringfa3.symmetric.stream_ops import (
    AddToSum,
    AttendGathered,
    AttendHop,
    Buffer,
    BufferSlice,
    BufferSpec,
    Copy,
    Event,
    Operation,
    Publish,
    Purpose,
    RecordEvent,
    ResetArrivals,
    RoundGradients,
    SetSignal,
    Signal,
    Stream,
    WaitAndReset,
    WaitEvent,
    Work,
)
from tests.support.happens_before import Label, inside, label

NAN = 0xFF  # in every byte: NaN in all floating dtypes
PARTS = 3  # in which rows are read and written
ROWS = 80  # of a slot; KV_GATHERED has twice as many
SPEED_TURNS = 60  # for which streams keep their speeds
Ready = Callable[[], bool]  # whether a stream can go on
Task = Iterator[Ready | None]


class DeadlockError(AssertionError):
    """No stream can go on."""


class World:
    """All ranks: memory, signals, and the operations that their streams have yet to run.

    without    a wait to leave out, named as by `happens_before.label`
    one_queue  a rank's streams run as one, in the order in which the host issues
    crowded    before each call the ranks run a collective of the job, one of them in its compute
               stream, the others beside it; its kernel starts where no kernel waits on the SMs
    fork_join  calls fork from and join the compute stream, in random parities; some as in graphs
    """

    def __init__(
        self,
        world: int,
        without: Label | None = None,
        one_queue: bool = False,
        crowded: bool = False,
        fork_join: bool = False,
    ) -> None:
        self.size, self.without, self.one_queue = world, without, one_queue
        self.crowded, self.fork_join = crowded, fork_join
        self.joined: dict[int, int] = defaultdict(int)  # ranks in a collective, by call
        self.memory: dict[tuple[int, Buffer, int], np.ndarray] = {}
        self.signals: dict[Signal, int] = defaultdict(int)
        self.queues: dict[tuple[int, str], deque[tuple[str, Task]]] = defaultdict(deque)
        self.backends = [SimulatedBackend(self, rank) for rank in range(world)]

    def run(self, rng: random.Random) -> None:
        """Runs until all streams are empty.

        Raises:
            DeadlockError: naming the operation at which each stream waits.
        """
        running = {key: queue.popleft() for key, queue in self.queues.items() if queue}
        blocked: dict[tuple[int, str], Ready | None] = dict.fromkeys(running)
        turns, speed = 0, {}
        while running:
            if turns % SPEED_TURNS == 0:
                speed = {key: 10 ** rng.uniform(-3, 0) for key in running}
            turns += 1
            able = [key for key in running if (wait := blocked[key]) is None or wait()]
            if not able:
                stuck = [f"rank {r} {s}: {running[r, s][0]}" for r, s in running]
                raise DeadlockError("\n".join(stuck))
            (key,) = rng.choices(able, [speed[k] for k in able])
            try:
                blocked[key] = next(running[key][1])
            except StopIteration:
                blocked[key] = None
                if self.queues[key]:
                    running[key] = self.queues[key].popleft()
                else:
                    del running[key]


class SimulatedBackend:
    """`ringfa3.symmetric.ring_pass.Backend` of one rank."""

    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank = world, rank
        self.calls = self.captured = 0
        self.row_bytes: dict[Buffer, int] = {}
        self.direction = ""
        self.events: dict[Event, list[bool]] = {}
        self.arrived: dict[Event, int] = defaultdict(int)  # words for which kernels wait
        self.holding = 0  # kernels that wait on the SMs
        self.copied: list[BufferSlice] = []  # from a peer, by the gradients' stream
        self.call_cache: CallCache = weakref.WeakKeyDictionary()
        self.arrivals = torch.ones(world.size, dtype=torch.int32)  # kernels run when all is here

    def begin(self, spec: BufferSpec, stream: object = None) -> int:
        kinds = {
            Buffer.DKV_OUT: "backward",
            Buffer.KV_GATHERED: "gathered",
            Buffer.KV_RECV: "forward",
        }
        self.direction = next(kind for buffer, kind in kinds.items() if buffer in spec.rows)
        for buffer, count in spec.rows.items():
            assert count <= ROWS * (1 + (buffer is Buffer.KV_GATHERED))
            row_bytes = spec.row_bytes[buffer]
            assert self.row_bytes.setdefault(buffer, row_bytes) == row_bytes
            self._allocate(buffer, ROWS * row_bytes)
        if self.world.crowded:
            own = self.calls % self.world.size == self.rank
            stream = Stream.COMPUTE.name if own else "beside"
            task = self._collective(self.calls)
            self.world.queues[self.rank, stream].append(("a collective", task))
        self.calls += 1
        if self.world.fork_join:
            self.captured, parity = divmod(random.Random(self.calls).randrange(4), 2)
            self.call_cache = {}
            return parity
        return (self.calls - 1) % 2

    def adapt(self, operations: list[Operation]) -> list[Operation]:
        return fork_join(operations, bool(self.captured)) if self.world.fork_join else operations

    def _allocate(self, buffer: Buffer, size: int) -> None:
        """KV_RECV, DKV_SUM and DKV_RECV share the memory of KV_GATHERED."""
        parts = [
            (Buffer.DKV_SUM, 0),
            (Buffer.KV_RECV, 0),
            (Buffer.DKV_RECV, 0),
            (Buffer.KV_RECV, 1),
        ]
        own = (self.rank, Buffer.KV_GATHERED, 0)
        if buffer in (Buffer.KV_SHARED, Buffer.DKV_OUT):
            own, parts = (self.rank, buffer, -1), [(buffer, 0), (buffer, 1)]
        memory = self.world.memory.setdefault(own, np.full(len(parts) * size, NAN, np.uint8))
        for i, (name, slot) in enumerate(parts):
            part = memory[i * size : (i + 1) * size]
            self.world.memory.setdefault((self.rank, name, slot), part)

    def _collective(self, number: int) -> Task:
        joined = self.world.joined
        yield lambda: not self.holding
        joined[number] += 1
        yield lambda: joined[number] == self.world.size

    def rows(self, part: BufferSlice, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        size = self.row_bytes[part.buffer]
        memory = torch.from_numpy(self.world.memory[self.rank, part.buffer, part.slot])
        return memory[part.begin * size : part.end * size].view(dtype).view(-1, *shape)

    def then(self, work: Callable[[], None]) -> None:
        """The caller's own work on the compute stream."""

        def task() -> Task:
            yield None
            work()

        self._put(Stream.COMPUTE, "the caller", task())

    def compute(self, operation: Operation, work: Callable[[], None]) -> None:
        if isinstance(operation, Publish):
            targets = [operation.target, operation.gathered]
            task = self._in_parts([], [x for x in targets if x is not None], work)
        elif isinstance(operation, AttendGathered):
            slices = [operation.own, *(block.rows for block in operation.blocks)]
            arrivals = {
                rows: event
                for rows, event in operation.blocks
                if self.world.without != inside(self.direction, event)
            }
            task = self._in_parts(slices, [], work, arrivals)
        elif isinstance(operation, AddToSum):
            sums = [p._replace(buffer=Buffer.DKV_SUM) for p in operation.slices]
            task = self._in_parts(list(operation.slices), sums, work)
        elif isinstance(operation, RoundGradients):
            task = self._in_parts(list(operation.slices), [], work)
        else:
            assert isinstance(operation, AttendHop)
            reads = [operation.kv] if operation.kv is not None else []
            writes = [operation.dkv] if operation.dkv is not None else []
            task = self._in_parts(reads, writes, work)
        self._put(operation.stream, str(operation), task)

    def prepare(
        self, operations: Sequence[Operation], in_kernel: frozenset[Event]
    ) -> list[Operation]:
        assert {event.name for event in in_kernel} <= {"arrived"}
        return [x for x in operations if not isinstance(x, get_args(Work))]

    def issue(self, prepared: list[Operation]) -> None:
        for operation in prepared:
            self._issue(operation)

    def _issue(self, operation: Operation) -> None:
        if isinstance(operation, RecordEvent) and operation.event.name == "arrived":
            task = self._arrive(operation.event)
        elif isinstance(operation, ResetArrivals):
            task = self._reset(operation)
        elif isinstance(operation, RecordEvent):
            self.events[operation.event] = flag = [False]
            task = self._record(flag)
        elif isinstance(operation, WaitEvent):
            if operation.event not in self.events or not self._has_effect(operation):
                return
            task = self._wait_event(self.events[operation.event])
        elif isinstance(operation, Copy):
            task = self._copy(operation)
        elif isinstance(operation, WaitAndReset):
            task = self._wait_signal(operation, self._has_effect(operation))
        else:
            assert isinstance(operation, SetSignal)
            task = self._set(operation)
        self._put(operation.stream, str(operation), task)

    def _put(self, stream: Stream, name: str, task: Task) -> None:
        key = (self.rank, (Stream.COMPUTE if self.world.one_queue else stream).name)
        self.world.queues[key].append((name, task))

    def _has_effect(self, wait: WaitEvent | WaitAndReset) -> bool:
        return self.world.without != label(self.direction, wait, self.world.size)

    def _record(self, flag: list[bool]) -> Task:
        yield None
        flag[0] = True

    def _arrive(self, event: Event) -> Task:
        yield None
        self.arrived[event] += 1
        assert self.arrived[event] < 2 or self.world.without, f"{event} is set twice"

    def _reset(self, reset: ResetArrivals) -> Task:
        yield None
        for event in reset.events:
            self.arrived[event] = 0

    def _wait_event(self, flag: list[bool]) -> Task:
        yield lambda: flag[0]

    def _wait_signal(self, wait: WaitAndReset, has_effect: bool) -> Task:
        """A wait that is left out still resets its signal, so that it releases no other wait."""
        signals = self.world.signals
        yield (lambda: signals[wait.signal] > 0) if has_effect else None
        signals[wait.signal] -= 1

    def _set(self, order: SetSignal) -> Task:
        yield None
        signals = self.world.signals
        signals[order.signal] += 1
        assert signals[order.signal] < 2 or self.world.without, f"{order.signal} is set twice"
        if order.signal.purpose is Purpose.DKV_CONSUMED:
            while self.copied:
                self._free(self.copied.pop())  # no other rank reads these rows

    def _copy(self, copy: Copy) -> Task:
        source, target = self._bytes(copy.source), self._bytes(copy.target)
        target[:] = NAN
        yield None
        for part in self._parts(copy.source):
            target[part] = source[part]
            yield None
        if copy.stream is Stream.GRADIENTS:
            self.copied.append(copy.source)

    def _in_parts(
        self,
        reads: list[BufferSlice],
        writes: list[BufferSlice],
        work: Callable[[], None],
        arrivals: Mapping[BufferSlice, Event] | None = None,
    ) -> Task:
        """Reads the slices part by part, does the work, and writes part by part.

        Slices of `reads` are free afterwards; those of `writes` are read too: work may add to them.
        arrivals: slices for which a kernel waits while it occupies the SMs.
        """
        self.holding += arrivals is not None
        before: dict[BufferSlice, np.ndarray] = {}
        for rows in (*reads, *writes):
            event = None if arrivals is None else arrivals.get(rows)
            if event is not None:
                yield lambda: self.arrived[event] > 0  # noqa: B023
            before[rows] = np.empty(len(self._bytes(rows)), np.uint8)
            for part in self._parts(rows):
                before[rows][part] = self._bytes(rows)[part]
                yield None
        self.holding -= arrivals is not None
        now = {rows: self._bytes(rows).copy() for rows in before}
        for rows, content in before.items():
            self._bytes(rows)[:] = content
        work()
        after = {rows: self._bytes(rows).copy() for rows in writes}
        for rows, content in now.items():
            self._bytes(rows)[:] = content
        for rows in writes:
            for part in self._parts(rows):
                self._bytes(rows)[part] = after[rows][part]
                yield None
        for rows in reads:
            self._free(rows)

    def _free(self, rows: BufferSlice) -> None:
        self._bytes(rows)[:] = NAN

    def _bytes(self, rows: BufferSlice) -> np.ndarray:
        row = self.row_bytes[rows.buffer]
        memory = self.world.memory[rows.rank, rows.buffer, rows.slot]
        return memory[rows.begin * row : rows.end * row]

    def _parts(self, rows: BufferSlice) -> list[slice]:
        row, rows = self.row_bytes[rows.buffer], rows.end - rows.begin
        ends = [rows * i // PARTS * row for i in range(PARTS + 1)]
        return [slice(a, b) for a, b in itertools.pairwise(ends) if b > a]
