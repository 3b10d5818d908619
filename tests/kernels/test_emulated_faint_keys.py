"""If this fails, keys with small weights are lost, or become NaN. Keys far below their row's
leader, emulated on the CPU, against float64: `make kernels`."""

from __future__ import annotations

import pytest
import torch

from tests.support import faint_keys as checks
from tests.support.emulation import EAGERNESS, Machine, draws, unit

pytestmark = [pytest.mark.kernels, pytest.mark.timeout(600)]

# CI has the fp16 unit of head dim 128; `-m soak` runs the others.
SHAPES = [(torch.float16, 128)] + [
    pytest.param(dtype, d, marks=pytest.mark.soak)
    for dtype in (torch.float16, torch.bfloat16)
    for d in (64, 128, 256)
    if (dtype, d) != (torch.float16, 128)
]


@pytest.mark.parametrize(("dtype", "d"), SHAPES, ids=str)
def test_one_launch_holds_the_gate(emulated: Machine, dtype: torch.dtype, d: int) -> None:
    emulated.settings(0)
    checks.a_last_key_leads(dtype, d, "cpu")
    for case in range(4):
        emulated.settings(case, EAGERNESS[case % 4])
        checks.one_launch_holds_the_gate(dtype, d, case, "cpu", most=700)


@pytest.mark.parametrize(("dtype", "d"), SHAPES, ids=str)
@pytest.mark.parametrize("cases", draws(6, 12), ids=str)
def test_hops_hold_the_gate(emulated: Machine, dtype: torch.dtype, d: int, cases: range) -> None:
    of_shape = unit("forward", torch.empty(0, 1, d, dtype=dtype))
    for case in cases:
        emulated.settings(case, EAGERNESS[case % 4])
        checks.hops_hold_the_gate(of_shape, case, "cpu", most=700)


@pytest.mark.parametrize(("dtype", "d"), SHAPES, ids=str)
def test_keys_after_millions_keep_their_weight(
    emulated: Machine, dtype: torch.dtype, d: int
) -> None:
    emulated.settings(0)
    checks.later_keys_keep_their_weight(unit("forward", torch.empty(0, 1, d, dtype=dtype)), "cpu")
