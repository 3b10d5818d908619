"""Ring calls over `symmetric` in CUDA graphs, on stand-ins in which a replay's operations come in
any order that the graph allows."""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from unittest import mock

import pytest
import torch
from torch import Tensor

from ringfa3.symmetric import backend, cuda_driver
from ringfa3.symmetric.backend import CudaMachine, open_machine
from ringfa3.symmetric.cuda_graphs import JOINED, enclosed
from ringfa3.symmetric.ring_pass import Course
from ringfa3.symmetric.stream_ops import Await, Operation, Stream
from tests.support.fake_cuda import FakeGroup, Ranks
from tests.support.placements import Placement, laid_out, scattered
from tests.symmetric.test_schedule import FORWARDS

CPU = torch.device("cpu")
DIRECTIONS = ("forward", "gathered", "backward")


@pytest.fixture(autouse=True)
def _small_trial() -> object:
    with mock.patch.multiple(backend, TRIAL_TOKENS=8, TRIAL_S=2.0):
        yield


class Layer:
    """Calls on whole numbers in place of attention; a kernel adds (1 + its rank) times the K/V that
    it sees to their dK/dV. `base` may be other at each replay."""

    def __init__(self, machine: CudaMachine, placement: Placement) -> None:
        self.machine, self.placement, self.rank = machine, placement, machine.group.rank
        self.plan, self.world = placement.plans[self.rank], placement.world
        self.between = self.plan.kv_exchange.visible.tolist()
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

    def leaving(self, owner: int, hop: int) -> Tensor:
        """What this rank sees of an owner's keys."""
        own = self.placement.plans[owner].kv_exchange.published
        return self.keys_of(owner)[own][slice(*self.between[owner][hop])]

    def call(self, direction: str, waits: bool) -> Course:
        course = Course(self.machine, self.plan, direction, self.keys, self.values, waits)
        attend = partial(self.attend_all, self.machine.captured)
        course.run((lambda _, *x: attend(*x)) if direction == "gathered" else self.attend)
        return course

    def await_word(self, captured: bool, word: Tensor) -> None:
        """A kernel in a graph begins when all is there."""
        if captured and int(word) != 1:
            self.wrong.append("a kernel in a graph waits")
        cuda = self.machine.group.meeting.cuda  # type: ignore[attr-defined]
        cuda.until(lambda: int(word) == 1)

    def attend(self, hop: int, k: Tensor, v: Tensor, *found: Tensor) -> None:
        self.seen.append(f"hop {hop}")
        owner, rows = (self.rank - hop) % self.world, slice(None)
        if hop:
            rows = slice(*self.between[owner][hop])
            expected = self.leaving(owner, hop)
            if not (torch.equal(k[rows].flatten(), expected) and torch.equal(v[rows], -k[rows])):
                self.wrong.append(f"hop {hop}: K/V")
        for x, y in zip(found, (k, v), strict=False):
            x[rows] = y[rows] * (1 + self.rank)

    def attend_all(self, captured: bool, k: Tensor, v: Tensor, *words: Tensor) -> None:
        self.seen.append("all hops")
        expected = [self.keys_of(self.rank)]
        for hop in range(1, self.world):
            owner = (self.rank - hop) % self.world
            if len(block := self.leaving(owner, hop)):
                expected.append(block)
                self.await_word(captured, words[0][hop])
        whole = torch.cat(expected)
        if not (torch.equal(k.flatten(), whole) and torch.equal(v, -k)):
            self.wrong.append("gathered K/V")

    def check(self, course: Course) -> None:
        weight = torch.full((self.plan.local_tokens,), 1.0 + self.rank)
        for hop in range(1, self.world):
            rows = self.plan.kv_exchange.published[slice(*self.between[self.rank][hop])]
            weight[rows] += 1 + (self.rank + hop) % self.world
        own = self.keys_of(self.rank) * weight
        if not torch.equal(course.home.flatten(2).squeeze(2).T, torch.stack((own, -own))):
            self.wrong.append("dK/dV")


def steps(layers: list[Layer], forwards: tuple[str, ...], waits: bool) -> Callable[[], None]:
    """A step of training; gives its check."""
    for number, layer in enumerate(layers):
        layer.call(forwards[number % len(forwards)], waits)
    backwards = [layer.call("backward", waits) for layer in reversed(layers)]

    def check() -> None:
        for layer, course in zip(reversed(layers), backwards, strict=True):
            layer.check(course)
            hops = [x for x in layer.seen if x != "all hops"]
            if "hop 0" not in hops or len(layer.seen) < 2:
                layer.wrong.append(f"kernels did not run: {layer.seen}")

    return check


def _mixed(group: FakeGroup, placements: list[Placement], forwards: tuple[str, ...]) -> list[str]:
    """What is wrong in calls and in replays of three graphs, the same in turn on all ranks."""
    machine = open_machine(group, CPU)  # type: ignore[arg-type]
    assert isinstance(machine, CudaMachine)
    rng, cuda = random.Random(group.world), group.meeting.cuda
    layers = [Layer(machine, p) for p in placements]
    graphs: list[Callable[[], Callable[[], None]]] = []

    def run(step: Callable[[], Callable[[], None]]) -> None:
        base = float(rng.randrange(1, 999))
        for layer in layers:
            layer.fill(base)
        step()()

    def captured(count: int) -> None:
        with group.meeting.capture(here=count == 2) as graph:
            if count == 2:  # so that later calls are of the other parity
                layers[2].call(forwards[-1], waits=True)
            check = steps(layers[:count], forwards, waits=True)

        def replay() -> Callable[[], None]:
            graph.replay()
            return check

        graphs.append(replay)

    def eager() -> Callable[[], None]:
        check = steps(layers, forwards, waits=True)
        if graphs and cuda.busy(threading.get_ident()):
            layers[0].wrong.append("a call goes on beside the next one")
        return check

    for _ in range(rng.randint(1, 2)):
        run(eager)
    captured(3)
    for turn in range(12):
        if turn in (3, 6):
            captured(2)  # of another number of calls
        run(rng.choice([eager, *graphs]))
    return [f"rank {group.rank}: {x}" for layer in layers for x in layer.wrong]


