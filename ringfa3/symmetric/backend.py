"""The `symmetric` transport: copy engines pull from peers' memory, driver words order the streams.

All decisions are in `schedule.py`; here its operations become CUDA's. A group may use it if all
its ranks say so: trial calls in each direction, on whole numbers that all know, must be exact.
"""

from __future__ import annotations

import itertools
import os
import socket
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from ringfa3.errors import first_line
from ringfa3.planning.context_plan import plan_context
from ringfa3.symmetric import cuda_driver
from ringfa3.symmetric.cuda_graphs import enclosed
from ringfa3.symmetric.graph_replays import Replays
from ringfa3.symmetric.ipc_memory import Arena
from ringfa3.symmetric.ring_pass import Cargo, Course, Routes
from ringfa3.symmetric.signals import Gather, Words
from ringfa3.symmetric.stream_ops import (
    AttendAll,
    Await,
    Buffer,
    Clear,
    Copy,
    Event,
    Operation,
    Place,
    Record,
    Set,
    Stream,
    Take,
)
from ringfa3.symmetric.watchdog import Watch, raise_in_main_thread

TRIAL_TOKENS = 2048  # of a rank, 128 numbers each
TRIAL_S = 30.0  # at most half the group's timeout: a rank that fails waits for the others
MASK = (1 << 32) - 1  # of a stream's counter


class Group(Protocol):
    """What the transport needs of `RingGroup`."""

    ranks: list[int]
    rank: int
    world: int
    failure: str | None  # why the group is lost

    @property
    def timeout_s(self) -> float: ...

    def gather(self, line: str) -> list[str]:
        """A line of every rank, on every rank."""

    def alarm(self) -> str | None:
        """What another rank said that gave up."""

    def fail(self, message: str) -> Exception:
        """Marks the group lost, tells the other ranks and returns the error."""


class Script(NamedTuple):
    """Operations as calls of the driver.

    takes  for each stream the words that the calls take, in order: in words, and the operations
           that count them
    """

    calls: list[cuda_driver.Call]
    takes: list[tuple[Stream, list[str], list[cuda_driver.WordOperation]]]


class _Words(NamedTuple):
    """What a stream does with words in one call.

    counts, said  where it counts a word that was taken, and which that was
    """

    operations: list[cuda_driver.WordOperation]
    counts: list[int]
    said: list[str]


