"""If this fails, CUDA graphs of ring calls replay wrong numbers. Ring calls over `symmetric` in
CUDA graphs, on stand-ins that replay operations in any order that the graph allows."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from unittest import mock

import pytest
import torch
from torch import Tensor

from ringfa3.errors import timed_out
from ringfa3.pass_interface import HopTensors
from ringfa3.symmetric import cuda_driver, self_test
from ringfa3.symmetric.backend import SymmetricBackend
from ringfa3.symmetric.cuda_graphs import JOINED, fork_join
from ringfa3.symmetric.ring_pass import SymmetricRingPass
from ringfa3.symmetric.self_test import open_backend
from ringfa3.symmetric.stream_ops import Operation, Stream, WaitEvent
from tests.support.fake_cuda import Ranks
from tests.support.fake_group import FakeGroup
from tests.support.placements import Placement, laid_out, scattered
from tests.symmetric.test_schedule import FORWARDS

CPU = torch.device("cpu")
DIRECTIONS = ("forward", "gathered", "backward")


@pytest.fixture(autouse=True)
def _small_self_test() -> object:
    with mock.patch.multiple(self_test, TEST_TOKENS=8, TEST_S=2.0):
        yield


class Layer:
    """Calls on whole numbers in place of attention: a kernel adds (1 + its rank) times the K/V that
    it sees to their dK/dV. `base` may differ from replay to replay."""

    def __init__(self, backend: SymmetricBackend, placement: Placement) -> None:
        self.backend, self.placement, self.rank = backend, placement, backend.group.rank
        self.plan, self.world = placement.plans[self.rank], placement.world
        self.visible = self.plan.kv_exchange.visible.tolist()
        self.keys, self.values = torch.zeros(2, self.plan.local_tokens, 1, 1)
        self.base = 0.0
        self.seen: list[str] = []  # by kernels
        self.wrong: list[str] = []

    def fill(self, base: float) -> None:
        self.base = base
        self.keys.copy_(self.keys_of(self.rank).view(-1, 1, 1))
        self.values.copy_(-self.keys)
        self.seen.clear()

    def keys_of(self, rank: int) -> Tensor:
        return self.base + 1000 * rank + torch.arange(self.placement.plans[rank].local_tokens)

    def published_by(self, owner: int, hop: int) -> Tensor:
        """What this rank sees of an owner's keys."""
        own = self.placement.plans[owner].kv_exchange.published
        return self.keys_of(owner)[own][slice(*self.visible[owner][hop])]

    def call(self, direction: str, waits_in_kernel: bool) -> SymmetricRingPass:
        ring_pass = SymmetricRingPass(self.backend, self.plan, direction)
        ring_pass.start(self.keys, self.values, waits_in_kernel)
        attend_gathered = partial(self.attend_gathered, self.backend.captured)
        ring_pass.run(attend_gathered if direction == "gathered" else self.attend)
        return ring_pass

    def wait_for_arrival(self, captured: bool, word: Tensor) -> None:
        """In a graph a kernel starts when all its blocks have arrived."""
        if captured and int(word) != 1:
            self.wrong.append("a kernel in a graph waits")
        cuda = self.backend.group.meeting.cuda  # type: ignore[attr-defined]
        cuda.until(lambda: int(word) == 1)

    def attend(self, hop: int, given: HopTensors) -> None:
        k, v = given.k, given.v
        self.seen.append(f"hop {hop}")
        owner, rows = (self.rank - hop) % self.world, slice(None)
        if hop:
            rows = slice(*self.visible[owner][hop])
            expected = self.published_by(owner, hop)
            if not (torch.equal(k[rows].flatten(), expected) and torch.equal(v[rows], -k[rows])):
                self.wrong.append(f"hop {hop}: K/V")
        for x, y in ((given.dk, k), (given.dv, v)):
            if x is not None:
                x[rows] = y[rows] * (1 + self.rank)

    def attend_gathered(self, captured: bool, hop: int, given: HopTensors) -> None:
        k, v, arrivals = given.k, given.v, given.arrivals
        self.seen.append("all hops")
        expected = [self.keys_of(self.rank)]
        for t in range(1, self.world):
            owner = (self.rank - t) % self.world
            if len(block := self.published_by(owner, t)):
                expected.append(block)
                assert arrivals is not None
                self.wait_for_arrival(captured, arrivals[t])
        whole = torch.cat(expected)
        if not (torch.equal(k.flatten(), whole) and torch.equal(v, -k)):
            self.wrong.append("gathered K/V")

    def check(self, ring_pass: SymmetricRingPass) -> None:
        weight = torch.full((self.plan.local_tokens,), 1.0 + self.rank)
        for hop in range(1, self.world):
            rows = self.plan.kv_exchange.published[slice(*self.visible[self.rank][hop])]
            weight[rows] += 1 + (self.rank + hop) % self.world
        own = self.keys_of(self.rank) * weight
        if not all(
            torch.equal(x.flatten(), y) for x, y in zip(ring_pass.grads, (own, -own), strict=True)
        ):
            self.wrong.append("dK/dV")


