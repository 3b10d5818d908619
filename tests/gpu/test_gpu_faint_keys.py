"""If this fails, keys with small weights are lost, or become NaN. Keys far below their row's
leader, or below earlier hops, on a Hopper GPU: `pytest -m gpu`."""

from __future__ import annotations

import pytest
import torch

from ringfa3.build.units import UNITS, Unit
from ringfa3.kernels import dispatch
from tests.support import faint_keys as checks

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

DTYPES = (torch.float16, torch.bfloat16)
UNITS = [
    pytest.param(u, id=u.name)
    for u in UNITS
    if u.direction == "forward" and u.precision == "native" and not u.clips
]


@pytest.mark.parametrize("d", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_launch_holds_the_gate(dtype: torch.dtype, d: int) -> None:
    checks.a_last_key_leads(dtype, d)
    for case in range(60):
        checks.one_launch_holds_the_gate(dtype, d, case, most=4096 if case % 4 else 20000)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_short_unit_of_head_dim_64_holds_the_gate(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "SHORT_SHARE", 1e9)
    monkeypatch.setattr(dispatch, "LONG_ROWS", 10**9)
    for case in range(100, 140):
        checks.one_launch_holds_the_gate(dtype, 64, case)


@pytest.mark.parametrize("unit", UNITS)
def test_hops_hold_the_gate(unit: Unit) -> None:
    for case in range(60):
        checks.hops_hold_the_gate(unit, case)


@pytest.mark.parametrize("unit", UNITS)
def test_keys_after_millions_keep_their_weight(unit: Unit) -> None:
    torch.manual_seed(0)
    checks.later_keys_keep_their_weight(unit)
