"""Stand-ins for the parts of CUDA that the `symmetric` transport uses; ranks are threads.

All memory is host memory. A rank's compute stream is its thread. Side streams are lists of actions
on real addresses; a thread that waits runs the actions of all ranks, one at a time, at random.
"""

from __future__ import annotations

import ctypes
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from ringfa3.symmetric import cuda_driver
from ringfa3.symmetric.backend import SymmetricBackend
from ringfa3.symmetric.ipc_memory import IpcAllocation
from ringfa3.symmetric.watchdog import Watchdog
from tests.support.fake_graphs import FakeGraph, FakeRun
from tests.support.fake_group import FakeGroup

LIMIT_S = 20.0  # for a wait on the compute stream
Call = tuple[Callable[..., None], tuple[object, ...]]
Action = tuple[Callable[[], bool], Callable[[], None]]  # whether it can run, and what it does


class FakeCuda:
    """The streams, events and memory of all ranks."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.lock = threading.RLock()
        self.streams: list[FakeStream] = []
        self.runs: list[FakeRun] = []
        self.events: list[FakeEvent] = []
        self.memory: dict[int, ctypes.Array[ctypes.c_ubyte]] = {}  # by address
        self.attached: list[int] = []  # addresses that peers have mapped
        self.torn: list[int] = []  # addresses that were freed while a peer had them mapped

    def stream(self, _device: object = None, compute: bool = False) -> FakeStream:
        with self.lock:
            host = threading.get_ident()
            self.streams.append(FakeStream(self, len(self.streams), host, compute))
            return self.streams[-1]

    def drain(self, host: int) -> None:
        """Runs streams until the side streams that a thread has made are empty."""
        self.until(lambda: not self.busy(host))

    def busy(self, host: int) -> bool:
        """Whether a side stream that a thread has made is not empty."""
        return any(s.actions for s in self.streams if s.host == host)

    def event(self) -> FakeEvent:
        return FakeEvent(self)

    def until(self, done: Callable[[], bool]) -> None:
        """Runs streams until done()."""
        deadline = time.monotonic() + LIMIT_S
        while not done():
            if not self.step():
                time.sleep(0.001)  # another rank's thread must go on
            assert time.monotonic() < deadline, "the device hangs"

    def step(self) -> bool:
        with self.lock:
            able = [act for s in (*self.streams, *self.runs) for act in s.able()]
            if not able:
                return False
            self.rng.choice(able)()
            return True

    # What issued calls do

    def wait_word(self, stream: int, address: int, value: int) -> None:
        word = ctypes.c_uint32.from_address(address)
        self.streams[stream].put(lambda: word.value == value, lambda: None)

    def write_word(self, stream: int, address: int, value: int) -> None:
        word = ctypes.c_uint32.from_address(address)
        self.streams[stream].put(lambda: True, lambda: setattr(word, "value", value))

    def move(self, stream: int, target: int, source: int, size: int) -> None:
        half = size // 2
        for begin, length in ((0, half), (half, size - half)):
            self.streams[stream].put(
                lambda: True,
                lambda b=begin, n=length: ctypes.memmove(target + b, source + b, n),
            )

    def _words(self, stream: int, operations: list[cuda_driver.MemoryOp]) -> None:
        for x in operations:
            wait = x.operation == cuda_driver.wait(0, 0).operation
            (self.wait_word if wait else self.write_word)(stream, x.address, x.value)

    # ringfa3.symmetric.cuda_driver

    wait, write = staticmethod(cuda_driver.wait), staticmethod(cuda_driver.write)

    def load(self) -> None:
        pass

    def current_context(self) -> int:
        return 1

    unregister_host_memory = destroy_event = staticmethod(lambda _: None)

    def register_host_memory(self, address: int, size: int) -> int:
        return address

    def allocate(self, size: int) -> int:
        mine = [s for s in self.streams if s.host == threading.get_ident()]
        assert not any(s.actions for s in mine), "the previous allocation is in use"
        made = (ctypes.c_ubyte * size)()
        ctypes.memset(made, 0xFF, size)  # NaN
        with self.lock:
            self.memory[ctypes.addressof(made)] = made
        return ctypes.addressof(made)

    def free(self, address: int) -> None:
        with self.lock:
            if address in self.attached:
                self.torn.append(address)
            del self.memory[address]

    def ipc_handle(self, address: int) -> str:
        assert address in self.memory
        return f"{address:x}"

    def ipc_open(self, handle: str) -> int:
        with self.lock:
            self.attached.append(int(handle, 16))
        return int(handle, 16)

    def ipc_close(self, address: int) -> None:
        with self.lock:
            self.attached.remove(address)

    def tensor(self, allocation: IpcAllocation) -> torch.Tensor:
        """Its bytes, alive as long as the tensor."""
        return torch.frombuffer(self.memory[allocation.address], dtype=torch.uint8)

    def new_event(self) -> int:
        with self.lock:
            self.events.append(self.event())
            return len(self.events) - 1

    def set_context(self, context: int) -> Call:
        return (lambda: None), ()

    def copy(self, *arguments: int) -> Call:
        return self.move, arguments

    def record(self, stream: int, event: int) -> Call:
        return (lambda: self.events[event].record(self.streams[stream])), ()

    def wait_event(self, stream: int, event: int) -> Call:
        return (lambda: self.streams[stream].wait_event(self.events[event])), ()

    def batch_memory_ops(
        self, stream: int, operations: list[cuda_driver.MemoryOp]
    ) -> tuple[Call, list[cuda_driver.MemoryOp]]:
        array = (cuda_driver.MemoryOp * len(operations))(*operations)
        read = [array[i] for i in range(len(array))]
        return (self._words, (stream, read)), read

    def issue(self, calls: list[Call]) -> None:
        for call, arguments in calls:
            call(*arguments)


class FakeStream:
    """A side stream, or a rank's compute stream, whose actions its thread runs at once."""

    def __init__(self, cuda: FakeCuda, number: int, host: int, compute: bool = False) -> None:
        self.cuda, self.cuda_stream, self.host, self.compute = cuda, number, host, compute
        self.actions: deque[Action] = deque()
        self.graph: FakeGraph | None = None  # into which it is captured
        self.behind: frozenset[int] = frozenset()  # the stream's latest nodes in the graph

    def able(self) -> Iterator[Callable[[], None]]:
        if self.actions and self.actions[0][0]():
            yield lambda: self.actions.popleft()[1]()

    def put(self, can: Callable[[], bool], act: Callable[[], None]) -> None:
        assert threading.current_thread().name != "ringfa3-watchdog", "CUDA would block it"
        if self.graph is not None:
            self.behind = self.graph.add(can, act, self.behind)
            return None
        if self.compute:
            self.cuda.until(can)
            return act()
        with self.cuda.lock:
            self.actions.append((can, act))
        return None

    def wait_event(self, event: FakeEvent) -> None:
        if event.captured is not None:
            graph, behind = event.captured
            graph.join(self, behind)
            return
        if self.graph is not None:
            raise cuda_driver.DriverError("an event from outside is awaited in a capture")
        passed = event.passed
        if self.compute:
            self.cuda.until(lambda: passed[0])
        else:
            self.put(lambda: passed[0], lambda: None)

    def synchronize(self) -> None:
        self.cuda.drain(self.host)

    def wait_stream(self, other: FakeStream) -> None:
        assert other.compute, "only compute streams, which run at once, wait for each other"


