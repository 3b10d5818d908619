"""Proves that a schedule has no hazard and no deadlock at any speeds of its streams, or names one.

The operations of many calls on all ranks are nodes of a graph; an edge leads from an operation to
one that starts after its end. Two accesses to the same rows that no path connects may overlap in
some run: a hazard. Every event and signal has one stream that sets it and one that waits for it, so
no run has a choice: without a cycle, no run deadlocks. A kernel that waits inside keeps all other
kernels off the SMs, on its rank and, through collectives of the job, on others: between its start
and its end it may need nothing but copies.

In a CUDA graph the device of a rank may run operations one by one, in any order that events allow.
A stuck rank waits for a signal whose setter is behind a wait of another stuck rank, unless events
put that wait behind the setter. If such pairs of waits have no cycle, no order deadlocks.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence

from ringfa3.symmetric.stream_ops import (
    AddToSum,
    AttendGathered,
    AttendHop,
    Buffer,
    BufferSlice,
    Copy,
    EndStart,
    Event,
    Operation,
    Publish,
    RecordEvent,
    ResetArrivals,
    RoundGradients,
    SetSignal,
    Signal,
    Stream,
    WaitAndReset,
    WaitEvent,
)

Calls = Sequence[tuple[str, Sequence[Sequence[Operation]]]]  # direction, operations by rank
Label = tuple[Hashable, ...]
OVERLAID = (Buffer.KV_RECV, Buffer.DKV_SUM, Buffer.DKV_RECV, Buffer.KV_GATHERED)  # one memory
SETTLED = "settled"  # in place of a direction: here hosts wait until all signal waits are over


def label(direction: str, wait: WaitEvent | WaitAndReset, world: int) -> Label:
    """Names a wait, the same on all ranks and in all calls of a direction."""
    if isinstance(wait, WaitAndReset):
        distance = (wait.signal.sender - wait.signal.receiver) % world
        return wait.what, wait.signal.purpose.name, distance
    return direction, wait.stream.name, wait.event.name, wait.event.number


def inside(direction: str, event: Event) -> Label:
    """Names the wait of a gathered kernel for one block."""
    return direction, "kernel", event


def waits(calls: Calls) -> list[Label]:
    """Labels of all waits, each once."""
    found: dict[Label, None] = {}
    for direction, ranks in calls:
        for operation in itertools.chain(*ranks):
            if isinstance(operation, (WaitEvent, WaitAndReset)):
                found[label(direction, operation, len(ranks))] = None
            elif isinstance(operation, AttendGathered):
                for block in operation.blocks:
                    found[inside(direction, block.arrived)] = None
    return list(found)


def problems(calls: Calls, without: Label | None = None, one_queue: bool = False) -> list[str]:
    """Deadlocks, signals set twice, rows that two operations may access at once, and kernels that
    occupy the SMs while they wait for more than copies. Empty: proven to have none.

    without: a wait to leave out. one_queue: the streams of a rank run as one, in the order in which
    the host issues.
    """
    return _Order(calls, without, one_queue).problems()


def stuck(direction: str, ranks: Sequence[Sequence[Operation]]) -> list[str]:
    """Deadlocks of a call whose operations each rank runs one by one, in any order that its events
    allow. Empty: proven to have none. One call at a time is enough for calls that fork and join: of
    stuck ranks, those in the earliest call wait for signals that ranks in later calls have set."""
    return _Order([(direction, ranks)], None, False).stuck()


class _Order:
    def __init__(self, calls: Calls, without: Label | None, one_queue: bool) -> None:
        self.after: list[list[int]] = []  # node -> nodes that start after it
        self.names: list[str] = []
        self.operations: list[tuple[int, Operation]] = []  # with their ranks
        self.waiting: list[tuple[int, int]] = []  # start and end of kernels that wait inside
        self.awaited_inside: list[tuple[int, int]] = []  # record, and the kernel's start
        self.arrived: dict[tuple[int, Event], list[int]] = defaultdict(list)
        self.reset: dict[tuple[int, Event], list[int]] = defaultdict(list)
        self.accesses: dict[tuple[object, ...], list[tuple[int, BufferSlice, bool]]]
        self.accesses = defaultdict(list)
        self.sets: dict[Signal, list[int]] = defaultdict(list)
        self.signal_waits: dict[Signal, list[tuple[int, bool]]] = defaultdict(list)
        for rank in range(len(calls[0][1])):
            self._last: dict[object, int] = {}
            self._events: dict[Event, int] = {}
            for number, (direction, ranks) in enumerate(calls):
                if direction == SETTLED:
                    self._settle(rank)
                for operation in ranks[rank]:
                    name = f"rank {rank}, call {number}: {operation}"
                    stream = None if one_queue else operation.stream
                    self._now = rank, operation
                    self._add(operation, name, stream, direction, without, len(ranks))

    def _node(self, name: str, stream: object) -> int:
        node = len(self.after)
        self.after.append([])
        self.names.append(name)
        self.operations.append(self._now)
        if stream in self._last:
            self.after[self._last[stream]].append(node)
        self._last[stream] = node
        return node

    def _settle(self, rank: int) -> None:
        self._now = rank, EndStart()
        waits = [
            t
            for t, x in enumerate(self.operations)
            if x[0] == rank and isinstance(x[1], WaitAndReset)
        ]
        for stream in Stream:
            node = self._node(f"rank {rank} has settled", stream)
            for wait in waits:
                self.after[wait].append(node)

    def _access(self, node: int, rows: BufferSlice, writes: bool) -> None:
        memory = OVERLAID if rows.buffer in OVERLAID else rows[1:3]
        self.accesses[rows.rank, memory].append((node, rows, writes))

    def _add(self, operation: Operation, name: str, stream: object, direction: str,
             without: Label | None, world: int) -> None:  # fmt: skip
        node = self._node(name, stream)
        is_wait = isinstance(operation, (WaitEvent, WaitAndReset))
        has_effect = not is_wait or without != label(direction, operation, world)
        if isinstance(operation, RecordEvent):
            self._events[operation.event] = node
            if operation.event.name == "arrived":
                self.arrived[self._now[0], operation.event].append(node)
        elif isinstance(operation, ResetArrivals):
            for event in operation.events:
                self.reset[self._now[0], event].append(node)
        elif isinstance(operation, WaitEvent):
            if has_effect and operation.event in self._events:
                self.after[self._events[operation.event]].append(node)
        elif isinstance(operation, SetSignal):
            self.sets[operation.signal].append(node)
        elif isinstance(operation, WaitAndReset):
            self.signal_waits[operation.signal].append((node, has_effect))
        elif isinstance(operation, Publish):
            for rows in filter(None, (operation.target, operation.gathered)):
                self._access(node, rows, True)
        elif isinstance(operation, Copy):
            self._access(node, operation.source, False)
            self._access(node, operation.target, True)
        elif isinstance(operation, (AddToSum, RoundGradients)):
            for rows in operation.slices:
                self._access(node, rows, False)
                if isinstance(operation, AddToSum):
                    self._access(node, rows._replace(buffer=Buffer.DKV_SUM), True)
        elif isinstance(operation, AttendHop):
            if operation.kv is not None:
                self._access(node, operation.kv, False)
            if operation.dkv is not None:
                self._access(node, operation.dkv, True)
        elif isinstance(operation, AttendGathered):
            self._access(node, operation.own, False)
            reads = []
            for i, block in enumerate(operation.blocks):  # in any order
                reads.append(self._node(f"{name} block {i}", (node, i)))
                self.after[node].append(reads[-1])
                if without != inside(direction, block.arrived):
                    self.after[self._events[block.arrived]].append(reads[-1])
                    self.awaited_inside.append((self._events[block.arrived], node))
                self._access(reads[-1], block.rows, False)
            end = self._node(f"{name} end", stream)
            for read in reads:
                self.after[read].append(end)
            self.waiting.append((node, end))

    def problems(self) -> list[str]:
        found = []
        for signal in {**self.sets, **self.signal_waits}:
            sets, waits = self.sets[signal], self.signal_waits[signal]
            if len(sets) != len(waits):
                found.append(f"{signal} is set {len(sets)} times and reset {len(waits)} times")
            for setter, (wait, has_effect) in zip(sets, waits, strict=False):
                if has_effect:
                    self.after[setter].append(wait)
        before = self._before()
        if before is None:
            return [*found, "deadlock"]
        for signal, waits in self.signal_waits.items():
            for (wait, has_effect), setter in zip(waits, self.sets[signal][1:], strict=False):
                if has_effect and not before[setter] >> wait & 1:
                    found.append(f"{signal} may be set again before: {self.names[wait]}")
        for event, arrived in self.arrived.items():
            if len(arrived) != len(self.reset[event]):
                found.append(f"{event} arrives {len(arrived)} times, and is not reset as often")
            for setter, reset in zip(arrived[1:], self.reset[event], strict=False):
                if not before[setter] >> reset & 1:
                    found.append(f"{event} may arrive before: {self.names[reset]}")
        for a, b in self._conflicts():
            if not (before[b] >> a & 1 or before[a] >> b & 1):
                found.append(f"at once: {self.names[a]} and {self.names[b]}")
        for begin, end in self.waiting:
            own_rank = self.operations[begin][0]
            for node in _bits(before[end] & ~before[begin] & ~(1 << begin)):
                rank, operation = self.operations[node]
                copies = rank == own_rank and isinstance(operation, (Copy, RecordEvent))
                if not copies and self.operations[begin] != (rank, operation):
                    found.append(f"{self.names[begin]} occupies the SMs before {self.names[node]}")
        return found

    def _conflicts(self) -> Iterator[tuple[int, int]]:
        """Pairs of nodes that access common bytes, of which one writes."""
        for accesses in self.accesses.values():
            slots: dict[tuple[Buffer, int], list[tuple[int, BufferSlice, bool]]] = defaultdict(list)
            for access in accesses:
                slots[access[1].buffer, access[1].slot].append(access)
            pairs = [itertools.combinations(slot, 2) for slot in slots.values()]
            gathered = slots.pop((Buffer.KV_GATHERED, 0), [])
            pairs += [itertools.product(gathered, slot) for slot in slots.values()]
            for (a, mine, writes), (b, other, writes_too) in itertools.chain(*pairs):
                if (writes or writes_too) and _overlap(mine, other):
                    yield a, b

    def stuck(self) -> list[str]:
        before = self._before()
        assert before is not None
        found = [
            f"{self.names[kernel]} may start before: {self.names[record]}"
            for record, kernel in self.awaited_inside
            if not before[kernel] >> record & 1
        ]
        pairs = [
            (wait, setter)
            for signal, waits in self.signal_waits.items()
            for (wait, _), setter in zip(waits, self.sets[signal], strict=True)
        ]
        self.after = [[] for _ in self.after]  # now: wait -> waits that may wait for it
        for node, setter in pairs:
            for other, _ in pairs:
                here = self.operations[other][0] == self.operations[setter][0]
                if here and not before[other] >> setter & 1:
                    self.after[other].append(node)
        return found + ["deadlock"] * (self._before() is None)

    def _before(self) -> list[int] | None:
        """For each node, as bits, the nodes that end before it starts; None if there is a cycle."""
        missing = [0] * len(self.after)
        for node in itertools.chain(*self.after):
            missing[node] += 1
        ready = [node for node, count in enumerate(missing) if not count]
        before = [0] * len(self.after)
        done = 0
        while ready:
            node = ready.pop()
            done += 1
            for later in self.after[node]:
                before[later] |= before[node] | 1 << node
                missing[later] -= 1
                if not missing[later]:
                    ready.append(later)
        return before if done == len(self.after) else None


def _bits(numbers: int) -> Iterator[int]:
    """The numbers of the bits that are 1."""
    while numbers:
        lowest = numbers & -numbers
        yield lowest.bit_length() - 1
        numbers ^= lowest


def _overlap(a: BufferSlice, b: BufferSlice) -> bool:
    """Whether slices of one memory may have bytes in common; KV_GATHERED covers all of OVERLAID."""
    if a.buffer is not b.buffer:
        return Buffer.KV_GATHERED in (a.buffer, b.buffer) and a.begin < a.end and b.begin < b.end
    return a.slot == b.slot and max(a.begin, b.begin) < min(a.end, b.end)
