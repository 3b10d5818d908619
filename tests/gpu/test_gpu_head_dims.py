"""If this fails, head dims between those of the kernels give wrong results on a GPU. Head dims
below a kernel's own on a Hopper GPU, against float64: `pytest -m gpu`."""

from __future__ import annotations

import pytest
import torch

from ringfa3 import flash_attn_func, plan_context, ring_attn_func
from ringfa3.build.units import Unit
from ringfa3.kernels import dispatch
from tests.support import backward_checks
from tests.support import head_dim_checks as checks

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

# (d, d_v)
HEAD_DIMS = [(8, 8), (40, 40), (80, 80), (96, 96), (96, 72), (192, 192), (192, 128), (248, 248)]
DTYPES = (torch.bfloat16, torch.float16)


def unit(direction: str, head_dims: tuple[int, int], dtype: torch.dtype = DTYPES[0]) -> Unit:
    d, d_v = head_dims
    q = torch.empty(0, 1, d, device="cuda", dtype=dtype)
    assert dispatch.fallback_reason(direction, q, v_dim=d_v) is None
    found = dispatch.unit_for(direction, q, v_dim=d_v)
    assert found is not None
    assert found.head_dim > d or (found.head_dim, found.v_dim) == head_dims
    return found


@pytest.mark.parametrize("head_dims", HEAD_DIMS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_function_holds_the_gate(
    head_dims: tuple[int, int], dtype: torch.dtype, capsys: pytest.CaptureFixture[str]
) -> None:
    """Forward and backward of packed sequences, 30 cases; nothing is said of the PyTorch
    fallback."""
    for case in range(30):
        checks.function_holds_the_gate(unit("backward", head_dims, dtype), head_dims, case, "cuda")
    assert "PyTorch fallback" not in capsys.readouterr().err


@pytest.mark.parametrize("head_dims", HEAD_DIMS, ids=str)
def test_the_forward_keeps_to_its_columns(head_dims: tuple[int, int]) -> None:
    checks.forward_keeps_to_its_columns(unit("forward", head_dims), head_dims, "cuda")


@pytest.mark.parametrize("head_dims", HEAD_DIMS, ids=str)
def test_forward_hops_hold_the_gate(head_dims: tuple[int, int]) -> None:
    checks.forward_hops_hold_the_gate(unit("forward", head_dims), head_dims, "cuda")


@pytest.mark.parametrize("head_dims", HEAD_DIMS, ids=str)
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("splits", [False, True])
def test_the_backward_keeps_to_its_columns(
    head_dims: tuple[int, int], kind: torch.dtype, splits: bool
) -> None:
    checks.backward_keeps_to_its_columns(
        unit("backward", head_dims), head_dims, "cuda", kind, splits
    )


@pytest.mark.parametrize("head_dims", HEAD_DIMS, ids=str)
@pytest.mark.parametrize("deterministic", [False, True])
def test_backward_hops_hold_the_gate(head_dims: tuple[int, int], deterministic: bool) -> None:
    backward_checks.hops_hold_the_gate(
        unit("backward", head_dims), "cuda", deterministic, head_dims
    )


@pytest.mark.parametrize("head_dims", HEAD_DIMS, ids=str)
def test_a_ring_of_one_rank_equals_the_function(head_dims: tuple[int, int]) -> None:
    """out and LSE bit by bit; dq, dk, dv, which a ring sums in float32, to 2e-2 of the largest."""
    d, d_v = head_dims
    shapes = ((4, d), (2, d), (2, d_v))
    torch.manual_seed(0)
    qkv = [torch.randn(700, h, n, device="cuda", dtype=torch.bfloat16) for h, n in shapes]
    dout = torch.randn(700, 4, d_v, device="cuda", dtype=torch.bfloat16)
    plan = plan_context(700, (0, 1))
    results = []
    for ring in (False, True):
        leaves = [x.clone().requires_grad_() for x in qkv]
        if ring:
            out, lse = ring_attn_func(*leaves, plan, return_lse=True)
        else:
            batch = (x[None] for x in leaves)
            out, lse = (x[0] for x in flash_attn_func(*batch, causal=True, return_lse=True))
        results.append((out, lse, *torch.autograd.grad(out, leaves, dout)))
    for name, x, y in zip(("out", "lse", "dq", "dk", "dv"), *results, strict=True):
        if name in ("out", "lse"):
            assert torch.equal(x, y), name
        else:
            assert (x - y).abs().max() <= 2e-2 * x.abs().max(), name
