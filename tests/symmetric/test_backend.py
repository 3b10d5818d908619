"""If this fails, a ring over peers' memory starts on wrong addresses, or hangs without a name of
the peer. The backend of the `symmetric` transport on stand-ins for CUDA: addresses, signals,
growth, the self-test, and ranks whose peers do not answer."""

from __future__ import annotations

import ctypes
import os
import random
import re
import threading
from collections import defaultdict
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ringfa3.errors import timed_out
from ringfa3.kernels import reference
from ringfa3.kernels.dispatch import ForwardKernel
from ringfa3.kernels.streams import CurrentStream
from ringfa3.pass_interface import HopTensors
from ringfa3.planning.tiling import Plan
from ringfa3.ring.group import RingGroup
from ringfa3.ring.op import ring_attention
from ringfa3.ring.prepare_call import PreparedCall, pass_type_of
from ringfa3.schedules import host_code
from ringfa3.schedules.encoded import symbol_number
from ringfa3.schedules.link import Addresses
from ringfa3.schedules.settings import Settings
from ringfa3.symmetric import cuda_driver, ring_program, self_test
from ringfa3.symmetric.backend import SymmetricBackend
from ringfa3.symmetric.forward_mode import FORWARD_MODE_ENV, FORWARD_MODES, select_forward_mode
from ringfa3.symmetric.ring_pass import SymmetricRingPass
from ringfa3.symmetric.ring_program import ReplayableCall
from ringfa3.symmetric.self_test import open_backend
from ringfa3.symmetric.stream_ops import BufferSpec, Stream
from tests.support import ranks as processes
from tests.support.dense import attention, gradients, mask, tensors, worst
from tests.support.fake_cuda import FakeCuda, Ranks
from tests.support.fake_group import FakeGroup
from tests.support.placements import Placement, laid_out, scattered

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _small_self_test() -> object:
    with mock.patch.multiple(self_test, TEST_TOKENS=8, TEST_S=2.0):
        yield


def opened(ranks: Ranks) -> list[object]:
    return ranks.run(lambda group: open_backend(group, CPU))  # type: ignore[arg-type]


@pytest.mark.parametrize("world", [2, 3, 4])
def test_the_trial_passes_on_a_sound_machine(world: int) -> None:
    """K/V of every hop and the owner's dK/dV, both parities, whole numbers, exactly."""
    assert all(isinstance(m, SymmetricBackend) for m in opened(Ranks(world)))


def _layers(
    group: FakeGroup, placements: list[Placement], here: dict[int, SymmetricBackend]
) -> float:
    """The largest error of out, lse, dq, dk and dv of layers, against the dense reference."""
    backend = open_backend(group, CPU)  # type: ignore[arg-type]
    assert isinstance(backend, SymmetricBackend)
    here[threading.get_ident()] = backend
    made = []
    for layer, placement in enumerate(placements):
        inputs, dout, dlse = tensors(layer, sum(placement.lengths), (2, 1), 2)
        leaves = [x.clone().requires_grad_() for x in inputs]
        whole = attention(*leaves, mask(placement.lengths, placement.lengths, *placement.band))
        expected = gradients(leaves, whole, dout, dlse)
        plan = placement.plans[group.rank]
        token = plan.token_index
        mine = [x[token].requires_grad_() for x in inputs]
        settings = (None, plan.handle, 2**-0.5, False, "native", "symmetric")
        there = ring_attention(*mine, *settings)
        grads = gradients(mine, there, dout[token], dlse[:, token])
        made += [(there[0], whole[0][token]), (there[1], whole[1][:, token])]
        made += zip(grads, (g[token] for g in expected), strict=True)
    return worst(made)


