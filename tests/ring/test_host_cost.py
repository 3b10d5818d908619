"""If this fails, ring calls take more time of the CPU, and GPUs wait. Host cost of a ring call
after the first of its kind: counted, because times vary by machine."""

from __future__ import annotations

import gc
import itertools
import re
import subprocess
import sys
import threading
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from ringfa3 import plan_context, ring_attn_func
from ringfa3.planning.row_exchange import RowIndex
from ringfa3.planning.tiling import Plan
from ringfa3.ring import prepare_call
from ringfa3.ring.agreement import Agreements
from ringfa3.ring.group import RingGroup
from ringfa3.ring.levels.flow_messages import FlowParts
from ringfa3.symmetric import schedule, self_test
from ringfa3.symmetric.backend import SymmetricBackend
from ringfa3.symmetric.ipc_memory import IpcMemory
from ringfa3.symmetric.ring_pass import SymmetricRingPass
from ringfa3.symmetric.self_test import open_backend
from ringfa3.symmetric.stream_ops import BufferSpec
from tests.support.fake_cuda import Call, FakeCuda, Ranks
from tests.support.fake_group import FakeGroup
from tests.support.placements import laid_out
from tests.support.ranks import Ranks as Processes
from tests.support.ranks import group_of

STEPS = 3
DIRECTIONS = ("forward", "gathered", "backward", "backward", "gathered", "backward")


def unexpected(*_: object) -> None:
    raise AssertionError("a call prepares something again")


VIEWS = ("aten.select.int", "aten.slice.Tensor", "aten.unbind.int")


class Tensors(TorchDispatchMode):
    """Records the names of tensor operations that are no views."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if str(func) not in VIEWS:
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class Counting(FakeCuda):
    """Counts the driver calls of each thread."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.count: dict[int, int] = {}

    def issue(self, calls: list[Call]) -> None:
        me = threading.get_ident()
        self.count[me] = self.count.get(me, 0) + len(calls)
        super().issue(calls)


def _steady(group: FakeGroup, meet: threading.Barrier) -> dict[str, tuple[list[str], int]]:
    """Tensor operations and number of driver calls, of a call of each kind."""
    backend = open_backend(group, torch.device("cpu"))  # type: ignore[arg-type]
    assert isinstance(backend, SymmetricBackend)
    plan = laid_out([64], group.world).plans[group.rank]
    x = torch.ones(plan.local_tokens, 1, 2)
    cuda: Any = group.meeting.cuda
    costs = {}
    for step, direction in itertools.product(range(STEPS), DIRECTIONS):
        if (step, direction) == (STEPS - 1, "forward"):
            meet.wait()  # every rank has prepared all its calls
        before = cuda.count[threading.get_ident()]
        with Tensors() as tensors:
            ring_pass = SymmetricRingPass(backend, plan, direction)
            ring_pass.start(x, x, waits_in_kernel=direction == "gathered")
            ring_pass.run(lambda *_, **__: None)
        costs[direction] = tensors.names, cuda.count[threading.get_ident()] - before
    return costs


@pytest.mark.parametrize(
    ("world", "calls"), [(2, (8, 10, 14)), (3, (12, 12, 24)), (4, (18, 14, 41))]
)
def test_a_repeated_call_over_symmetric_prepares_nothing(
    world: int, calls: tuple[int, int, int]
) -> None:
    """No schedule, no memory, no tensor but the gradients. Here the PyTorch fallback moves the
    rank's rows.

    calls: driver calls of a forward, a gathered forward and a backward, on the rank with most.
    """
    ranks = Ranks(world)
    ranks.cuda = Counting(0)
    patches = [
        mock.patch.object(schedule, "forward", unexpected),
        mock.patch.object(schedule, "gathered", unexpected),
        mock.patch.object(schedule, "backward", unexpected),
        mock.patch.object(SymmetricBackend, "prepare", unexpected),
        mock.patch.object(IpcMemory, "_allocate", unexpected),
        mock.patch.object(BufferSpec, "__init__", unexpected),
    ]

    def forbid_preparation() -> None:
        for patch in patches:
            patch.start()

    meet = threading.Barrier(world, forbid_preparation, timeout=20.0)
    try:
        with mock.patch.multiple(self_test, TEST_TOKENS=8, TEST_S=5.0):
            results = ranks.run(lambda group: _steady(group, meet))
    finally:
        mock.patch.stopall()
    copies = ["aten.copy_.default"] * 2  # of K and V
    added = ["aten.add_.Tensor"] * (max(world - 3, 0) + min(world - 1, 2))
    rounded = ["aten._to_copy.default"] * 2
    for costs in results:
        assert costs["forward"] == (copies, calls[0])
        assert costs["gathered"] == (2 * copies, calls[1])
        assert costs["backward"][0] == [*copies, "aten.new_empty.default", *added, *rounded]
    assert max(costs["backward"][1] for costs in results) == calls[2]


