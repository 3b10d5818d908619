"""If this fails, head dims between those of the kernels give wrong results. Head dims below a
kernel's own, emulated on the CPU, against float64: `make kernels` runs it."""

from __future__ import annotations

import pytest
import torch

from ringfa3.build.units import Unit
from ringfa3.kernels import dispatch
from tests.support import backward_checks
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


def unit(direction: str, head_dims: tuple[int, int]) -> Unit:
    found = dispatch.narrowest_unit(direction, torch.bfloat16, head_dims[0])
    assert found is not None
    assert found.head_dim > head_dims[0]
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


@pytest.mark.parametrize("head_dims", [(96, 96), (96, 72)], ids=str)
def test_backward_hops_hold_the_gate(emulated: Machine, head_dims: tuple[int, int]) -> None:
    emulated.settings(3, 0.3)
    backward_checks.hops_hold_the_gate(unit("backward", head_dims), "cpu", True, head_dims)