class FakeEvent:
    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda, self.passed = cuda, [True]
        self.captured: tuple[FakeGraph, frozenset[int]] | None = None

    def record(self, stream: FakeStream) -> None:
        self.captured = None if stream.graph is None else (stream.graph, stream.behind)
        if stream.graph is not None:
            return
        self.passed = passed = [stream.compute]
        if not stream.compute:
            stream.put(lambda: True, lambda: passed.__setitem__(0, True))

    def query(self) -> bool:
        assert threading.current_thread().name != "ringfa3-watchdog", "CUDA would block it"
        self.cuda.step()
        return self.passed[0]


class Ranks:
    """Runs a function on `world` threads, each with a group and a device of its own."""

    def __init__(self, world: int, seed: int = 0, timeout_s: float = 60.0) -> None:
        self.world, self.cuda = world, FakeCuda(seed)
        self.groups = [FakeGroup(self, rank, timeout_s) for rank in range(world)]
        self._barrier = threading.Barrier(world, timeout=LIMIT_S)
        self._lines: list[object] = [None] * world
        self._rank_of: dict[int, int] = {}  # by thread
        self._current: list[FakeStream] = []  # compute streams

    def introduction(self, rank: int) -> tuple[str, str, str]:
        return "host", f"GPU {rank}", ""

    def gather(self, rank: int, line: object) -> list[object]:
        self._lines[rank] = line
        self._barrier.wait()
        lines = list(self._lines)
        self._barrier.wait()
        return lines

    @contextmanager
    def capture(self, here: bool = False) -> Iterator[FakeGraph]:
        """Captures what the calling rank does, on its stream (`here`) or a new one, as a graph."""
        rank = self._rank_of[threading.get_ident()]
        eager = self._current[rank]
        self._current[rank] = stream = eager if here else self.cuda.stream(compute=True)
        graph = FakeGraph(self.cuda, stream)
        try:
            yield graph
        finally:
            self._current[rank] = eager
        graph.end()

    def run(self, function: Callable[[FakeGroup], object]) -> list[object]:
        results: list[object] = [None] * self.world

        def enter(rank: int) -> None:
            self._rank_of[threading.get_ident()] = rank
            try:
                results[rank] = function(self.groups[rank])
            except Exception as problem:
                results[rank] = problem
                self._barrier.abort()

        threads = [
            threading.Thread(target=enter, args=(r,), name=str(r), daemon=True)
            for r in range(self.world)
        ]
        with self._stand_in():
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        problems = [r for r in results if isinstance(r, Exception)]
        if problems:
            raise next(
                (p for p in problems if not isinstance(p, threading.BrokenBarrierError)),
                problems[0],
            )
        return results

    @contextmanager
    def _stand_in(self) -> Iterator[None]:
        cuda = self.cuda
        compute = self._current = [cuda.stream(compute=True) for _ in range(self.world)]

        def rank() -> int:
            return self._rank_of[threading.get_ident()]

        def introduction(_device: torch.device) -> tuple[str, str, str]:
            return self.introduction(rank())

        def current_stream(_device: torch.device) -> FakeStream:
            return compute[rank()]

        def synchronize(_device: torch.device) -> None:
            assert not capturing()
            cuda.drain(threading.get_ident())

        def capturing() -> bool:
            return compute[rank()].graph is not None

        def kernel(_: object, __: object, work: Callable[[], None]) -> None:
            compute[rank()].put(lambda: True, work)

        def sleep(_: float) -> None:
            if not cuda.step():
                time.sleep(0.001)

        watchdogs = []

        def watchdog(*arguments: Any) -> Watchdog:
            watchdogs.append(Watchdog(*arguments))
            return watchdogs[-1]

        with (
            mock.patch("ringfa3.symmetric.backend.Watchdog", watchdog),
            mock.patch("ringfa3.symmetric.backend._stream", cuda.stream),
            mock.patch("ringfa3.symmetric.self_test._event", cuda.event),
            mock.patch("ringfa3.symmetric.backend.cuda_driver", cuda),
            mock.patch("ringfa3.symmetric.cuda_graphs.cuda_driver", cuda),
            mock.patch("ringfa3.symmetric.self_test.cuda_driver", cuda),
            mock.patch("ringfa3.symmetric.signals.cuda_driver", cuda),
            mock.patch("ringfa3.symmetric.self_test._introduction", introduction),
            mock.patch.object(torch.cuda, "current_stream", current_stream),
            mock.patch.object(torch.cuda, "synchronize", synchronize),
            mock.patch.object(torch.cuda, "is_current_stream_capturing", capturing),
            mock.patch.object(SymmetricBackend, "compute", kernel),
            mock.patch("ringfa3.symmetric.backend.time", SimpleNamespace(sleep=sleep)),
            mock.patch("ringfa3.symmetric.self_test.time", SimpleNamespace(sleep=sleep)),
            mock.patch.object(torch.cuda, "device", nullcontext),
            mock.patch("ringfa3.symmetric.ipc_memory.cuda_driver", cuda),
            mock.patch.object(IpcAllocation, "tensor", property(cuda.tensor)),
        ):
            try:
                yield
            finally:
                for each in watchdogs:  # peers will never answer the calls under way
                    each.give_up()
