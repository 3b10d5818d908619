"""If this fails, sinks give wrong outputs or gradients in the kernels. Sinks in the kernels,
emulated on the CPU, against float64: `make kernels` runs it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from ringfa3.build.units import UNITS, Unit
from tests.support import sink_checks as checks
from tests.support.emulation import EAGERNESS, Machine

pytestmark = [pytest.mark.kernels, pytest.mark.timeout(900)]


def units(direction: str) -> list[object]:
    """CI has the unit of head dim 128; `-m soak` runs the others."""
    return [
        pytest.param(
            u, marks=[] if u.name == f"{direction}-d128-bf16" else pytest.mark.soak, id=u.name
        )
        for u in UNITS
        if (u.direction, u.precision, u.clips) == (direction, "native", False)
    ]


@pytest.mark.parametrize("check", checks.OF_FORWARD, ids=lambda check: check.__name__)
@pytest.mark.parametrize("unit", units("forward"))
def test_the_forward(emulated: Machine, check: Callable[..., None], unit: Unit) -> None:
    emulated.settings(0, 0.3)
    check(unit, "cpu")


@pytest.mark.parametrize("unit", units("backward"))
@pytest.mark.parametrize("with_dlse", [True, False])
def test_gradients(emulated: Machine, unit: Unit, with_dlse: bool) -> None:
    """dsink has the same bits in any order of threads and asynchronous operations."""
    found = []
    for seed in range(2 + with_dlse):
        emulated.settings(seed, EAGERNESS[seed + 1])
        found.append(checks.gradients_hold_the_gate(unit, "cpu", with_dlse))
    assert all(torch.equal(x, found[0]) for x in found)


@pytest.mark.parametrize("unit", units("backward"))
@pytest.mark.parametrize("check", checks.OF_CALLS, ids=lambda check: check.__name__)
def test_calls(emulated: Machine, check: Callable[..., None], unit: Unit) -> None:
    emulated.settings(0, 0.3)
    check(unit, "cpu")