def steps(
    layers: list[Layer], forwards: tuple[str, ...], waits_in_kernel: bool
) -> Callable[[], None]:
    """Runs a step of training and returns its check."""
    for number, layer in enumerate(layers):
        layer.call(forwards[number % len(forwards)], waits_in_kernel)
    backwards = [layer.call("backward", waits_in_kernel) for layer in reversed(layers)]

    def check() -> None:
        for layer, ring_pass in zip(reversed(layers), backwards, strict=True):
            layer.check(ring_pass)
            hops = [x for x in layer.seen if x != "all hops"]
            if "hop 0" not in hops or len(layer.seen) < 2:
                layer.wrong.append(f"kernels did not run: {layer.seen}")

    return check


def _mixed(group: FakeGroup, placements: list[Placement], forwards: tuple[str, ...]) -> list[str]:
    """Wrong results of eager calls and replays of three graphs, in the same order on all ranks."""
    backend = open_backend(group, CPU)  # type: ignore[arg-type]
    assert isinstance(backend, SymmetricBackend)
    rng, cuda = random.Random(group.world), group.meeting.cuda
    layers = [Layer(backend, p) for p in placements]
    graphs: list[Callable[[], Callable[[], None]]] = []

    def run(step: Callable[[], Callable[[], None]]) -> None:
        base = float(rng.randrange(1, 999))
        for layer in layers:
            layer.fill(base)
        step()()

    def captured(count: int) -> None:
        with group.meeting.capture(here=count == 2) as graph:
            if count == 2:  # so that later calls have the other parity
                layers[2].call(forwards[-1], waits_in_kernel=True)
            check = steps(layers[:count], forwards, waits_in_kernel=True)

        def replay() -> Callable[[], None]:
            graph.replay()
            return check

        graphs.append(replay)

    def eager() -> Callable[[], None]:
        check = steps(layers, forwards, waits_in_kernel=True)
        if graphs and cuda.busy(threading.get_ident()):
            layers[0].wrong.append("a call runs beside the next one")
        return check

    for _ in range(rng.randint(1, 2)):
        run(eager)
    captured(3)
    for turn in range(12):
        if turn in (3, 6):
            captured(2)  # with another number of calls
        run(rng.choice([eager, *graphs]))
    return [f"rank {group.rank}: {x}" for layer in layers for x in layer.wrong]


@pytest.mark.parametrize("forwards", FORWARDS, ids=str)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_replays_beside_other_calls_are_exact(world: int, forwards: tuple[str, ...]) -> None:
    """Three layers, forward and backward, with other numbers each time; gathered kernels wait."""
    rng = random.Random(world)
    placements = [laid_out([8 * world], world), scattered(rng, world), scattered(rng, world)]
    wrong = Ranks(world, seed=world).run(lambda group: _mixed(group, placements, forwards))
    assert wrong == [[]] * world


def _late(group: FakeGroup, placement: Placement) -> tuple[bool, bool]:
    """Whether a call's waits are over right after its issue, and in the captured call after it.

    Rank 1 is late to read the K/V of rank 0, which waits for nothing else.
    """
    backend = open_backend(group, CPU)  # type: ignore[arg-type]
    assert isinstance(backend, SymmetricBackend)
    cuda, me = group.meeting.cuda, threading.get_ident()
    layer = Layer(backend, placement)
    cuda.drain(me)
    group.gather("")
    if group.rank == 1:
        time.sleep(0.3)
    layer.call("forward", waits_in_kernel=False)
    count = backend.waits[Stream.KV]
    before = backend.signals.reached(Stream.KV, count)
    with group.meeting.capture():
        layer.call("forward", waits_in_kernel=False)
        return before, backend.signals.reached(Stream.KV, count)


