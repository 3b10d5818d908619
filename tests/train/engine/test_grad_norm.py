"""If this fails, gradients are clipped by another norm than the true one. The norm of gradients and
the clip: the same whole and in shards, at any size, on the CPU."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.support.ranks import sacrifice
from train.engine.ddp import DDPEngine
from train.engine.engine import Engine
from train.engine.fsdp2 import FSDP2Engine

CPU = torch.device("cpu")
SIZE = 2_000_003  # a sum of squares in float32 is wrong by 1e-5 (random) to 1e-3 (equal elements)
KINDS = ["random", "equal", "spread"]


def gradient(kind: str) -> Tensor:
    drawn = torch.randn(SIZE, generator=torch.Generator().manual_seed(3))
    return {"random": drawn, "equal": torch.full((SIZE,), 0.1), "spread": drawn * drawn.exp()}[kind]


def exact_norm(whole: Tensor) -> float:
    return float(whole.double().square().sum().sqrt())


def engine_with(kind: type[Engine], gradients: list[Tensor]) -> Engine:
    """An engine that has only these gradients."""
    engine = kind.__new__(kind)
    engine.parallel = mock.Mock(device=CPU)
    engine.parameters = {str(n): nn.Parameter(part.detach()) for n, part in enumerate(gradients)}
    for parameter, part in zip(engine.parameters.values(), gradients, strict=True):
        parameter.grad = part.detach().clone()
    return engine


@pytest.mark.parametrize("kind", KINDS)
def test_norm_and_clip_are_exact_however_the_gradients_are_cut(kind):
    whole = gradient(kind)
    exact = exact_norm(whole)
    for parts in ([SIZE], [SIZE - 1, 1], [0, 255, 257, SIZE - 512], [5] * 9 + [SIZE - 45]):
        engine = engine_with(DDPEngine, list(whole.split(parts)))
        norm = engine.grad_norm(0.5)
        assert norm.dtype == torch.float32
        assert float(norm) == pytest.approx(exact, rel=1e-6)
        clipped = torch.cat([p.grad for p in engine.parameters.values()])
        torch.testing.assert_close(clipped, (whole.double() / exact / 2).float(), rtol=1e-6, atol=0)


def _sharded_norms(group: dist.ProcessGroup) -> list[float]:
    """Norms of sharded gradients, one of them on a single rank, then of hybrid shards."""
    norms = []
    meshes = [
        (DeviceMesh("cpu", [0, 1]), [Shard(0)]),
        (
            DeviceMesh("cpu", [[0, 1]], mesh_dim_names=("replicate", "shard")),
            [Replicate(), Shard(0)],
        ),
        (
            DeviceMesh("cpu", [[0], [1]], mesh_dim_names=("replicate", "shard")),
            [Replicate(), Shard(0)],
        ),
    ]
    for kind in KINDS:
        for mesh, places in meshes:
            parts = gradient(kind).split([SIZE - 1, 1])
            shards = [distribute_tensor(part, mesh, places) for part in parts]
            engine = engine_with(FSDP2Engine, shards)
            engine.mesh = mesh
            norms.append(float(engine.grad_norm(0.5)))
            clipped = torch.cat([p.grad.full_tensor() for p in engine.parameters.values()])
            norms.append(2 * exact_norm(clipped) * exact_norm(gradient(kind)))
    return norms


def test_fsdp2_has_the_norm_and_the_clip_of_ddp():
    expected = [exact_norm(gradient(kind)) for kind in KINDS for _ in range(6)]
    for norms in sacrifice(2, 60, _sharded_norms):
        assert norms == pytest.approx(expected, rel=1e-6)


def test_a_norm_below_the_limit_and_one_that_is_not_finite():
    small = torch.tensor([3e-3, 4e-3])
    engine = engine_with(DDPEngine, [small])
    assert float(engine.grad_norm(1.0)) == pytest.approx(5e-3)
    assert torch.equal(engine.parameters["0"].grad, small)
    for wrong in (float("nan"), float("inf")):
        engine.parameters["0"].grad[0] = wrong
        assert not engine.grad_norm(1.0).isfinite()
