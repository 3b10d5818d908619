"""If this fails, 8-bit attention rounds its operands in another way than documented. The
quantisation kernels, emulated on the CPU, against their definition: `make kernels`."""

from __future__ import annotations

import pytest
import torch

from ringfa3.build.units import UNITS, Unit
from ringfa3.kernels import quantise
from ringfa3.quantisation.formats import FORMATS
from tests.support import quantise_checks as checks
from tests.support.emulation import Machine

pytestmark = [pytest.mark.kernels, pytest.mark.timeout(900)]

# CI has head dim 128 in bfloat16; `-m soak` runs the others.
UNITS = [
    pytest.param(
        u,
        marks=[] if (u.head_dim, u.dtype) == (128, "bfloat16") else pytest.mark.soak,
        id=u.name,
    )
    for u in UNITS
    if u.direction == "quantise"
]


@pytest.mark.parametrize("precision", ["fp8", "int8"])
@pytest.mark.parametrize("unit", UNITS)
def test_operands_are_those_of_the_definition(
    emulated: Machine, unit: Unit, precision: str
) -> None:
    emulated.settings(0)
    checks.operands_are_those_of_the_definition(unit, "cpu", precision)


@pytest.mark.parametrize("precision", ["fp8", "int8"])
@pytest.mark.parametrize("unit", UNITS)
def test_backward_operands_are_those_of_the_forward(
    emulated: Machine, unit: Unit, precision: str
) -> None:
    emulated.settings(5)
    checks.backward_operands_are_those_of_the_forward(unit, "cpu", precision)


@pytest.mark.parametrize("precision", ["fp8", "int8"])
@pytest.mark.parametrize("unit", UNITS)
def test_bad_input_stays_where_it_is(emulated: Machine, unit: Unit, precision: str) -> None:
    emulated.settings(1)
    checks.bad_input_stays_where_it_is(unit, "cpu", precision)


@pytest.mark.parametrize("precision", ["fp8", "int8"])
@pytest.mark.parametrize("unit", UNITS)
def test_statistics_hold(emulated: Machine, unit: Unit, precision: str) -> None:
    emulated.settings(2)
    checks.statistics_hold(unit, "cpu", precision)


@pytest.mark.parametrize("precision", ["fp8", "int8"])
@pytest.mark.parametrize("unit", UNITS)
def test_statistics_of_ranks_are_combined(emulated: Machine, unit: Unit, precision: str) -> None:
    emulated.settings(3)
    checks.statistics_of_ranks_are_combined(unit, "cpu", precision)


@pytest.mark.parametrize("unit", UNITS)
def test_v_of_every_magnitude_is_that_of_the_definition(emulated: Machine, unit: Unit) -> None:
    emulated.settings(4)
    checks.v_of_every_magnitude(unit, "cpu")


@pytest.mark.parametrize("unit", UNITS)
def test_statistics_have_the_same_bits_in_any_order_of_ctas(emulated: Machine, unit: Unit) -> None:
    """Runs with other orders of warps, and with one, three or all CTAs at once."""
    _, k, v = checks.tensors(unit, "cpu", 1000)
    runs = []
    for seed, resident in ((0, 1), (1, 3), (2, 1 << 30)):
        emulated.settings(seed, resident_ctas=resident)
        statistics, _ = quantise.channel_statistics(unit, k, v, FORMATS["fp8"])
        runs.append(statistics.values)
    assert torch.equal(runs[0], runs[1])
    assert torch.equal(runs[0], runs[2])