class CudaMachine:
    """`ringfa3.symmetric.ring_pass.Machine` on one GPU."""

    def __init__(
        self,
        group: Group,
        device: torch.device,
        timeout_s: float,
        lost: Callable[[str], None],
        words: Callable[[int, int, Gather], Words] = Words,
    ) -> None:
        """lost(message) is called if a peer does not answer within `timeout_s`."""
        self.group, self.device = group, device
        self.calls = 0
        self.routes: Routes = weakref.WeakKeyDictionary()
        self._routes: dict[torch.cuda.Stream, Routes] = {}  # by compute stream
        self._compute: torch.cuda.Stream | None = None  # of the last call that was not captured
        self.captured = False  # the call that has begun
        self._enclosing = False  # calls are enclosed: some have been captured
        self._graphs: list[Routes] = []  # of captured calls: graphs have their addresses
        self.arena = Arena(group.rank, group.world, device, group.gather)
        self.words = words(group.rank, group.world, group.gather)
        torch.cuda.synchronize(device)  # makes its context the current one
        self._enter = [cuda_driver.enter(cuda_driver.context())]
        side = (Stream.KV, Stream.GRADIENTS)
        self._streams: dict[Stream, torch.cuda.Stream] = {s: _stream(device) for s in side}
        self._taken = dict.fromkeys(Stream, 0)  # words, by each stream
        self._events: dict[Event, int] = {}
        # By hop, for kernels: set when K/V have landed, reset behind the kernel that has awaited
        # it, and set again by a stream that has joined behind that.
        self.landed = torch.zeros(group.world, dtype=torch.int32, device=device)
        self._row_bytes: Mapping[Buffer, int] = {}
        self._watch = Watch(timeout_s, self.words.reached, group.alarm, lost, self.words.set_all)
        self._replays = Replays(self.words)

    def begin(self, row_bytes: Mapping[Buffer, int], rows: Mapping[Buffer, int]) -> int:
        """A captured call has the same parity in all replays."""
        cuda_driver.issue(self._enter)
        self._row_bytes = row_bytes
        self.captured = torch.cuda.is_current_stream_capturing()
        needed = {b: count * row_bytes[b] for b, count in rows.items()}
        if not self.arena.holds(needed):
            self._routes.clear()
            self.routes = {}  # no view of the memory may be left
            self.arena.reserve(needed)
        compute = torch.cuda.current_stream(self.device)
        if self.captured:
            if not self._enclosing:
                self._enclose()
            self.arena.keep()
            self.routes = {}
            self._graphs.append(self.routes)
        else:
            if self._compute not in (None, compute):
                compute.wait_stream(self._compute)  # the schedule knows one compute stream
            self._compute = compute
            self.routes = self._routes.setdefault(compute, weakref.WeakKeyDictionary())
        self._streams[Stream.COMPUTE] = compute
        self.calls += 1
        return (self.calls - 1) % 2

    def _enclose(self) -> None:
        """Before the first captured call: a replay must find those before it over.

        Later ones are, by events; of those so far the host sees that they have taken their words.
        """
        while self.group.failure is None and not all(
            self.words.reached(stream, count) for stream, count in self._taken.items()
        ):
            time.sleep(0.001)
        self._enclosing = True
        self._routes.clear()
        self._watch.look_at(self._replays.look)

    def arranged(self, operations: list[Operation]) -> list[Operation]:
        return enclosed(operations, self.captured) if self._enclosing else operations

    def local(self, buffer: Buffer, slot: int) -> torch.Tensor:
        return self.arena.local(buffer, slot)

    def compute(self, operation: Operation, work: Callable[[], None]) -> None:
        work()

    def _landed_at(self, event: Event) -> int:
        return self.landed.data_ptr() + event.number * self.landed.element_size()

    def prepared(self, operations: Sequence[Operation], inside: frozenset[Event]) -> Script:
        """Neighbours that write and await words of one stream become one call."""
        script = Script([], [])
        for stream, run in itertools.groupby(operations, lambda x: x.stream):
            words = _Words([], [], [])
            for operation in run:
                self._add_words(words, operation, inside)
                call = self._call(operation, inside)
                if call is not None:
                    self._put(script, stream, words)
                    words = _Words([], [], [])
                    script.calls.append(call)
            self._put(script, stream, words)
        return script

    def _add_words(self, words: _Words, operation: Operation, inside: frozenset[Event]) -> None:
        """A taken word is reset, and the stream's counter says that it was taken."""
        if isinstance(operation, Set):
            words.operations.append(cuda_driver.write(self.words.address(operation.word), 1))
        elif isinstance(operation, Take):
            stream, word = operation.stream, self.words.address(operation.word)
            take = cuda_driver.wait(word, 1), cuda_driver.write(word, 0)
            said = f"{operation.what} rank {self.group.ranks[operation.word.sender]}"
            if self.captured:
                words.operations.extend((self._replays.awaiting(stream, said), *take))
            else:
                words.operations.extend((*take, cuda_driver.write(self.words.counter(stream), 0)))
                words.counts.append(len(words.operations) - 1)
            words.said.append(said)
        elif isinstance(operation, Clear):
            set_words = (self._landed_at(e) for e in operation.events if e in inside)
            words.operations.extend(cuda_driver.write(address, 0) for address in set_words)
        elif isinstance(operation, Record) and operation.event in inside:
            words.operations.append(cuda_driver.write(self._landed_at(operation.event), 1))

    def _call(self, operation: Operation, inside: frozenset[Event]) -> cuda_driver.Call | None:
        handle = self._streams[operation.stream].cuda_stream
        if isinstance(operation, Record) and operation.event not in inside:
            return cuda_driver.record(handle, self._event(operation.event))
        if isinstance(operation, Await):
            return cuda_driver.await_event(handle, self._event(operation.event))
        if isinstance(operation, AttendAll) and operation.blocks[-1].landed not in inside:
            last = operation.blocks[-1].landed  # one stream has brought them all
            return cuda_driver.await_event(handle, self._event(last))
        if isinstance(operation, Copy):
            source, target = operation.source, operation.target
            size = (source.end - source.begin) * self._row_bytes[source.buffer]
            return cuda_driver.copy(handle, self._address(target), self._address(source), size)
        return None

    def _put(self, script: Script, stream: Stream, words: _Words) -> None:
        if words.operations:
            if self.captured and words.said:
                words.operations.extend(self._replays.over(stream))
            call, read = cuda_driver.batch(self._streams[stream].cuda_stream, words.operations)
            script.calls.append(call)
            if words.counts:
                script.takes.append((stream, words.said, [read[i] for i in words.counts]))

    def issue(self, script: Script) -> None:
        for stream, said, counts in script.takes:
            taken = self._taken[stream]
            for i, count in enumerate(counts, taken + 1):
                count.value = i & MASK
            self._taken[stream] = taken + len(counts)
            self._watch.post(stream, said)
        cuda_driver.issue(script.calls)

    def _event(self, event: Event) -> int:
        if event not in self._events:
            self._events[event] = cuda_driver.new_event()
        return self._events[event]

    def serve(self) -> None:
        """The trial is over: from now on a peer that does not answer loses the group."""
        self._watch.timeout_s, self._watch.lost = self.group.timeout_s, self._lose

    def close(self) -> None:
        """Ends the watch. The memory stays: no rank knows when its peers have unmapped it."""
        self.arena.keep()
        self._watch.end()

    def abandon(self) -> None:
        """The calls under way will never be answered: their streams go on, nobody is told."""
        self.arena.keep()
        self._watch.give_up()

    def _address(self, place: Place) -> int:
        begin = place.begin * self._row_bytes[place.buffer]
        return self.arena.address(place.rank, place.buffer, place.slot) + begin

    def _lose(self, message: str) -> None:
        error = self.group.fail(message)
        raise_in_main_thread(error)  # first: what the streams compute from now on is void


