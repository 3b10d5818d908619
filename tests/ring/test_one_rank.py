"""If this fails, a plan for one rank is slower or computes something else than a plain call. A plan
for one rank in the C++ launcher, with kernels that keep their arguments."""

from __future__ import annotations

import gc
from typing import Any
from unittest import mock

import pytest
import torch

from ringfa3 import Mask, host, plan_context, ring_attn_func
from ringfa3.kernels.streams import CurrentStream
from ringfa3.planning import context_plan
from ringfa3.planning.context_plan import ContextPlan
from ringfa3.ring import op
from ringfa3.schedules import link
from tests.support.fake_kernels import FakeKernels
from tests.support.host_calls import equal

LENGTHS = [0, 70, 71, 200]
CLIPPED = Mask.documents(LENGTHS).with_bidirectional([80, 100, 120], [90, 110, 130])


def one_rank(cu_seqlens: list[int] | Mask) -> ContextPlan:
    return plan_context(cu_seqlens, (0, 1))


def step(plan: ContextPlan, sink: bool) -> list[torch.Tensor]:
    """Out, LSE and gradients, with a gradient of LSE."""
    generator = torch.Generator().manual_seed(0)
    shape = (plan.local_tokens, 4, 64), *[(plan.local_tokens, 2, 64)] * 2
    leaves = [torch.randn(x, generator=generator).bfloat16().requires_grad_() for x in shape]
    options: dict[str, Any] = {}
    if sink:
        leaves.append(torch.randn(4, generator=generator).requires_grad_())
        options["sink"] = leaves[3]
    out, lse = ring_attn_func(*leaves[:3], plan, return_lse=True, **options)
    grads = torch.randn(out.shape, generator=generator).bfloat16(), torch.ones_like(lse)
    return [out.detach(), lse.detach(), *torch.autograd.grad((out, lse), leaves, grads)]


@pytest.mark.parametrize(
    ("given", "sink"), [(LENGTHS, False), (LENGTHS, True), (CLIPPED, False)], ids=str
)
def test_later_calls_run_without_python(
    kernels: FakeKernels, given: list[int] | Mask, sink: bool
) -> None:
    """Launches are those of Python, in its order; results are its bits."""
    plan = one_rank(given)
    assert plan.hops.clipped.clips == (given is CLIPPED)
    host.select("python")
    kernels.take()
    wanted = step(plan, sink)
    launched = [x.name for x in kernels.take()]
    host.select("cpp")
    assert all(map(equal, step(plan, sink), wanted))
    before = host.counts()["replayed"]
    kernels.take()
    with mock.patch.object(op, "prepare_call", side_effect=AssertionError("Python runs the call")):
        assert all(map(equal, step(plan, sink), wanted))
    assert [x.name for x in kernels.take()] == launched
    assert len(launched) == 4
    assert host.counts()["replayed"] == before + 2


def test_each_device_has_its_own_program() -> None:
    """Default streams of two GPUs may share an id; the meta device stands for a second GPU."""
    ring_pass = host.ProgramPass(one_rank([0, 70]), "forward")
    library = mock.Mock()
    library.run.side_effect = lambda program, *_: program
    with (
        mock.patch.object(host, "library", return_value=library),
        mock.patch.object(host.dispatch, "unit_for"),
        mock.patch.object(host.CurrentStream, "of", lambda x: CurrentStream(x, 0, False, 0)),
        mock.patch.object(host, "_programs", {}),
        mock.patch.object(host, "schedule_of") as built,
        mock.patch.object(host, "link", side_effect=["a", "b"]),
        mock.patch.object(link, "num_ctas", return_value=132),
    ):
        found = []
        for device in ("cpu", "meta", "cpu", "meta"):
            k = torch.empty((70, 2, 64), device=device)
            found += ring_pass.run_schedule(k, (k,), 0.1, mock.Mock()) or ()
    assert found == ["a", "b"] * 2
    assert built.call_count == 1  # both link one schedule


def test_programs_die_with_their_plan(kernels: FakeKernels) -> None:
    """And with the library: another one builds its own."""
    plan = one_rank([0, 33, 90])
    step(plan, False)
    assert len(host._programs) == 1
    context_plan._cached_plan.cache_clear()
    del plan
    gc.collect()
    assert not host._programs
