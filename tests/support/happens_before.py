"""What a schedule orders in time, whatever its streams' speeds: proves it, or names the hazard.

Operations of many calls on all ranks are nodes; an edge leads from what is over to what begins
after it. Two accesses to the same rows that no path connects may meet in some run. Every event
and word has one stream that gives and one that awaits it, so nothing here depends on a choice: if
there is no cycle, no run deadlocks. A kernel that waits inside also keeps all others off the SMs,
on this rank and, through collectives of the job, on others: from its beginning on, nothing but
copies may lie before its end.

In a graph a rank's device may run operations one by one in any order that events allow. A rank
that is stuck is to take a word, and what sets it lies behind the word that another stuck rank is to
take: so that one does not come behind this setter by events. If such pairs of takes have no cycle,
no order deadlocks.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Hashable, Sequence

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
    Prepare,
    Publish,
    Record,
    Set,
    Stream,
    Take,
    Word,
)

Calls = Sequence[tuple[str, Sequence[Sequence[Operation]]]]  # direction, operations by rank
Label = tuple[Hashable, ...]
SHARED = (Buffer.IN, Buffer.SUM, Buffer.COME, Buffer.ALL)  # one memory, the last over the others
SETTLED = "settled"  # in place of a direction: hosts wait here for all words taken so far


def label(direction: str, wait: Await | Take, world: int) -> Label:
    """Names a wait in the way that is the same on all ranks and in all calls of a direction."""
    if isinstance(wait, Take):
        distance = (wait.word.sender - wait.word.receiver) % world
        return wait.what, wait.word.purpose.name, distance
    number = -1 if wait.event.name == "freed" else wait.event.number
    return direction, wait.stream.name, wait.event.name, number


def inside(direction: str, event: Event) -> Label:
    """Names the wait of a kernel over all blocks for one of them."""
    return direction, "kernel", event


def waits(calls: Calls) -> list[Label]:
    """Labels of all waits, each once."""
    found: dict[Label, None] = {}
    for direction, ranks in calls:
        for operation in itertools.chain(*ranks):
            if isinstance(operation, (Await, Take)):
                found[label(direction, operation, len(ranks))] = None
            elif isinstance(operation, AttendAll):
                for block in operation.blocks:
                    found[inside(direction, block.landed)] = None
    return list(found)


def problems(calls: Calls, without: Label | None = None, one_queue: bool = False) -> list[str]:
    """Deadlocks, words set twice, rows that two operations may touch at once, and kernels that
    hold the SMs while they wait for more than copies; none if proven.

    without: a wait that is taken out. one_queue: the streams of a rank run as one, in the order
    in which the host issues.
    """
    return _Order(calls, without, one_queue).problems()


def stuck(direction: str, ranks: Sequence[Sequence[Operation]]) -> list[str]:
    """Deadlocks of a call whose operations each rank runs one by one, in any order that its events
    allow; none if proven. Enclosed calls are proven one by one: of ranks that are stuck, those in
    the earliest call wait for words of that call, which ranks in later ones have set."""
    return _Order([(direction, ranks)], None, False).stuck()


class _Order:
    def __init__(self, calls: Calls, without: Label | None, one_queue: bool) -> None:
        self.after: list[list[int]] = []  # node -> nodes that begin after it
        self.names: list[str] = []
        self.operations: list[tuple[int, Operation]] = []  # with their ranks
        self.waiting: list[tuple[int, int]] = []  # beginning and end of kernels that wait inside
        self.awaited_inside: list[tuple[int, int]] = []  # record, and the kernel's beginning
        self.raised: dict[tuple[int, Event], list[int]] = defaultdict(list)
        self.cleared: dict[tuple[int, Event], list[int]] = defaultdict(list)
        self.touched: dict[tuple[object, ...], list[tuple[int, Place, bool]]] = defaultdict(list)
        self.sets: dict[Word, list[int]] = defaultdict(list)
        self.takes: dict[Word, list[tuple[int, bool]]] = defaultdict(list)
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
        self._now = rank, Prepare()
        taken = [
            t for t, x in enumerate(self.operations) if x[0] == rank and isinstance(x[1], Take)
        ]
        for stream in Stream:
            node = self._node(f"rank {rank} has settled", stream)
            for take in taken:
                self.after[take].append(node)

    def _touch(self, node: int, place: Place, writes: bool) -> None:
        memory = SHARED if place.buffer in SHARED else place[1:3]
        self.touched[place.rank, memory].append((node, place, writes))

    def _add(self, operation: Operation, name: str, stream: object, direction: str,
             without: Label | None, world: int) -> None:  # fmt: skip
        node = self._node(name, stream)
        kept = not isinstance(operation, (Await, Take)) or without != label(
            direction, operation, world
        )
        if isinstance(operation, Record):
            self._events[operation.event] = node
            if operation.event.name == "landed":
                self.raised[self._now[0], operation.event].append(node)
        elif isinstance(operation, Clear):
            for event in operation.events:
                self.cleared[self._now[0], event].append(node)
        elif isinstance(operation, Await):
            if kept and operation.event in self._events:
                self.after[self._events[operation.event]].append(node)
        elif isinstance(operation, Set):
            self.sets[operation.word].append(node)
        elif isinstance(operation, Take):
            self.takes[operation.word].append((node, kept))
        elif isinstance(operation, (Publish, Keep)):
            self._touch(node, operation.place, True)
        elif isinstance(operation, Copy):
            self._touch(node, operation.source, False)
            self._touch(node, operation.target, True)
        elif isinstance(operation, (Add, Collect)):
            for place in operation.places:
                self._touch(node, place, False)
                if isinstance(operation, Add):
                    self._touch(node, place._replace(buffer=Buffer.SUM), True)
        elif isinstance(operation, Attend):
            if operation.kv is not None:
                self._touch(node, operation.kv, False)
            if operation.found is not None:
                self._touch(node, operation.found, True)
        elif isinstance(operation, AttendAll):
            self._touch(node, operation.own, False)
            reads = []
            for i, block in enumerate(operation.blocks):  # in any order
                reads.append(self._node(f"{name} block {i}", (node, i)))
                self.after[node].append(reads[-1])
                if without != inside(direction, block.landed):
                    self.after[self._events[block.landed]].append(reads[-1])
                    self.awaited_inside.append((self._events[block.landed], node))
                self._touch(reads[-1], block.place, False)
            end = self._node(f"{name} end", stream)
            for read in reads:
                self.after[read].append(end)
            self.waiting.append((node, end))

    def problems(self) -> list[str]:
        found = []
        for word in {**self.sets, **self.takes}:
            sets, takes = self.sets[word], self.takes[word]
            if len(sets) != len(takes):
                found.append(f"{word} is set {len(sets)} times and taken {len(takes)} times")
            for given, (taken, kept) in zip(sets, takes, strict=False):
                if kept:
                    self.after[given].append(taken)
        before = self._before()
        if before is None:
            return [*found, "deadlock"]
        for word, takes in self.takes.items():
            for (taken, kept), given in zip(takes, self.sets[word][1:], strict=False):
                if kept and not before[given] >> taken & 1:
                    found.append(f"{word} may be set again before: {self.names[taken]}")
        for word, raised in self.raised.items():
            if len(raised) != len(self.cleared[word]):
                found.append(f"{word} is raised {len(raised)} times, and not cleared as often")
            for given, cleared in zip(raised[1:], self.cleared[word], strict=False):
                if not before[given] >> cleared & 1:
                    found.append(f"{word} may be raised before: {self.names[cleared]}")
        for accesses in self.touched.values():
            for (a, mine, writes), (b, other, overwrites) in itertools.combinations(accesses, 2):
                if not (writes or overwrites) or not _meet(mine, other):
                    continue
                if not (before[a] >> b & 1 or before[b] >> a & 1):
                    found.append(f"at once: {self.names[a]} and {self.names[b]}")
        for begin, end in self.waiting:
            awaited = before[end] & ~before[begin] & ~(1 << begin)
            for node, (rank, operation) in enumerate(self.operations):
                own = self.operations[begin] == (rank, operation) or (
                    rank == self.operations[begin][0] and isinstance(operation, (Copy, Record))
                )
                if awaited >> node & 1 and not own:
                    found.append(f"{self.names[begin]} holds the SMs before {self.names[node]}")
        return found

    def stuck(self) -> list[str]:
        before = self._before()
        assert before is not None
        found = [
            f"{self.names[kernel]} may lie before: {self.names[given]}"
            for given, kernel in self.awaited_inside
            if not before[kernel] >> given & 1
        ]
        pairs = [
            (taken, given)
            for word, takes in self.takes.items()
            for (taken, _), given in zip(takes, self.sets[word], strict=True)
        ]
        self.after = [[] for _ in self.after]  # from now on, from what a word may have to wait for
        for node, given in pairs:
            for other, _ in pairs:
                here = self.operations[other][0] == self.operations[given][0]
                if here and not before[other] >> given & 1:
                    self.after[other].append(node)
        return found + ["deadlock"] * (self._before() is None)

    def _before(self) -> list[int] | None:
        """For each node the set, as bits, of all that is over when it begins; None with a cycle."""
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


def _meet(a: Place, b: Place) -> bool:
    """Whether places of one memory have bytes in common; rows of ALL lie anywhere in it."""
    if a.buffer is not b.buffer:
        return Buffer.ALL in (a.buffer, b.buffer) and a.begin < a.end and b.begin < b.end
    return a.slot == b.slot and max(a.begin, b.begin) < min(a.end, b.end)