@pytest.mark.parametrize("forwards", FORWARDS, ids=str)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_replays_beside_other_calls_are_exact(world: int, forwards: tuple[str, ...]) -> None:
    """Three layers, forward and backward, other numbers each time; kernels that wait inside."""
    rng = random.Random(world)
    placements = [laid_out([8 * world], world), scattered(rng, world), scattered(rng, world)]
    wrong = Ranks(world, seed=world).run(lambda group: _mixed(group, placements, forwards))
    assert wrong == [[]] * world


def _late(group: FakeGroup, placement: Placement) -> tuple[bool, bool]:
    """Whether a call has taken its words, just issued, and in the captured call after it. Rank 1 is
    late to read the K/V of rank 0, which waits for nothing else."""
    machine = open_machine(group, CPU)  # type: ignore[arg-type]
    assert isinstance(machine, CudaMachine)
    cuda, me = group.meeting.cuda, threading.get_ident()
    layer = Layer(machine, placement)
    cuda.drain(me)
    group.gather("")
    if group.rank == 1:
        time.sleep(0.3)
    layer.call("forward", waits=False)
    taken = machine._taken[Stream.KV]
    before = machine.words.reached(Stream.KV, taken)
    with group.meeting.capture():
        layer.call("forward", waits=False)
        return before, machine.words.reached(Stream.KV, taken)


def test_the_first_captured_call_waits_until_those_before_are_over() -> None:
    one_way = laid_out([16], 2, "contiguous")
    assert Ranks(2).run(lambda group: _late(group, one_way))[0] == (False, True)


def _grown(group: FakeGroup, placements: list[Placement]) -> tuple[int, list[str]]:
    machine = open_machine(group, CPU)  # type: ignore[arg-type]
    assert isinstance(machine, CudaMachine)
    layer, larger = (Layer(machine, p) for p in placements)
    layer.fill(1.0)
    steps([layer], ("forward",), waits=True)()
    with (
        mock.patch.object(machine.arena, "keep", wraps=machine.arena.keep) as keep,
        group.meeting.capture() as graph,
    ):
        check = steps([layer], ("forward",), waits=True)
    for base in (3.0, 5.0):
        larger.fill(base)
        steps([larger], ("forward",), waits=True)()
        layer.fill(base + 1)
        graph.replay()
        check()
    return keep.call_count, layer.wrong + larger.wrong


def test_a_graph_keeps_its_memory_where_the_arena_grows() -> None:
    placements = [laid_out([8 * 2], 2), laid_out([4096 * 2], 2)]
    with mock.patch("ringfa3.symmetric.ipc_memory.ALIGNMENT", 64):
        assert Ranks(2).run(lambda group: _grown(group, placements)) == [(2, [])] * 2


def _unenclosed(group: FakeGroup, placement: Placement, kind: str) -> str:
    machine = open_machine(group, CPU)  # type: ignore[arg-type]
    assert isinstance(machine, CudaMachine)
    layer = Layer(machine, placement)
    layer.call(kind, waits=False)
    try:
        with group.meeting.capture():
            for _ in range(2):
                layer.call(kind, waits=False)
    except cuda_driver.DriverError as problem:
        return str(problem)
    return ""


def parted(operations: Sequence[Operation], captured: bool) -> list[Operation]:
    return [x for x in enclosed(operations, captured) if x != Await(Stream.COMPUTE, JOINED)]


@pytest.mark.parametrize(
    ("direction", "enclose", "said"),
    [
        ("backward", lambda x, _: x, "an event from outside is awaited"),
        ("forward", parted, "1 captured streams have not"),
    ],
)
def test_a_call_that_is_not_enclosed_cannot_be_captured(
    direction: str, enclose: Callable[[Sequence[Operation], bool], list[Operation]], said: str
) -> None:
    """The stand-in refuses what CUDA does."""
    placement = laid_out([24], 3)
    with mock.patch.object(backend, "enclosed", enclose):
        for problem in Ranks(3).run(lambda group: _unenclosed(group, placement, direction)):
            assert said in str(problem)


def _stalled(group: FakeGroup, placement: Placement, direction: str) -> tuple[list[str], float]:
    """Rank 1 replays twice, the others three times: they go on all the same.

    Gives the failures, and when the last replay began.
    """
    machine = open_machine(group, CPU)  # type: ignore[arg-type]
    assert isinstance(machine, CudaMachine)
    layer = Layer(machine, placement)
    layer.call(direction, waits=True)
    with group.meeting.capture() as graph:
        layer.call(direction, waits=True)
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
    """Within the timeout, which runs from the last progress on."""
    raised: list[tuple[str, float]] = []

    def hear(error: Exception) -> None:
        raised.append((str(error), time.monotonic()))

    with mock.patch.object(backend, "raise_in_main_thread", hear):
        said = Ranks(2, timeout_s=4.0).run(
            lambda group: _stalled(group, laid_out([16], 2), direction)
        )
    (waited, last), (other, _) = said  # type: ignore[misc]
    assert other == []
    assert [message for message, _ in raised] == waited
    assert len(waited) == 1
    assert 3 < raised[0][1] - last < 6
    kind = "backward" if direction == "backward" else "forward"
    assert re.fullmatch(
        rf"{kind} hop 1: K/V of rank 11: nothing within 4 s; is that rank stopped\?",
        waited[0],
    )
