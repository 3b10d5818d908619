"""If this fails, head dims between those of the kernels give wrong results, or V narrower than K
does. Head dims below a kernel's own, and those of the kernel for a narrower V, emulated on the CPU,
against float64: `make kernels` runs it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from ringfa3.build.units import Unit
from ringfa3.kernels import dispatch
from tests.support import backward_checks, forward_checks
from tests.support import head_dim_checks as checks
from tests.support.emulation import EAGERNESS, Machine, draws

pytestmark = [pytest.mark.kernels, pytest.mark.timeout(900)]

# (d, d_v). CI has the units of head dim 128; `-m soak` runs the others.
HEAD_DIMS = [
    (80, 80),
    (96, 72),
    *(
        pytest.param(dims, marks=pytest.mark.soak)
        for dims in ((8, 8), (40, 40), (56, 24), (96, 96), (136, 136), (192, 128), (248, 248))
    ),
]


def unit(direction: str, head_dims: tuple[int, int], dtype: torch.dtype = torch.bfloat16) -> Unit:
    d, d_v = head_dims
    found = dispatch.narrowest_unit(direction, dtype, d, v_dim=d_v)
    assert found is not None
    assert found.head_dim > d or (found.head_dim, found.v_dim) == head_dims
    return found


@pytest.mark.parametrize("head_dims", HEAD_DIMS, ids=str)
@pytest.mark.parametrize("cases", draws(4, 6), ids=str)
def test_the_function_holds_the_gate(
    emulated: Machine, head_dims: tuple[int, int], cases: range
) -> None:
    """Forward and backward of packed sequences."""
    for case in cases:
        emulated.settings(case, EAGERNESS[case % 4])
        checks.function_holds_the_gate(unit("backward", head_dims), head_dims, case, "cpu")


@pytest.mark.parametrize("head_dims", HEAD_DIMS, ids=str)
def test_the_forward_keeps_to_its_columns(emulated: Machine, head_dims: tuple[int, int]) -> None:
    emulated.settings(0, 0.3)
    checks.forward_keeps_to_its_columns(unit("forward", head_dims), head_dims, "cpu")


@pytest.mark.parametrize("head_dims", HEAD_DIMS, ids=str)
def test_forward_hops_hold_the_gate(emulated: Machine, head_dims: tuple[int, int]) -> None:
    emulated.settings(0, 0.3)
    checks.forward_hops_hold_the_gate(unit("forward", head_dims), head_dims, "cpu")


@pytest.mark.soak
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("check", forward_checks.OF_HOPS, ids=lambda check: check.__name__)
def test_hops_of_the_unit_for_a_narrower_v(
    emulated: Machine, check: Callable[..., None], dtype: torch.dtype
) -> None:
    """Head dims 192 and 128, which have a forward unit of their own."""
    torch.manual_seed(0)
    emulated.settings(0)
    own = unit("forward", (192, 128), dtype)
    assert (own.head_dim, own.v_dim) == (192, 128)
    check(own, "cpu")


@pytest.mark.parametrize("head_dims", HEAD_DIMS, ids=str)
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("splits", [False, True])
def test_the_backward_keeps_to_its_columns(
    emulated: Machine, head_dims: tuple[int, int], kind: torch.dtype, splits: bool
) -> None:
    emulated.settings(1, 0.3)
    checks.backward_keeps_to_its_columns(
        unit("backward", head_dims), head_dims, "cpu", kind, splits
    )


@pytest.mark.parametrize(
    "head_dims", [(96, 96), (96, 72), pytest.param((192, 128), marks=pytest.mark.soak)], ids=str
)
def test_backward_hops_hold_the_gate(emulated: Machine, head_dims: tuple[int, int]) -> None:
    emulated.settings(3, 0.3)
    backward_checks.hops_hold_the_gate(unit("backward", head_dims), "cpu", True, head_dims)
