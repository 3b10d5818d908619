"""The `symmetric` transport: copy engines pull from peers' memory, driver words order the streams.

All decisions are in `schedule.py`; here its operations become CUDA's. A group may use it if all
its ranks say so: trial calls in each direction, on whole numbers that all know, must be exact.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Protocol

import torch

from ringfa3 import driver
from ringfa3.arena import Arena
from ringfa3.context import plan_context
from ringfa3.course import Course
from ringfa3.schedule import (
    Attend,
    Await,
    Buffer,
    Copy,
    Event,
    Operation,
    Place,
    Record,
    Set,
    Stream,
    Take,
)
from ringfa3.transports import first_line
from ringfa3.watch import Watch, raise_in_main_thread
from ringfa3.words import Words

# The schedule is proven and run on the CPU; what is in this file, in arena.py and driver.py has
# not run on GPUs yet. Until tests/test_gpu_symmetric.py has passed there, "auto" takes NCCL.
RAN_ON_HARDWARE = False

TRIAL_TOKENS = 2048  # of a rank, 128 numbers each
TRIAL_S = 30.0  # at most half the group's timeout: a rank that fails waits for the others


class Group(Protocol):
    """What the transport needs of `RingGroup`."""

    ranks: list[int]
    rank: int
    world: int
    failure: str | None  # why the group is lost

    @property
    def name(self) -> str: ...

    @property
    def timeout_s(self) -> float: ...

    def gather(self, line: str) -> list[str]:
        """A line of every rank, on every rank."""

    def alarm(self) -> str | None:
        """What another rank said that gave up."""

    def fail(self, message: str) -> Exception:
        """Marks the group lost, tells the other ranks and returns the error."""


class CudaMachine:
    """`ringfa3.course.Machine` on one GPU."""

    def __init__(
        self, group: Group, device: torch.device, timeout_s: float, lost: Callable[[str], None]
    ) -> None:
        """lost(message) is called if a peer does not answer within `timeout_s`."""
        self.group, self.device = group, device
        self.calls = 0
        self.arena = Arena(group.name, group.rank, device, group.gather)
        self.words = Words(group.rank, group.world, group.gather)
        self._side = {Stream.KV: _stream(device), Stream.PARTIAL: _stream(device)}
        self._taken = dict.fromkeys(Stream, 0)  # words, by each stream
        self._streams: dict[Stream, torch.cuda.Stream] = {}
        self._events: dict[Event, torch.cuda.Event] = {}
        self._row_bytes: Mapping[Buffer, int] = {}
        self._perform: dict[type, Callable[..., None]] = {
            Record: self._record,
            Await: self._await,
            Set: self._set,
            Take: self._take,
            Copy: self._copy,
        }
        self._watch = Watch(timeout_s, group.alarm, lost, self.words.set_all)

    def begin(self, row_bytes: Mapping[Buffer, int], rows: Mapping[Buffer, int]) -> int:
        self._row_bytes = row_bytes
        self.arena.reserve({buffer: count * row_bytes[buffer] for buffer, count in rows.items()})
        compute = torch.cuda.current_stream(self.device)
        before = self._streams.get(Stream.COMPUTE, compute)
        if compute != before:
            compute.wait_stream(before)  # the schedule knows one compute stream
        self._streams = {Stream.COMPUTE: compute, **self._side}
        self.calls += 1
        return (self.calls - 1) % 2

    def local(self, buffer: Buffer, slot: int) -> torch.Tensor:
        return self.arena.local(buffer, slot)

    def compute(self, operation: Operation, work: Callable[[], None]) -> None:
        """A kernel that could wait for its partial itself would get the event's word instead."""
        if isinstance(operation, Attend) and operation.arrived is not None:
            self._streams[Stream.COMPUTE].wait_event(self._events[operation.arrived])
        work()

    def issue(self, operation: Operation) -> None:
        self._perform[type(operation)](self._streams[operation.stream], operation)

    def _record(self, stream: torch.cuda.Stream, record: Record) -> None:
        event = self._events.get(record.event)
        if event is None:
            event = self._events[record.event] = _event()
        event.record(stream)

    def _await(self, stream: torch.cuda.Stream, wait: Await) -> None:
        event = self._events.get(wait.event)
        if event is not None:
            stream.wait_event(event)

    def _set(self, stream: torch.cuda.Stream, order: Set) -> None:
        driver.write(stream.cuda_stream, self.words.address(order.word), 1)

    def _take(self, stream: torch.cuda.Stream, take: Take) -> None:
        word = self.words.address(take.word)
        self._taken[take.stream] += 1
        count = self._taken[take.stream] % (1 << 32)
        driver.wait(stream.cuda_stream, word, 1)
        driver.write(stream.cuda_stream, word, 0)
        driver.write(stream.cuda_stream, self.words.counter(take.stream), count)
        passed = partial(self.words.reached, take.stream, count)
        peer = self.group.ranks[take.word.sender]
        self._watch.post(take.stream, passed, f"{take.what} rank {peer}")

    def _copy(self, stream: torch.cuda.Stream, copy: Copy) -> None:
        size = (copy.source.end - copy.source.begin) * self._row_bytes[copy.source.buffer]
        target, source = self._address(copy.target), self._address(copy.source)
        driver.copy(stream.cuda_stream, target, source, size)

    def serve(self) -> None:
        """The trial is over: from now on a peer that does not answer loses the group."""
        self._watch.timeout_s, self._watch.lost = self.group.timeout_s, self._lose

    def abandon(self) -> None:
        """The calls under way will never be answered: their streams go on, nobody is told."""
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
        driver.load()
        import torch.distributed._symmetric_memory  # noqa: F401
    except (driver.DriverError, ImportError) as problem:
        return str(problem)
    return None


def _trial(machine: CudaMachine) -> str:
    """What is wrong with a forward and a backward of each parity; nothing if they are right.

    In place of attention, rank r adds (r + 1) times the K/V that it sees to their dK/dV. The ranks
    meet only in the first call, which needs all the memory: one that fails later leaves no other
    waiting but for words.
    """
    rank, world, device = machine.group.rank, machine.group.world, machine.device
    plan = plan_context(world * TRIAL_TOKENS, (rank, world), "contiguous", causal=False)
    generator = torch.Generator().manual_seed(0)  # the same numbers on all ranks
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    shape = (world, TRIAL_TOKENS, 2, 1, 128)
    for direction in ("backward", "forward", "forward", "backward"):
        everyone = torch.randint(-9, 10, shape, generator=generator).to(device, torch.bfloat16)
        mine = everyone[rank]

        def attend(
            hop: int,
            k: torch.Tensor,
            v: torch.Tensor,
            *partial: torch.Tensor,
            everyone: torch.Tensor = everyone,
        ) -> None:
            wrong.add_((torch.stack((k, v), 1) != everyone[(rank - hop) % world]).sum())
            for x, y in zip(partial, (k, v), strict=False):
                x.copy_(y.float() * (rank + 1) + (0 if plan.hops.stores[hop] else x))

        course = Course(machine, plan, direction, *mine.unbind(1))
        course.run(attend)
        if direction == "backward":
            wrong.add_((course.home != mine.float() * (world * (world + 1) // 2)).sum())
    done = _event()
    done.record(torch.cuda.current_stream(device))
    while not done.query():  # type: ignore[no-untyped-call]
        time.sleep(0.01)
    return f"a trial read {int(wrong)} wrong numbers" if int(wrong) else ""
