"""If this fails, a rank publishes or adds up its K/V and dK/dV wrongly. The kernels for a rank's
local K/V, emulated on the CPU: `make kernels` runs it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ringfa3.build.units import UNITS, Unit
from tests.support import local_kv_checks as checks
from tests.support.emulation import Machine

pytestmark = [pytest.mark.kernels, pytest.mark.timeout(900)]


def units(*directions: str) -> list[object]:
    """CI has those of head dim 64 in bfloat16; `-m soak` runs the others."""
    return [
        pytest.param(u, marks=[] if "d64-bf16" in u.name else pytest.mark.soak, id=u.name)
        for u in UNITS
        if u.direction in directions and u.precision == "native" and not (u.short or u.clips)
    ]


@pytest.mark.parametrize("unit", units("forward", "backward"))
def test_rows_are_published(emulated: Machine, unit: Unit) -> None:
    emulated.settings(0)
    checks.rows_are_published(unit, "cpu")


@pytest.mark.parametrize("check", checks.CHECKS[1:], ids=lambda check: check.__name__)
@pytest.mark.parametrize("unit", units("backward"))
def test_gradients(emulated: Machine, check: Callable[[Unit, str], None], unit: Unit) -> None:
    emulated.settings(0)
    check(unit, "cpu")
