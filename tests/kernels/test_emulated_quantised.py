"""If this fails, 8-bit outputs of the kernels are wrong. The forward kernels with 8-bit operands,
emulated on the CPU, against the reference."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from ringfa3.build.units import FP8_VARIANTS, IN_KERNEL_TRANSPOSE, UNITS, Unit
from ringfa3.kernels import dispatch
from ringfa3.quantisation.formats import FORMATS
from tests.support import emulation
from tests.support import quantised_checks as checks
from tests.support.emulation import EAGERNESS, Machine, draws
from tests.support.quantised_ring import ring_is_that_of_the_reference

pytestmark = [pytest.mark.kernels, pytest.mark.timeout(900)]

# CI has head dim 128 in bfloat16; `-m soak` runs the others.
UNITS = [
    pytest.param(
        u,
        marks=[] if (u.head_dim, u.dtype) == (128, "bfloat16") else pytest.mark.soak,
        id=u.name,
    )
    for u in UNITS
    if u.precision in FORMATS
]


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("cases", draws(8, 16), ids=str)
def test_random_sequences_are_those_of_the_reference(
    emulated: Machine, unit: Unit, cases: range
) -> None:
    """`TOLERANCE`; orders drawn at random."""
    for case in cases:
        emulated.settings(case, EAGERNESS[case % 4])
        checks.random_sequences(unit, "cpu", case)


@pytest.mark.parametrize(
    "variant",
    [
        name if name == IN_KERNEL_TRANSPOSE else pytest.param(name, marks=pytest.mark.soak)
        for name in FP8_VARIANTS
    ],
)
@pytest.mark.parametrize("cases", draws(4, 8), ids=str)
def test_variants_of_the_ablation_are_those_of_the_reference(
    emulated: Machine, variant: str, cases: range
) -> None:
    """`TOLERANCE`; orders drawn at random."""
    q = torch.empty(0, 1, 128, dtype=torch.bfloat16)
    unit = emulation.unit("forward", q, "fp8").as_variant(variant)
    for case in cases:
        emulated.settings(case, EAGERNESS[case % 4])
        checks.random_sequences(unit, "cpu", case)


@pytest.mark.parametrize("check", checks.CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("unit", UNITS)
def test_hard_cases_are_those_of_the_reference(
    emulated: Machine, unit: Unit, check: Callable[[Unit, str], None]
) -> None:
    emulated.settings(0)
    check(unit, "cpu")


@pytest.mark.parametrize("unit", [x for x in UNITS if x.id.endswith("fp8")])
def test_powers_of_two_of_channels_change_no_bit(emulated: Machine, unit: Unit) -> None:
    emulated.settings(0)
    checks.powers_of_two_of_channels_change_no_bit(unit, "cpu")


@pytest.mark.parametrize("unit", [x for x in UNITS if x.id.endswith("fp16-fp8")])
def test_values_at_the_ends_of_float16_give_finite_outputs(emulated: Machine, unit: Unit) -> None:
    emulated.settings(0)
    checks.values_at_the_ends_of_float16_give_finite_outputs(unit, "cpu")


@pytest.mark.parametrize("unit", UNITS)
def test_a_ring_is_that_of_the_reference(
    emulated: Machine, unit: Unit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`ring_is_that_of_the_reference`, with the quantisation kernels too."""
    emulated.settings(0)

    def select_unit(
        direction: str, q: torch.Tensor, precision: str = "native", **options: object
    ) -> Unit:
        assert not options.get("clips")
        return emulation.unit(direction, q, precision)

    monkeypatch.setattr(dispatch, "_select_unit", select_unit)
    ring_is_that_of_the_reference(unit, "cpu")
