"""If this fails, a rank publishes or adds up its K/V and dK/dV wrongly. The kernels for a rank's
local K/V on a Hopper GPU against the reference: `pytest -m gpu`."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ringfa3.build.units import UNITS, Unit
from tests.support import local_kv_checks as checks

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


@pytest.mark.parametrize("check", checks.CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize(
    "unit",
    [pytest.param(u, id=u.name) for u in UNITS if u.direction == "backward" and not u.clips],
)
def test_rows_of_the_backward(check: Callable[[Unit, str], None], unit: Unit) -> None:
    check(unit, "cuda")


@pytest.mark.parametrize(
    "unit",
    [
        pytest.param(u, id=u.name)
        for u in UNITS
        if (u.direction, u.precision, u.short or u.clips) == ("forward", "native", False)
    ],
)
def test_rows_are_published_by_the_forward(unit: Unit) -> None:
    checks.rows_are_published(unit, "cuda")