def _left_over(group: FakeGroup) -> int:
    """Number of tensors of finished calls that still exist."""
    backend = open_backend(group, torch.device("cpu"))  # type: ignore[arg-type]
    assert isinstance(backend, SymmetricBackend)
    plan = laid_out([64], group.world).plans[group.rank]
    x = torch.ones(plan.local_tokens, 1, 2)
    made = []
    for _ in range(STEPS):
        workspace = torch.zeros(8)  # held by the closure that computes the hops
        ring_pass = SymmetricRingPass(backend, plan, "backward")
        ring_pass.start(x, x)
        ring_pass.run(lambda *_, held=workspace, **__: None)
        made += [weakref.ref(workspace), *map(weakref.ref, ring_pass.grads)]
        del workspace, ring_pass
    return sum(tensor() is not None for tensor in made)


def test_a_finished_call_holds_no_memory() -> None:
    """Freed at once, without the garbage collector: a layer's workspace may have gigabytes."""
    gc.disable()
    try:
        with mock.patch.multiple(self_test, TEST_TOKENS=8, TEST_S=5.0):
            assert Ranks(2).run(_left_over) == [0, 0]
    finally:
        gc.enable()


def _steps(_: dist.ProcessGroup, world: int) -> list[int]:
    group = group_of(world, 20.0)
    if dist.get_rank() >= world:
        return []
    plan = plan_context([0, 40, 41, 150], group)
    x = torch.ones(plan.local_tokens, 2, 8, requires_grad=True)

    def step() -> None:
        ring_attn_func(x, x, x, plan).sum().backward()

    step()
    dist.barrier(group)
    own = RingGroup.of(group)
    own.agreements.store = None  # type: ignore[assignment]  # any use of it fails
    with (
        mock.patch.object(Agreements, "exchange", unexpected),
        mock.patch.object(prepare_call, "_validate", unexpected),
        mock.patch.object(prepare_call, "ring_settings", unexpected),
        mock.patch.object(prepare_call, "select_forward_mode", unexpected),
        mock.patch.object(Plan, "_forward", unexpected),
        mock.patch.object(Plan, "_backward", unexpected),
        mock.patch.object(FlowParts, "of", unexpected),
        mock.patch.object(RowIndex, "of_each", unexpected),
    ):
        for _ in range(STEPS):
            step()
    return [own.calls.latest.number]


@pytest.mark.parametrize("world", [2, 4])
def test_a_repeated_call_needs_no_agreement(ranks: Processes, world: int) -> None:
    """Forward and backward use no store, no check, no tiling and no new list of messages."""
    assert ranks.run(4, _steps, world)[:world] == [[2 + 2 * STEPS]] * world


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["host_time", "ring_host_time", "first_call_time"])
def test_times_of_the_host_can_be_measured(name: str) -> None:
    """Commands that docs name, which nothing else runs. All times are above zero."""
    command = [sys.executable, "-m", f"tests.support.{name}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"^(?:forward|backward|gathered).*$", done.stdout, re.MULTILINE)
    assert len(rows) >= 2, done.stdout
    for row in rows:
        times = [float(x) for x in row.split()[-2:]]
        assert min(times) > 0, row
