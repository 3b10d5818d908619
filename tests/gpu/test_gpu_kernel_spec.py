"""If this fails, plans from a data loader's worker give other results than plans of the process
itself. Plans that another process has prepared, against calls that start in Python, bit for bit:
`pytest -m gpu`."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from ringfa3 import KernelSpec, host, plan_context, ring_attn_func
from ringfa3.planning.context_plan import ContextPlan
from ringfa3.schedules.link import schedules_built
from ringfa3.symmetric.forward_mode import FORWARD_MODE_ENV, FORWARD_MODES
from tests.gpu.test_gpu_ring_programs import spawn
from tests.support.gpus import require_gpus, worlds

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

CU_SEQLENS = [0, 700, 1000, 1001, 4096]
HEADS, KV_HEADS = 8, 2
Results = list[torch.Tensor]


def plain(rank: int, world: int) -> ContextPlan:
    """A further plan, which no loader has prepared."""
    plan: ContextPlan = pickle.loads(pickle.dumps(plan_context(CU_SEQLENS, (rank, world))))
    plan.prepared.clear()
    return plan


def sent(rank: int, world: int, head_dim: int) -> ContextPlan:
    """A prepared plan as a worker of a data loader sends it."""
    sms = torch.cuda.get_device_properties("cuda").multi_processor_count
    spec = KernelSpec(HEADS, KV_HEADS, head_dim, num_sms=sms, deterministic=True)
    made = plain(rank, world)
    spec.prepare(made)
    assert len(made.prepared) == 2
    plan: ContextPlan = pickle.loads(pickle.dumps(made))
    return plan


def step(plan: ContextPlan, head_dim: int, seed: int, device: str = "cuda") -> Results:
    """Out and gradients of the rank's tokens."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(heads: int) -> torch.Tensor:
        shape = (plan.local_tokens, heads, head_dim)
        x = torch.randn(*shape, generator=generator, device="cuda", dtype=torch.bfloat16)
        return x.to(device)

    leaves = [normal(n).requires_grad_() for n in (HEADS, KV_HEADS, KV_HEADS)]
    out = ring_attn_func(*leaves, plan, deterministic=True)
    assert isinstance(out, torch.Tensor)
    return [out.detach(), *torch.autograd.grad(out, leaves, normal(HEADS))]


def compare(plan: ContextPlan, unprepared: ContextPlan, head_dim: int) -> None:
    """Bits of Python's own plan, and no schedule built. Then calls of the same shapes replay."""
    host.select("python")
    wanted = [step(unprepared, head_dim, seed) for seed in range(2)]
    host.select("cpp")
    before = schedules_built()
    for turn in range(6):  # the first links, the last is replayed
        counts = host.counts()
        got = step(plan, head_dim, turn % 2)
        for name, x, y in zip(("out", "dq", "dk", "dv"), got, wanted[turn % 2], strict=True):
            assert torch.equal(x, y), f"turn {turn}: {name}"
    assert host.counts()["replayed"] == counts["replayed"] + 2
    assert schedules_built() == before


@contextmanager
def cpp() -> Iterator[None]:
    before = host._selected
    try:
        yield
    finally:
        host.stop() if before is None else host.select(before)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_one_rank(head_dim: int) -> None:
    with cpp():
        compare(sent(0, 1, head_dim), plain(0, 1), head_dim)


def test_a_second_device() -> None:
    """One plan on two GPUs in turn, of which the second is not the current one."""
    require_gpus(2)
    with cpp():
        host.select("python")
        wanted = step(plain(0, 1), 128, 0)
        host.select("cpp")
        plan = plain(0, 1)
        for turn in range(6):
            device = f"cuda:{turn % 2}"
            for x, y in zip(step(plan, 128, 0, device), wanted, strict=True):
                assert torch.equal(x.to("cuda:0"), y), f"turn {turn}"


def _ranks(rank: int, world: int) -> None:
    group = torch.distributed.group.WORLD
    assert group is not None
    for mode in FORWARD_MODES:
        os.environ[FORWARD_MODE_ENV] = mode
        plans = (sent(rank, world, 128), plain(rank, world))
        compare(*(x.bound_to(group) for x in plans), 128)


@worlds(2, 4, soak=(3,))
def test_ranks(world: int) -> None:
    spawn(_ranks, world)
