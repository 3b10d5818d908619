"""If this fails, `plan.shift` fills labels with a wrapped number. The `fill` of `plan.shift`: held
by the dtype of the rows, or refused."""

from __future__ import annotations

import math
import re

import pytest
import torch

from ringfa3 import plan_context

HOLDS = [
    (torch.bool, 1), (torch.uint8, 255), (torch.int8, -128), (torch.uint16, 65535),
    (torch.int64, -100), (torch.int32, 3.0), (torch.float16, 65504), (torch.bfloat16, 0.1),
    (torch.float16, math.inf), (torch.float32, math.nan), (torch.complex64, 1j),
]  # fmt: skip
HOLDS_NOT = [
    (torch.bool, 2), (torch.uint8, 256), (torch.uint8, -1), (torch.int8, -129),
    (torch.uint16, -100), (torch.int64, 0.5), (torch.int64, 2**63), (torch.int32, math.nan),
    (torch.int32, math.inf), (torch.float16, 65505), (torch.float32, 1e39), (torch.float64, 1j),
    (torch.int64, 1j),
]  # fmt: skip


@pytest.mark.parametrize(("dtype", "fill"), HOLDS)
def test_a_fill_is_what_the_dtype_makes_of_it(dtype: torch.dtype, fill: complex) -> None:
    moved = plan_context(3).shift(torch.zeros(3, dtype=dtype), 5, fill=fill)  # type: ignore[arg-type]
    torch.testing.assert_close(
        moved, torch.full((3,), fill, dtype=dtype), rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize(("dtype", "fill"), HOLDS_NOT)
def test_a_fill_that_the_dtype_cannot_hold_is_refused(dtype: torch.dtype, fill: complex) -> None:
    with pytest.raises(ValueError, match=rf"fill={re.escape(repr(fill))}: x is of {dtype}, which"):
        plan_context(3).shift(torch.zeros(3, dtype=dtype), 1, fill=fill)  # type: ignore[arg-type]


@pytest.mark.parametrize("fill", ["0", None, torch.tensor(1.0)])
def test_a_fill_that_is_no_number_is_refused(fill: object) -> None:
    with pytest.raises(TypeError, match=r"fill=.*: give a number"):
        plan_context(3).shift(torch.zeros(3), 1, fill=fill)  # type: ignore[arg-type]
