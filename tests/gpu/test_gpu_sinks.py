"""If this fails, sinks give wrong outputs or gradients on a GPU. Sinks in the kernels on a Hopper
GPU, against float64: `pytest -m gpu`."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from ringfa3.build.units import UNITS, Unit
from tests.support import sink_checks as checks

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


def units(direction: str) -> list[object]:
    return [
        pytest.param(u, id=u.name)
        for u in UNITS
        if (u.direction, u.precision, u.clips) == (direction, "native", False)
    ]


@pytest.mark.parametrize("check", checks.OF_FORWARD, ids=lambda check: check.__name__)
@pytest.mark.parametrize("unit", units("forward"))
def test_the_forward(check: Callable[..., None], unit: Unit) -> None:
    check(unit, "cuda")


@pytest.mark.parametrize("unit", units("backward"))
@pytest.mark.parametrize("with_dlse", [True, False])
def test_gradients(unit: Unit, with_dlse: bool) -> None:
    """dsink has the same bits in each of 20 runs."""
    found = [checks.gradients_hold_the_gate(unit, "cuda", with_dlse) for _ in range(20)]
    assert all(torch.equal(x, found[0]) for x in found)


@pytest.mark.parametrize("unit", units("backward"))
@pytest.mark.parametrize("check", checks.OF_CALLS, ids=lambda check: check.__name__)
def test_calls(check: Callable[..., None], unit: Unit) -> None:
    check(unit, "cuda")