class Waiting:
    """A forward kernel that waits for the arrivals of its spans, as kernels do."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda, self.awaited = cuda, 0

    def __call__(self, q: Tensor, plan: Plan, v_dim: int) -> ForwardKernel:
        return ForwardKernel(
            reference.TILE_M,
            self.attend,
            reference.new_partial_out,
            reference.read_partial_out,
            takes_arrivals=True,
        )

    def attend(self, q: Tensor, k: Tensor, v: Tensor, tiling: Any, *rest: Any, sink: Any) -> None:
        for number in sorted(set(tiling.spans["arrival"].tolist()) - {0}):
            self.awaited += 1
            self.cuda.until(lambda n=number: int(rest[4][n]) == 1)  # type: ignore[misc]
        reference.attend(q, k, v, tiling, *rest[:4], sink)


@pytest.mark.parametrize("forward", [*FORWARD_MODES, "gathered, inside"])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_attention_equals_one_device_while_the_memory_grows(world: int, forward: str) -> None:
    """`ring_attention` in float64, 1e-12; three layers in different layouts, each larger. Hop by
    hop, gathered for a kernel that cannot wait, and gathered for one that waits inside."""
    placements = [
        laid_out([8 * world], world),
        laid_out([30 * world], world, "contiguous"),
        laid_out([20 * world, 3, 40 * world], world, "zigzag", (9, -1)),
    ]
    here: dict[int, SymmetricBackend] = {}
    ranks = Ranks(world, seed=world)
    kind, *inside = forward.split(", ")
    kernel = Waiting(ranks.cuda) if inside else host_code.select_forward

    def prepared(*given: Any, **_: Any) -> PreparedCall:
        q, k, _, plan, *_, direction = given
        kind = pass_type_of(direction, select_forward_mode(plan, q, k))
        return PreparedCall(plan, kind, partial(SymmetricRingPass, here[threading.get_ident()]))

    with (
        mock.patch.dict(os.environ, {FORWARD_MODE_ENV: kind}),
        mock.patch.object(host_code, "select_forward", kernel),
        mock.patch("ringfa3.symmetric.ipc_memory.ALIGNMENT", 64),
        mock.patch("ringfa3.ring.op.prepare_call", prepared),
        mock.patch.multiple(reference, TILE_M=4, TILE_N=4),
    ):
        errors = ranks.run(lambda group: _layers(group, placements, here))
    assert max(errors) < 1e-12  # type: ignore[type-var]
    assert bool(inside) == (isinstance(kernel, Waiting) and kernel.awaited > 0)
    for backend in here.values():
        assert not backend.arrivals.any()


def _returned(group: FakeGroup, placements: list[Placement]) -> list[str]:
    """Wrong dK/dV of backward calls whose kernels store (1 + rank) times the K/V that they see."""
    backend = open_backend(group, CPU)  # type: ignore[arg-type]
    assert isinstance(backend, SymmetricBackend)
    rank, world, wrong = group.rank, group.world, []
    for layer, placement in enumerate(placements):
        plan = placement.plans[rank]
        seen = plan.kv_exchange.visible.tolist()
        keys = 100.0 * layer + 10 * rank + torch.arange(plan.local_tokens).view(-1, 1, 1)

        def attend(hop: int, x: HopTensors) -> None:
            rows = slice(*seen[(rank - hop) % world][hop]) if hop else slice(None)  # noqa: B023
            for y, to in ((x.k, x.dk), (x.v, x.dv)):
                to[rows] = y[rows] * (1 + rank)

        ring_pass = SymmetricRingPass(backend, plan, "backward")
        ring_pass.start(keys, -keys)
        ring_pass.run(attend)
        weight = torch.full((plan.local_tokens, 1, 1), 1.0 + rank)
        for hop in range(1, world):
            weight[plan.kv_exchange.published[slice(*seen[rank][hop])]] += 1 + (rank + hop) % world
        if not all(map(torch.equal, ring_pass.grads, (keys * weight, -keys * weight))):
            wrong.append(f"layer {layer}, rank {rank}")
    return wrong


@pytest.mark.parametrize("world", [3, 4])
@pytest.mark.parametrize("seed", range(4))
def test_dkv_return_to_their_owner(world: int, seed: int) -> None:
    """Exactly, in placements where the visited hops differ from layer to layer."""
    rng = random.Random(seed)
    placements = [scattered(rng, world) for _ in range(6)] + [laid_out([8 * world], world)]
    wrong = Ranks(world, seed=seed).run(lambda group: _returned(group, placements))
    assert wrong == [[]] * world


def _parities(group: FakeGroup) -> list[int]:
    backend = SymmetricBackend(group, CPU, 1.0, group.failures.append)  # type: ignore[arg-type]
    spec = BufferSpec(laid_out([8], 2).plans[group.rank], "forward", torch.zeros(4, 1, 2))
    return [backend.begin(spec) for _ in range(4)]


def test_calls_take_turns_with_the_two_slots() -> None:
    """The proof of the schedule assumes it."""
    assert Ranks(2).run(_parities) == [[0, 1, 0, 1]] * 2


def _compute_streams(ranks: Ranks, linked: dict[int, list[int]], group: FakeGroup) -> list[int]:
    """For which a call is linked: at first, and when it begins again after a capture."""
    backend: Any
    backend = SymmetricBackend(group, CPU, 1.0, group.failures.append)  # type: ignore[arg-type]
    spec = BufferSpec(laid_out([8], 2).plans[group.rank], "forward", torch.zeros(4, 1, 2))
    for captured in (False, True, False):
        with ranks.capture() if captured else nullcontext():
            parity = backend.begin(spec)
    schedule: Any = mock.Mock(waits=())
    call = ReplayableCall(backend, None, schedule, CurrentStream(CPU, 0, False, 7))
    call.agreed = backend.group.agreement_snapshot()
    call.program(parity)
    with ranks.capture():
        backend.begin(spec)
    call.program(1 - parity)
    return linked[threading.get_ident()]


def test_a_call_that_begins_again_is_linked_for_its_own_stream() -> None:
    """Its other parity. An earlier capture has made calls fork and join already."""
    ranks, linked = Ranks(2), defaultdict[int, list[int]](list)
    number = symbol_number(("stream", Stream.COMPUTE))

    def link(_: object, __: object, ___: object, addresses: Addresses) -> None:
        addresses.look_up([number])
        linked[threading.get_ident()].append(addresses.of_numbers[number])

    with mock.patch.object(ring_program, "link", link):
        found = ranks.run(partial(_compute_streams, ranks, linked))
    for first, *again in found:  # type: ignore[misc]
        assert again == [first]


def _unsupported(group: dist.ProcessGroup, reason: str) -> tuple[list[str], list[str]]:
    """Lines of all ranks in a call, and why there is no backend, asked for twice."""
    own, calls = RingGroup.of(group), []

    def opened(*_: object) -> str:
        calls.append(reason)
        return reason

    reasons = []
    own.begin(Settings())
    lines = own.gather(f"I am {own.rank}")
    with mock.patch("ringfa3.ring.connections.open_backend", opened):
        for _ in range(2):
            assert own.connections.symmetric_backend(CPU) is None
            reasons.append(str(own.connections.unsupported))
    assert calls == [reason]
    return lines, reasons


def test_a_group_without_a_backend_knows_why_on_all_ranks(ranks: processes.Ranks) -> None:
    """The self-test runs once; its result is remembered."""
    for lines, reasons in ranks.run(3, _unsupported, "rank 1: no CUDA driver"):
        assert lines == ["I am 0", "I am 1", "I am 2"]
        assert reasons == 2 * ["rank 1: no CUDA driver"]


class Lost(FakeCuda):
    """Signals of other ranks are never set."""

    def register_host_memory(self, address: int, size: int) -> int:
        self.mapped = [*getattr(self, "mapped", []), range(address, address + size)]
        return address

    def write_word(self, stream: int, address: int, value: int) -> None:
        if value != 1 or not any(address in words for words in self.mapped):
            super().write_word(stream, address, value)


class Shifted(FakeCuda):
    """Copies read two bytes beside their source."""

    def move(self, stream: int, target: int, source: int, size: int) -> None:
        super().move(stream, target, source + 2, size)


class Failing(FakeCuda):
    def move(self, stream: int, target: int, source: int, size: int) -> None:
        raise cuda_driver.DriverError("cuMemcpyDtoDAsync_v2: CUDA error 1, invalid argument")


class FailingOnOne(Failing):
    def move(self, *arguments: int) -> None:
        move = Failing.move if threading.current_thread().name == "1" else FakeCuda.move
        move(self, *arguments)


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        (Lost, r"rank 10: .* did not finish: backward hop 1: K/V of rank 11: timed out after 2 s"),
        (Shifted, r"rank 10(, 11)?: the self-test found \d+ wrong values"),
        (Failing, r"rank 10, 11: cuMemcpyDtoDAsync_v2: CUDA error 1"),  # on both
        (
            FailingOnOne,
            r"rank 10: the self-test did not finish.*; rank 11: cuMemcpyDtoDAsync_v2: CUDA error 1",
        ),
    ],
)
def test_a_failed_self_test_decides_on_all_ranks(kind: type[FakeCuda], problem: str) -> None:
    ranks = Ranks(2)
    ranks.cuda = kind(0)
    answers = opened(ranks)
    assert answers[0] == answers[1]
    assert re.match(problem, str(answers[0]))


@pytest.mark.parametrize(
    ("introductions", "reason"),
    [
        ([("a", "GPU 0", ""), ("b", "GPU 0", "")], "the group's ranks are on 2 hosts"),
        ([("a", "GPU 0", ""), ("a", "GPU 0", "")], "2 ranks share 1 GPUs"),
        ([("a", "GPU 0", ""), ("a", "GPU 1", "no CUDA driver")], "rank 11: no CUDA driver"),
    ],
)
def test_one_unsupported_rank_decides_for_all(
    introductions: list[tuple[str, str, str]], reason: str
) -> None:
    ranks = Ranks(2)
    with mock.patch.object(Ranks, "introduction", lambda _, rank: introductions[rank]):
        assert opened(ranks) == [reason, reason]


def test_one_rank_without_memory_decides_for_all() -> None:
    def no_room(*_: object) -> None:
        if threading.current_thread().name == "1":
            raise torch.OutOfMemoryError("CUDA out of memory")

    ranks = Ranks(2)
    with mock.patch("ringfa3.symmetric.ipc_memory.IpcMemory._allocate", no_room):
        for reason in opened(ranks):
            expected = (
                "allocating the shared memory failed on rank 1 of the group: CUDA out of memory"
            )
            assert expected in str(reason)


def test_reasons_of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """One queue for all streams, and no driver."""
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    assert "unset it" in str(self_test.unsupported_reason())
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")
    monkeypatch.setattr(ctypes, "CDLL", mock.Mock(side_effect=OSError("libcuda.so.1: not found")))
    cuda_driver._entries.cache_clear()
    assert self_test.unsupported_reason() == "no CUDA driver (libcuda.so.1: not found): install it"
    cuda_driver._entries.cache_clear()


# Peers that do not answer


def _stalls(group: FakeGroup, direction: str) -> tuple[list[str], list[object]]:
    """Rank 1 does not enter the call, or only publishes K/V; rank 0's streams are released after
    the timeout of that time, which is not that of the start.

    Also returns what has the memory that actions on streams of either rank use.
    """
    backend = open_backend(group, CPU)  # type: ignore[arg-type]
    assert isinstance(backend, SymmetricBackend)
    group.timeout_s = 4.0
    plan = laid_out([16], 2).plans[group.rank]
    x = torch.ones(plan.local_tokens, 1, 2)
    ring_pass = SymmetricRingPass(backend, plan, direction)
    if direction == "backward" or group.rank == 0:
        ring_pass.start(x, x, waits_in_kernel=True)
    if group.rank == 0:
        ring_pass.run(lambda *_, **__: None)
        backend.group.meeting.cuda.drain(threading.get_ident())  # type: ignore[attr-defined]
    return group.failures, [backend, ring_pass, x]


@pytest.mark.parametrize(
    ("direction", "missed"),
    [
        ("forward", "forward hop 1: K/V of"),
        ("gathered", "forward hop 1: K/V of"),
        ("backward", "backward hop 1: dK/dV of"),
    ],
)
def test_a_rank_that_waits_in_vain_names_hop_and_peer_and_goes_on(
    direction: str, missed: str
) -> None:
    results = Ranks(2, timeout_s=60.0).run(lambda group: _stalls(group, direction))
    (waited, _), (other, _) = results  # type: ignore[misc]
    assert other == []
    assert len(waited) == 1
    assert waited[0] == timed_out(f"{missed} rank 11", 4)


def _lost_in_a_call(group: dist.ProcessGroup) -> bool:
    """Whether the watchdog may still raise after this rank has raised an error itself."""
    own = RingGroup.of(group)
    backend = own.connections.backend = object.__new__(SymmetricBackend)
    backend._watchdog, backend.memory = mock.Mock(), mock.Mock()
    try:
        with own:
            raise torch.OutOfMemoryError("CUDA out of memory")
    except torch.OutOfMemoryError:
        return not backend._watchdog.give_up.called


def test_a_rank_that_raises_in_a_call_raises_once(ranks: processes.Ranks) -> None:
    """Its streams are released, and its main thread gets no second error."""
    assert processes.sacrifice(1, 4.0, _lost_in_a_call) == [False]