def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]


def _event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


def open_machine(group: Group, device: torch.device) -> CudaMachine | str:
    """The machine of a group on one host, or why it cannot have one; the same on all ranks."""
    notes = [n.split("\t") for n in group.gather("\t".join(_introduction(device)))]
    for rank, (_, _, reason) in zip(group.ranks, notes, strict=True):
        if reason:
            return f"rank {rank}: {reason}"
    hosts, gpus = ({note[i] for note in notes} for i in range(2))
    if len(hosts) > 1:
        return f"the group's ranks are on {len(hosts)} hosts"
    if len(gpus) < group.world:
        return f"{group.world} ranks share {len(gpus)} GPUs"
    machine, reason = None, ""
    late: list[str] = []
    try:
        with torch.cuda.device(device):
            limit = min(TRIAL_S, group.timeout_s / 2)
            machine = CudaMachine(group, device, limit, late.append)
            reason = _trial(machine)
        if late:
            reason = f"a trial did not end: {late[0]}"
    except RuntimeError as problem:
        if group.failure is not None:
            raise
        reason = first_line(problem)
    reasons = zip(group.ranks, group.gather(reason), strict=True)
    if against := [f"rank {rank}: {said}" for rank, said in reasons if said]:
        if machine is not None:
            machine.abandon()  # what a call that broke off waits for will never come
        return "; ".join(against)
    assert machine is not None
    machine.serve()
    return machine


def _introduction(device: torch.device) -> tuple[str, str, str]:
    """(host, GPU, what speaks against it or nothing) of this rank."""
    host = socket.gethostname()
    boot = Path("/proc/sys/kernel/random/boot_id")  # containers of one host have their own names
    if boot.exists():
        host = boot.read_text().strip()
    return host, str(torch.cuda.get_device_properties(device).uuid), hindrance() or ""


def hindrance() -> str | None:
    """What in this process speaks against the transport."""
    if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        return (
            "CUDA_DEVICE_MAX_CONNECTIONS=1 puts transfers and kernels into one queue, where they "
            "run one after the other: unset it"
        )
    try:
        cuda_driver.load()
    except cuda_driver.DriverError as problem:
        return str(problem)
    return None


def _trial(machine: CudaMachine) -> str:
    """What is wrong with calls of each kind and parity; nothing if they are right.

    In place of attention, rank r finds (r + 1) times the K/V that it sees as their dK/dV. The ranks
    meet only for the memory of all calls: one that fails later leaves no other waiting but for
    words.
    """
    rank, world, device = machine.group.rank, machine.group.world, machine.device
    plan = plan_context(world * TRIAL_TOKENS, (rank, world), "contiguous", causal=False)
    compute = torch.cuda.current_stream(device)
    generator = torch.Generator().manual_seed(0)  # the same numbers on all ranks
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    shape = (world, TRIAL_TOKENS, 2, 1, 128)
    kinds = ("backward", "forward", "forward", "backward", "gathered", "gathered")
    keys = torch.empty(shape[1], *shape[3:], dtype=torch.bfloat16, device="meta")
    cargoes = [Cargo(plan, direction, keys) for direction in kinds]
    machine.arena.reserve({b: n * c.row_bytes[b] for c in cargoes for b, n in c.rows.items()})
    for direction in kinds:
        everyone = torch.randint(-9, 10, shape, generator=generator).to(device, torch.bfloat16)
        mine = everyone[rank]

        def attend(
            hop: int,
            k: torch.Tensor,
            v: torch.Tensor,
            *more: torch.Tensor,
            everyone: torch.Tensor = everyone,
        ) -> None:
            owners, found = [(rank - hop) % world], more
            if len(more) == 1:  # the words of all blocks
                owners, found = [(rank - t) % world for t in range(world)], ()
                waits = [
                    cuda_driver.wait(more[0][t : t + 1].data_ptr(), 1) for t in range(1, world)
                ]
                cuda_driver.issue([cuda_driver.batch(compute.cuda_stream, waits)[0]])
            wrong.add_((torch.stack((k, v), 1) != everyone[owners].flatten(0, 1)).sum())
            for x, y in zip(found, (k, v), strict=False):
                x.copy_(y.float() * (rank + 1))

        k, v = mine.unbind(1)
        course = Course(machine, plan, direction, k, v, waits=True)
        course.run(attend)
        if direction == "backward":
            wrong.add_((course.home != mine.float() * (world * (world + 1) // 2)).sum())
    done = _event()
    done.record(compute)
    while not done.query():  # type: ignore[no-untyped-call]
        time.sleep(0.01)
    return f"a trial read {int(wrong)} wrong numbers" if int(wrong) else ""