def test_the_first_captured_call_waits_until_earlier_calls_have_ended() -> None:
    one_way = laid_out([16], 2, "contiguous")
    assert Ranks(2).run(lambda group: _late(group, one_way))[0] == (False, True)


def _grown(group: FakeGroup, placements: list[Placement]) -> tuple[int, list[str]]:
    backend = open_backend(group, CPU)  # type: ignore[arg-type]
    assert isinstance(backend, SymmetricBackend)
    layer, larger = (Layer(backend, p) for p in placements)
    layer.fill(1.0)
    steps([layer], ("forward",), waits_in_kernel=True)()
    with (
        mock.patch.object(backend.memory, "pin", wraps=backend.memory.pin) as pin,
        group.meeting.capture() as graph,
    ):
        check = steps([layer], ("forward",), waits_in_kernel=True)
    for base in (3.0, 5.0):
        larger.fill(base)
        steps([larger], ("forward",), waits_in_kernel=True)()
        layer.fill(base + 1)
        graph.replay()
        check()
    return pin.call_count, layer.wrong + larger.wrong


def test_a_graph_keeps_its_memory_where_the_shared_memory_grows() -> None:
    placements = [laid_out([8 * 2], 2), laid_out([4096 * 2], 2)]
    with mock.patch("ringfa3.symmetric.ipc_memory.ALIGNMENT", 64):
        assert Ranks(2).run(lambda group: _grown(group, placements)) == [(2, [])] * 2


def _without_fork_join(group: FakeGroup, placement: Placement, pass_type: str) -> str:
    backend = open_backend(group, CPU)  # type: ignore[arg-type]
    assert isinstance(backend, SymmetricBackend)
    layer = Layer(backend, placement)
    layer.call(pass_type, waits_in_kernel=False)
    try:
        with group.meeting.capture():
            for _ in range(2):
                layer.call(pass_type, waits_in_kernel=False)
    except cuda_driver.DriverError as problem:
        return str(problem)
    return ""


def without_join(operations: Sequence[Operation], captured: bool) -> list[Operation]:
    return [x for x in fork_join(operations, captured) if x != WaitEvent(Stream.COMPUTE, JOINED)]


@pytest.mark.parametrize(
    ("direction", "change", "problem"),
    [
        ("forward", lambda x, _: x, "1 captured streams have not"),
        ("forward", without_join, "1 captured streams have not"),
    ],
)
def test_a_call_without_fork_and_join_cannot_be_captured(
    direction: str, change: Callable[[Sequence[Operation], bool], list[Operation]], problem: str
) -> None:
    """The stand-in raises where CUDA does."""
    placement = laid_out([24], 3)
    with mock.patch("ringfa3.symmetric.backend.fork_join", change):
        for error in Ranks(3).run(lambda group: _without_fork_join(group, placement, direction)):
            assert problem in str(error)


def _stalled(group: FakeGroup, placement: Placement, direction: str) -> tuple[list[str], float]:
    """Rank 1 replays twice, the others three times; their streams are released.

    Returns the failures, and when the last replay started.
    """
    backend = open_backend(group, CPU)  # type: ignore[arg-type]
    assert isinstance(backend, SymmetricBackend)
    layer = Layer(backend, placement)
    layer.call(direction, waits_in_kernel=True)
    with group.meeting.capture() as graph:
        layer.call(direction, waits_in_kernel=True)
    for _ in range(2):
        graph.replay()
        group.gather("")
        time.sleep(0.3)
        assert group.failures == []
    last = time.monotonic()
    if group.rank != 1:
        graph.replay()
    return group.failures, last


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_replay_that_waits_in_vain_names_hop_and_peer_and_goes_on(direction: str) -> None:
    """Within the timeout, which starts at the last progress."""
    lost: list[float] = []
    lose = FakeGroup.lose

    def hear(group: FakeGroup, message: str) -> None:
        lose(group, message)
        lost.append(time.monotonic())

    with mock.patch.object(FakeGroup, "lose", hear):
        results = Ranks(2, timeout_s=4.0).run(
            lambda group: _stalled(group, laid_out([16], 2), direction)
        )
    (waited, last), (other, _) = results  # type: ignore[misc]
    assert other == []
    assert len(waited) == 1
    assert 3 < lost[0] - last < 6
    pass_type = "backward" if direction == "backward" else "forward"
    assert waited[0] == timed_out(f"{pass_type} hop 1: K/V of rank 11", 4)
