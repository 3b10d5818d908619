"""If this fails, runs without communication fail, or a backend that cannot work is accepted. Runs
without communication, in groups of backend `fake`, and backends that are refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

import ringfa3
from ringfa3 import RingFA3Attention, flash_attn_func, plan_context, ring_attn_func

RANK, WORLD = 1, 4


@pytest.fixture
def fake_group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=WORLD)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def _tensors(kind: str) -> AbstractContextManager[Any]:
    return FakeTensorMode() if kind == "fake" else nullcontext()


@pytest.mark.parametrize("precision", ["native", "fp8", "int8"])
@pytest.mark.parametrize("kind", ["cpu", "fake", "meta"])
def test_shapes_and_dtypes_of_a_dry_run(
    fake_group: dist.ProcessGroup, kind: str, precision: str
) -> None:
    """Forward and backward of function and layer, `unshard` too. Real tensors are finite."""
    plan = plan_context([0, 300, 1000])
    layer = RingFA3Attention(4, 2, 64, precision=precision)
    device = "meta" if kind == "meta" else "cpu"
    assert ringfa3.connect() is None
    with _tensors(kind):
        q, k, v = (
            torch.ones(plan.local_tokens, h, 64, dtype=torch.bfloat16, device=device)
            for h in (4, 2, 2)
        )
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        out, lse = ring_attn_func(q, k, v, plan, return_lse=True, precision=precision)
        y = layer(q[None, :128], k[None, :128], v[None, :128])
        (out.sum() + lse.sum() + y.sum()).backward()
        whole = plan.unshard(out)
    assert (out.shape, out.dtype) == (q.shape, q.dtype)
    assert (lse.shape, lse.dtype) == ((4, plan.local_tokens), torch.float32)
    assert (y.shape, y.dtype) == ((1, 128, 4, 64), q.dtype)
    assert (whole.shape, whole.dtype) == ((1000, 4, 64), q.dtype)
    for x in (q, k, v):
        assert x.grad is not None
        assert (x.grad.shape, x.grad.dtype, x.grad.device) == (x.shape, x.dtype, x.device)
    if kind == "cpu":
        assert all(x.isfinite().all() for x in (out, lse, y, q.grad, k.grad, v.grad))


def test_what_a_rank_has_is_what_it_computes(fake_group: dist.ProcessGroup) -> None:
    """Documents that lie on this rank alone: its output is exact, as from one device."""
    plan = plan_context([0, 64, 128, 192, 256], layout="contiguous")
    assert plan.token_index.tolist() == list(range(64, 128))
    x = torch.randn(1, 64, 2, 16)
    out = ring_attn_func(x[0], x[0], x[0], plan)
    torch.testing.assert_close(out, flash_attn_func(x, x, x, causal=True)[0])


def test_a_wrong_argument_is_refused_in_a_dry_run(fake_group: dist.ProcessGroup) -> None:
    plan = plan_context(88)
    x = torch.ones(21, 2, 8)
    with pytest.raises(ValueError, match="q has 21 tokens; the plan gives this rank 22 of 88"):
        ring_attn_func(x, x, x, plan)
    with pytest.raises(TypeError, match="plan must come from plan_context"):
        ring_attn_func(x, x, x, None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="x_local has 21 tokens"):
        plan.unshard(x)


@pytest.mark.parametrize("backend", ["ucc", "mpi", "threaded", "cpu:mpi,cuda:ucc"])
def test_other_backends_are_refused_by_name(fake_group: dist.ProcessGroup, backend: str) -> None:
    """PyTorch's own tables name the backend: its libraries are not built here."""
    plan = plan_context(88)
    x = torch.ones(22, 2, 8)
    config = mock.patch.dict(c10d._world.pg_backend_config, {fake_group: backend})
    named = mock.patch.object(dist, "get_backend", return_value=backend)
    with config, named:
        for use in (
            lambda: ring_attn_func(x, x, x, plan),
            lambda: plan.unshard(x),
            lambda: ringfa3.connect(fake_group),
        ):
            with pytest.raises(ValueError, match=f"group: its backend is '{backend}': allowed"):
                use()
