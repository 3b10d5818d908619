"""If this fails, outputs of the kernels are wrong. The forward kernels, emulated on the CPU,
against float64: `make kernels` runs it."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from itertools import accumulate

import pytest
import torch

from ringfa3 import flash_attn_varlen_func
from ringfa3.kernels import dispatch
from tests.support import forward_checks as checks
from tests.support.emulation import EAGERNESS, Machine, draws, unit

pytestmark = [pytest.mark.kernels, pytest.mark.timeout(600)]

# CI has one unit; `-m soak` runs the others.
SHAPES = [(torch.bfloat16, 128)] + [
    pytest.param(dtype, d, marks=pytest.mark.soak)
    for dtype in (torch.bfloat16, torch.float16)
    for d in (64, 128, 256)
    if (dtype, d) != (torch.bfloat16, 128)
]


def random_cases_hold_the_gate(emulated: Machine, dtype: torch.dtype, d: int, cases: range) -> None:
    """max|x - ref| <= 2 max|x_pt - ref| + 1e-5, LSE to 1e-3; orders drawn at random."""
    for case in cases:
        rng = random.Random(1000 * d + case)
        torch.manual_seed(case)
        lengths = [
            (n, n if case % 2 else rng.choice(checks.LENGTHS))
            for n in (rng.choice(checks.LENGTHS) for _ in range(rng.randint(1, 4)))
        ]
        if not all(map(sum, zip(*lengths, strict=True))):
            continue
        window = rng.choice(checks.WINDOWS)
        emulated.settings(case, EAGERNESS[case % 4])
        q, k, v = checks.inputs(rng, dtype, d, lengths, "cpu")
        cu_q, cu_k = (list(accumulate(n, initial=0)) for n in zip(*lengths, strict=True))
        out, lse = flash_attn_varlen_func(q, k, v, cu_q, cu_k, window_size=window, return_lse=True)
        what = f"case {case}: {lengths}, window {window}, heads {q.shape[1]}:{k.shape[1]}"
        checks.hold_gate((out, lse), (q, k, v), lengths, window, what)


@pytest.mark.parametrize(("dtype", "d"), SHAPES)
@pytest.mark.parametrize("cases", draws(12, 24), ids=str)
def test_random_sequences_hold_the_gate(
    emulated: Machine, dtype: torch.dtype, d: int, cases: range
) -> None:
    random_cases_hold_the_gate(emulated, dtype, d, cases)


@pytest.mark.soak
@pytest.mark.parametrize("share", [0.0, 1e9], ids=["usual", "short"])
def test_both_units_of_head_dim_64_hold_the_gate(
    emulated: Machine, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random cases and rising scores with each unit, whatever the lengths."""
    monkeypatch.setattr(dispatch, "SHORT_SHARE", share)
    monkeypatch.setattr(dispatch, "LONG_ROWS", 10**9)
    random_cases_hold_the_gate(emulated, torch.bfloat16, 64, range(24))
    checks.rising_scores_hold_the_gate(torch.bfloat16, 64, "cpu")
    checks.bits_do_not_depend_on_neighbours(torch.bfloat16, 64, "cpu")


@pytest.mark.parametrize(("dtype", "d"), SHAPES)
def test_rising_and_falling_scores(emulated: Machine, dtype: torch.dtype, d: int) -> None:
    """Each block raises the shift of the one before, or none does; the same gate."""
    torch.manual_seed(0)
    emulated.settings(0)
    checks.rising_scores_hold_the_gate(dtype, d, "cpu")


@pytest.mark.parametrize(("dtype", "d"), SHAPES)
def test_bits_do_not_depend_on_a_neighbour(emulated: Machine, dtype: torch.dtype, d: int) -> None:
    torch.manual_seed(0)
    emulated.settings(0)
    checks.bits_do_not_depend_on_neighbours(dtype, d, "cpu")


@pytest.mark.parametrize(("dtype", "d"), SHAPES)
def test_nan_and_inf_stay_in_their_document(emulated: Machine, dtype: torch.dtype, d: int) -> None:
    """Documents shorter than a block have foreign rows of K and V in it."""
    lengths = [40, 7, 128, 30, 1, 90]
    cu = list(accumulate(lengths, initial=0))
    torch.manual_seed(0)
    outs = []
    for spoilt in (False, True):
        emulated.settings(0)
        torch.manual_seed(0)
        q, k, v = (torch.randn(cu[-1], 2, d).to(dtype) for _ in range(3))
        for bad in (1, 3) if spoilt else ():
            here = slice(cu[bad], cu[bad + 1])
            k[here], v[here] = torch.nan, torch.inf
        outs.append(flash_attn_varlen_func(q, k, v, cu, cu, causal=True))
    for i in (0, 2, 4, 5):
        here = slice(cu[i], cu[i + 1])
        assert torch.equal(outs[0][here], outs[1][here]), f"document {i}"


OFFSETS = checks.hops_with_offset_scores_hold_the_gate
OF_HOPS = [
    pytest.param(partial(OFFSETS, combinations="pairs"), id="offset scores"),
    pytest.param(
        partial(OFFSETS, combinations="others"), id="offset scores, others", marks=pytest.mark.soak
    ),
    *(pytest.param(check, id=check.__name__) for check in checks.OF_HOPS if check is not OFFSETS),
]


@pytest.mark.parametrize("check", OF_HOPS)
@pytest.mark.parametrize(("dtype", "d"), SHAPES)
def test_hops_merge_wherever_their_scores_lie(
    emulated: Machine, check: Callable[..., None], dtype: torch.dtype, d: int
) -> None:
    torch.manual_seed(0)
    emulated.settings(0)
    check(unit("forward", torch.empty(0, 1, d, dtype=dtype)), "cpu")


@pytest.mark.parametrize(("dtype", "d"), SHAPES)
def test_large_values_hold_the_gate(emulated: Machine, dtype: torch.dtype, d: int) -> None:
    torch.manual_seed(0)
    emulated.settings(0)
    checks.large_values_hold_the_gate(dtype, d, "cpu")
