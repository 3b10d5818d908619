"""If this fails, 8-bit forwards on a GPU are wrong. The forward kernels with 8-bit operands on a
Hopper GPU, against the reference."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from ringfa3 import flash_attn_varlen_func
from ringfa3.build.units import UNITS, Unit
from ringfa3.quantisation.formats import FORMATS
from tests.support import quantised_checks as checks
from tests.support.quantised_ring import ring_is_that_of_the_reference

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

UNITS = [pytest.param(u, id=u.name) for u in UNITS if u.precision in FORMATS]


@pytest.mark.parametrize("unit", UNITS)
def test_random_sequences_are_those_of_the_reference(unit: Unit) -> None:
    for case in range(40):
        checks.random_sequences(unit, "cuda", case)


@pytest.mark.parametrize("check", checks.CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("unit", UNITS)
def test_hard_cases_are_those_of_the_reference(
    unit: Unit, check: Callable[[Unit, str], None]
) -> None:
    check(unit, "cuda")


@pytest.mark.parametrize("unit", [x for x in UNITS if x.id.endswith("fp8")])
def test_powers_of_two_of_channels_change_no_bit(unit: Unit) -> None:
    checks.powers_of_two_of_channels_change_no_bit(unit, "cuda")


@pytest.mark.parametrize("unit", [x for x in UNITS if x.id.endswith("fp16-fp8")])
def test_values_at_the_ends_of_float16_give_finite_outputs(unit: Unit) -> None:
    checks.values_at_the_ends_of_float16_give_finite_outputs(unit, "cuda")


@pytest.mark.parametrize("unit", UNITS)
def test_a_ring_is_that_of_the_reference(unit: Unit) -> None:
    ring_is_that_of_the_reference(unit, "cuda")


@pytest.mark.parametrize("unit", UNITS)
def test_function_is_as_exact_as_on_the_cpu(unit: Unit) -> None:
    """Packed documents: rms difference from the reference on the CPU, which quantises by itself, at
    most that of `GPU_TOLERANCE`; LSE to .01 nats."""
    torch.manual_seed(0)
    cu, dtype = [0, 300, 301, 1000, 1900], getattr(torch, unit.dtype)
    q, k, v = (torch.randn(cu[-1], h, unit.head_dim).to(dtype) for h in (4, 2, 2))
    for causal in (False, True):
        (out, lse), (ref, ref_lse) = (
            flash_attn_varlen_func(
                *(x.to(device) for x in (q, k, v)),
                cu,
                cu,
                causal=causal,
                return_lse=True,
                precision=unit.precision,
            )
            for device in ("cuda", "cpu")
        )
        error = checks.rms(out.cpu().float() - ref.float())
        assert error <= checks.GPU_TOLERANCE[unit.precision][0] * checks.rms(ref.float())
        assert (lse.cpu() - ref_lse).abs().max() <= 0.01
