"""If this fails, 8-bit attention on a GPU rounds its operands in another way than documented. The
quantisation kernels on a Hopper GPU against their definition: `pytest -m gpu`."""

from __future__ import annotations

import pytest
import torch

from ringfa3.build.units import UNITS, Unit
from ringfa3.kernels import quantise
from ringfa3.quantisation.formats import FORMATS
from tests.support import quantise_checks as checks

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

UNITS = [pytest.param(u, id=u.name) for u in UNITS if u.direction == "quantise"]
TOKENS = 16384


@pytest.mark.parametrize("precision", ["fp8", "int8"])
@pytest.mark.parametrize("unit", UNITS)
def test_operands_are_those_of_the_definition(unit: Unit, precision: str) -> None:
    checks.operands_are_those_of_the_definition(unit, "cuda", precision)


@pytest.mark.parametrize("precision", ["fp8", "int8"])
@pytest.mark.parametrize("unit", UNITS)
def test_backward_operands_are_those_of_the_forward(unit: Unit, precision: str) -> None:
    checks.backward_operands_are_those_of_the_forward(unit, "cuda", precision)


@pytest.mark.parametrize("precision", ["fp8", "int8"])
@pytest.mark.parametrize("unit", UNITS)
def test_boxes_are_refilled(unit: Unit, precision: str) -> None:
    checks.boxes_are_refilled(unit, "cuda", precision, repeats=400)


@pytest.mark.parametrize("precision", ["fp8", "int8"])
@pytest.mark.parametrize("unit", UNITS)
def test_bad_input_stays_where_it_is(unit: Unit, precision: str) -> None:
    checks.bad_input_stays_where_it_is(unit, "cuda", precision)


@pytest.mark.parametrize("precision", ["fp8", "int8"])
@pytest.mark.parametrize("unit", UNITS)
def test_statistics_hold(unit: Unit, precision: str) -> None:
    checks.statistics_hold(unit, "cuda", precision)
    checks.statistics_of_ranks_are_combined(unit, "cuda", precision)


@pytest.mark.parametrize("unit", UNITS)
def test_v_of_every_magnitude_is_that_of_the_definition(unit: Unit) -> None:
    checks.v_of_every_magnitude(unit, "cuda")


@pytest.mark.parametrize("unit", UNITS)
def test_statistics_have_the_same_bits_in_every_run(unit: Unit) -> None:
    """100 runs; a bandwidth-bound kernel runs beside every second one."""
    _, k, v = checks.tensors(unit, "cuda", TOKENS)
    centres = lambda: torch.stack(quantise.channel_statistics(unit, k, v, FORMATS["fp8"])[1])  # noqa: E731
    first = centres()
    side, busy = torch.cuda.Stream(), torch.empty(1 << 26, device="cuda")
    for n in range(100):
        if n % 2:
            with torch.cuda.stream(side):
                busy.add_(1)
        assert torch.equal(centres(), first), n
