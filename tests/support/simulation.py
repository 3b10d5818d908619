"""Ranks with three streams each in one process: every interleaving that a seed can draw.

Hosts only issue, as over CUDA; then `run` advances one stream at a time, at random, some far more
often than others, the favourites changing. Copies and kernels read and write in parts. What
nobody needs any more, and what has not been written yet, is NaN.
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

from ringfa3.symmetric.cuda_graphs import enclosed
from ringfa3.symmetric.ring_pass import Routes
from ringfa3.symmetric.stream_ops import (
    Add,
    Attend,
    AttendAll,
    Await,
    Buffer,
    Clear,
    Collect,
    Copy,
    Event,
    Keep,
    Operation,
    Place,
    Publish,
    Purpose,
    Record,
    Set,
    Stream,
    Take,
    Word,
    Work,
)
from tests.support.happens_before import Label, inside, label

NAN = 0xFF  # in every byte: NaN in all floating dtypes
PARTS = 3  # in which rows are read and written
ROWS = 80  # that a slot holds, and ALL twice as many
MOOD = 60  # turns for which the favourites stay the same
Ready = Callable[[], bool]  # what a stream waits for
Task = Iterator[Ready | None]


class DeadlockError(AssertionError):
    """No stream can go on."""


class World:
    """All ranks: memory, words, and what their streams have yet to do.

    without    a wait that is taken out, as `happens_before.label` names it
    one_queue  a rank's streams run as one, in the order in which the host issues
    crowded    before each call the ranks meet in a collective of the job, one of them in its
               compute stream, the others beside it; its kernels begin where none waits on the SMs
    enclose    calls begin and end with the compute stream, in any parities; some as in graphs
    """

    def __init__(
        self,
        world: int,
        without: Label | None = None,
        one_queue: bool = False,
        crowded: bool = False,
        enclose: bool = False,
    ) -> None:
        self.size, self.without, self.one_queue = world, without, one_queue
        self.crowded, self.enclose = crowded, enclose
        self.joined: dict[int, int] = defaultdict(int)  # ranks in a collective, by call
        self.memory: dict[tuple[int, Buffer, int], np.ndarray] = {}
        self.words: dict[Word, int] = defaultdict(int)
        self.queues: dict[tuple[int, str], deque[tuple[str, Task]]] = defaultdict(deque)
        self.machines = [SimulatedMachine(self, rank) for rank in range(world)]

    def run(self, rng: random.Random) -> None:
        """Until all streams are empty.

        Raises:
            DeadlockError: with what each stream waits for.
        """
        running = {key: queue.popleft() for key, queue in self.queues.items() if queue}
        blocked: dict[tuple[int, str], Ready | None] = dict.fromkeys(running)
        turns, speed = 0, {}
        while running:
            if turns % MOOD == 0:
                speed = {key: 10 ** rng.uniform(-3, 0) for key in running}
            turns += 1
            able = [key for key in running if (wait := blocked[key]) is None or wait()]
            if not able:
                said = [f"rank {r} {s}: {running[r, s][0]}" for r, s in running]
                raise DeadlockError("\n".join(said))
            (key,) = rng.choices(able, [speed[k] for k in able])
            try:
                blocked[key] = next(running[key][1])
            except StopIteration:
                blocked[key] = None
                if self.queues[key]:
                    running[key] = self.queues[key].popleft()
                else:
                    del running[key]


class SimulatedMachine:
    """`ringfa3.symmetric.ring_pass.Machine` of one rank."""

    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank = world, rank
        self.calls = self.captured = 0
        self.row_bytes: dict[Buffer, int] = {}
        self.direction = ""
        self.events: dict[Event, list[bool]] = {}
        self.arrived: dict[Event, int] = defaultdict(int)  # words that kernels await
        self.holding = 0  # kernels that wait on the SMs
        self.copied: list[Place] = []  # by the stream of gradients, of a peer
        self.routes: Routes = weakref.WeakKeyDictionary()
        self.landed = torch.ones(world.size, dtype=torch.int32)  # a kernel runs when all is here

    def begin(self, row_bytes: Mapping[Buffer, int], rows: Mapping[Buffer, int]) -> int:
        kinds = {Buffer.D: "backward", Buffer.ALL: "gathered", Buffer.IN: "forward"}
        self.direction = next(kind for buffer, kind in kinds.items() if buffer in rows)
        for buffer, count in rows.items():
            assert count <= ROWS * (1 + (buffer is Buffer.ALL))
            assert self.row_bytes.setdefault(buffer, row_bytes[buffer]) == row_bytes[buffer]
            self._allocate(buffer, ROWS * row_bytes[buffer])
        if self.world.crowded:
            own = self.calls % self.world.size == self.rank
            stream = Stream.COMPUTE.name if own else "beside"
            task = self._collective(self.calls)
            self.world.queues[self.rank, stream].append(("a collective", task))
        self.calls += 1
        if self.world.enclose:
            self.captured, parity = divmod(random.Random(self.calls).randrange(4), 2)
            self.routes = {}
            return parity
        return (self.calls - 1) % 2

    def arranged(self, operations: list[Operation]) -> list[Operation]:
        return enclosed(operations, bool(self.captured)) if self.world.enclose else operations

    def _allocate(self, buffer: Buffer, size: int) -> None:
        """IN, SUM and COME lie in the memory of ALL."""
        parts = [(Buffer.SUM, 0), (Buffer.IN, 0), (Buffer.COME, 0), (Buffer.IN, 1)]
        own = (self.rank, Buffer.ALL, 0)
        if buffer in (Buffer.SRC, Buffer.D):
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

    def local(self, buffer: Buffer, slot: int) -> torch.Tensor:
        return torch.from_numpy(self.world.memory[self.rank, buffer, slot])

    def then(self, work: Callable[[], None]) -> None:
        """Work of the caller on the compute stream."""

        def task() -> Task:
            yield None
            work()

        self._put(Stream.COMPUTE, "the caller", task())

    def compute(self, operation: Operation, work: Callable[[], None]) -> None:
        if isinstance(operation, (Publish, Keep)):
            task = self._in_parts([], [operation.place], work)
        elif isinstance(operation, AttendAll):
            places = [operation.own, *(block.place for block in operation.blocks)]
            landed = {
                place: event
                for place, event in operation.blocks
                if self.world.without != inside(self.direction, event)
            }
            task = self._in_parts(places, [], work, landed)
        elif isinstance(operation, Add):
            sums = [p._replace(buffer=Buffer.SUM) for p in operation.places]
            task = self._in_parts(list(operation.places), sums, work)
        elif isinstance(operation, Collect):
            task = self._in_parts(list(operation.places), [], work)
        else:
            assert isinstance(operation, Attend)
            reads = [operation.kv] if operation.kv is not None else []
            writes = [operation.found] if operation.found is not None else []
            task = self._in_parts(reads, writes, work)
        self._put(operation.stream, str(operation), task)

    def prepared(
        self, operations: Sequence[Operation], inside: frozenset[Event]
    ) -> list[Operation]:
        assert {event.name for event in inside} <= {"landed"}
        return [x for x in operations if not isinstance(x, get_args(Work))]

    def issue(self, prepared: list[Operation]) -> None:
        for operation in prepared:
            self._issue(operation)

    def _issue(self, operation: Operation) -> None:
        if isinstance(operation, Record) and operation.event.name == "landed":
            task = self._raise(operation.event)
        elif isinstance(operation, Clear):
            task = self._clear(operation)
        elif isinstance(operation, Record):
            self.events[operation.event] = flag = [False]
            task = self._record(flag)
        elif isinstance(operation, Await):
            if operation.event not in self.events or not self._kept(operation):
                return
            task = self._await(self.events[operation.event])
        elif isinstance(operation, Copy):
            task = self._copy(operation)
        elif isinstance(operation, Take):
            task = self._take(operation, self._kept(operation))
        else:
            assert isinstance(operation, Set)
            task = self._set(operation)
        self._put(operation.stream, str(operation), task)

    def _put(self, stream: Stream, name: str, task: Task) -> None:
        key = (self.rank, (Stream.COMPUTE if self.world.one_queue else stream).name)
        self.world.queues[key].append((name, task))

    def _kept(self, wait: Await | Take) -> bool:
        return self.world.without != label(self.direction, wait, self.world.size)

    def _record(self, flag: list[bool]) -> Task:
        yield None
        flag[0] = True

    def _raise(self, event: Event) -> Task:
        yield None
        self.arrived[event] += 1
        assert self.arrived[event] < 2 or self.world.without, f"{event} is raised twice"

    def _clear(self, clear: Clear) -> Task:
        yield None
        for event in clear.events:
            self.arrived[event] = 0

    def _await(self, flag: list[bool]) -> Task:
        yield lambda: flag[0]

    def _take(self, take: Take, kept: bool) -> Task:
        """A wait that was taken out still uses its signal up, so that no other is let through."""
        words = self.world.words
        yield (lambda: words[take.word] > 0) if kept else None
        words[take.word] -= 1

    def _set(self, order: Set) -> Task:
        yield None
        words = self.world.words
        words[order.word] += 1
        assert words[order.word] < 2 or self.world.without, f"{order.word} is set twice"
        if order.word.purpose is Purpose.TAKEN:
            while self.copied:
                self._free(self.copied.pop())  # this rank was the only one to need these rows

    def _copy(self, copy: Copy) -> Task:
        source, target = self._bytes(copy.source), self._bytes(copy.target)
        target[:] = NAN
        yield None
        for part in self._parts(copy.source):
            target[part] = source[part]
            yield None
        if copy.stream is Stream.GRADIENTS:
            self.copied.append(copy.source)

    def _in_parts(self, reads: list[Place], writes: list[Place], work: Callable[[], None],
                  landed: Mapping[Place, Event] | None = None) -> Task:  # fmt: skip
        """Work on what it finds in its places, in parts, and leaves there, in parts.

        What is read is free then. Writes are read first: they may be added to.
        landed: words for which a kernel waits that is on the SMs already.
        """
        self.holding += landed is not None
        found: dict[Place, np.ndarray] = {}
        for place in (*reads, *writes):
            event = None if landed is None else landed.get(place)
            if event is not None:
                yield lambda: self.arrived[event] > 0  # noqa: B023
            found[place] = np.empty(len(self._bytes(place)), np.uint8)
            for part in self._parts(place):
                found[place][part] = self._bytes(place)[part]
                yield None
        self.holding -= landed is not None
        now = {place: self._bytes(place).copy() for place in found}
        for place, was in found.items():
            self._bytes(place)[:] = was
        work()
        left = {place: self._bytes(place).copy() for place in writes}
        for place, other in now.items():
            self._bytes(place)[:] = other
        for place in writes:
            for part in self._parts(place):
                self._bytes(place)[part] = left[place][part]
                yield None
        for place in reads:
            self._free(place)

    def _free(self, place: Place) -> None:
        self._bytes(place)[:] = NAN

    def _bytes(self, place: Place) -> np.ndarray:
        row = self.row_bytes[place.buffer]
        memory = self.world.memory[place.rank, place.buffer, place.slot]
        return memory[place.begin * row : place.end * row]

    def _parts(self, place: Place) -> list[slice]:
        row, rows = self.row_bytes[place.buffer], place.end - place.begin
        ends = [rows * i // PARTS * row for i in range(PARTS + 1)]
        return [slice(a, b) for a, b in itertools.pairwise(ends) if b > a]
