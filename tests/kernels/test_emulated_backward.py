"""If this fails, gradients of the kernels are wrong. The backward kernels, emulated on the CPU,
against float64: `make kernels` runs it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ringfa3 import flash_attn_func, flash_attn_varlen_func
from ringfa3.build.units import UNITS, Unit, select_units
from ringfa3.kernels import backward, dispatch
from ringfa3.kernels.backward import BackwardPass
from ringfa3.planning.work_split import SHARED, split_work
from tests.support import backward_checks as checks
from tests.support.emulation import EAGERNESS, PROCESSORS, Machine, draws
from tests.support.straight_through import relative

pytestmark = [pytest.mark.kernels, pytest.mark.timeout(900)]

# CI has one unit; `-m soak` runs the others.
UNITS = [
    pytest.param(u, marks=[] if u.name == "backward-d128-bf16" else pytest.mark.soak, id=u.name)
    for u in UNITS
    if u.direction == "backward" and not u.clips
]


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("cases", draws(10, 20), ids=str)
def test_random_sequences_hold_the_gate(emulated: Machine, unit: Unit, cases: range) -> None:
    """dq, dk, dv with and without dLSE; keys that no query sees have gradient 0."""
    for case in cases:
        p = checks.random_problem(case, unit, "cpu")
        if p is None:
            continue
        emulated.settings(case, EAGERNESS[case % 4])
        got = checks.differentiate(unit, p, deterministic=case % 5 == 0, free_sms=case % 2)
        what = f"case {case}: {p.lengths}, window {p.window}, heads {p.q.shape[1]}:{p.k.shape[1]}"
        checks.hold_gate(got, p, what)


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("group", [2, 1])
def test_a_split_tile_holds_the_gate(emulated: Machine, unit: Unit, group: int) -> None:
    """One tile for three CTAs, split between two query heads, or between the blocks of one."""
    emulated.settings(0, 0.3)
    p = checks.problem(2, unit, "cpu", [(700, unit.tile_n)], (group, 1), (-1, -1))
    tiling = p.plan.backward(unit.tile_n, unit.tile_m)[0]
    table = split_work(tiling, unit.tile_m, group, 1, PROCESSORS, unit.head_dim)
    assert len(table) > 1
    assert (table["flags"] & SHARED).all()
    assert (table["skip"] > 0).any() == (group == 1)
    checks.hold_gate(checks.differentiate(unit, p), p, "cut")


@pytest.mark.parametrize("unit", UNITS)
def test_large_lse_is_exact(emulated: Machine, unit: Unit) -> None:
    emulated.settings(0)
    checks.large_lse_is_exact(unit, "cpu")


@pytest.mark.parametrize("unit", UNITS)
def test_nan_and_inf_stay_in_their_document(emulated: Machine, unit: Unit) -> None:
    emulated.settings(0)
    checks.nan_and_inf_stay_in_their_document(unit, "cpu")


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("deterministic", [False, True])
def test_hops_hold_the_gate(emulated: Machine, unit: Unit, deterministic: bool) -> None:
    emulated.settings(3, 0.3)
    checks.hops_hold_the_gate(unit, "cpu", deterministic)


@pytest.mark.parametrize("unit", UNITS)
def test_deterministic_gradients_have_the_same_bits(emulated: Machine, unit: Unit) -> None:
    """In any order of threads and asynchronous operations."""
    checks.same_bits(unit, "cpu", 4, lambda n: emulated.settings(n, EAGERNESS[n]))


@pytest.mark.parametrize("unit", UNITS)
def test_units_of_a_tile_add_in_either_order_to_the_same_bits(
    emulated: Machine, unit: Unit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One resident CTA runs the deterministic units of a tile in the table's order, and reversed.

    Reference: float32 dK and dV of the table's order, exactly. Three units would differ."""
    emulated.settings(0, 0.3, resident_ctas=1)
    results = []
    for step in (1, -1):
        p = checks.problem(7, unit, "cpu", [(200, unit.tile_n)], (4, 1), (-1, 0))

        def split(*given: Any, step: int = step) -> np.ndarray:
            table = split_work(*given[:4], 132, *given[5:])[::step].copy()
            assert len(table) > 1
            assert (table["flags"] & SHARED).all()
            return table

        monkeypatch.setattr(backward, "split_work", split)
        rows = p.dout, p.dlse, p.q, p.out, p.lse
        run = BackwardPass(unit, *rows, p.plan, p.scale, True, 1)
        sums = [torch.empty(x.shape, dtype=torch.float32) for x in (p.k[..., : unit.head_dim], p.v)]
        tiling = p.plan.backward(unit.tile_n, unit.tile_m, True)[0]
        run.hop(p.k, p.v, tiling, *sums)
        checks.hold_gate([run.dq(), *(x.to(p.v.dtype) for x in sums)], p, f"step {step}")
        results.append(sums)
    for name, x, y in zip(("dk", "dv"), *results, strict=True):
        assert torch.equal(x, y), name


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("resident", [1, 2])
def test_dq_order_ends_with_few_resident_ctas(emulated: Machine, unit: Unit, resident: int) -> None:
    """Fewer than the three of the launch; other kernels, which may wait for it, have the rest."""
    emulated.settings(0, 0.3, resident_ctas=resident)
    p = checks.problem(7, unit, "cpu", [(65, 700)], (1, 1), (-1, 0))
    checks.hold_gate(checks.differentiate(unit, p, deterministic=True), p, f"{resident} resident")


def test_dq_order_needs_tiles_in_deterministic_order(emulated: Machine) -> None:
    """In another order the kernel could wait for ever."""
    emulated.settings(0)
    (unit,) = select_units(["backward-d128-bf16"])
    p = checks.problem(0, unit, "cpu", [(20, 20)], (1, 1), (-1, 0))
    run = BackwardPass(unit, p.dout, p.dlse, p.q, p.out, p.lse, p.plan, p.scale, True, 1)
    with pytest.raises(ValueError, match="needs a tiling of its plan"):
        run.hop(p.k, p.v, p.plan.backward(unit.tile_n, unit.tile_m)[0], p.k, p.v)


def test_one_call_of_hop_too_many_raises(emulated: Machine) -> None:
    """A pass has counters for the hops of the plan and one more: own keys may take two calls."""
    emulated.settings(0)
    (unit,) = select_units(["backward-d128-bf16"])
    p = checks.problem(0, unit, "cpu", [(20, 20)], (1, 1), (-1, 0))
    run = BackwardPass(unit, p.dout, p.dlse, p.q, p.out, p.lse, p.plan, p.scale, False, 1)
    (tiling,) = p.plan.backward(unit.tile_n, unit.tile_m)
    dk, dv = torch.empty_like(p.k), torch.empty_like(p.v)
    for _ in range(2):
        run.hop(p.k, p.v, tiling, dk, dv)
    for _ in range(2):  # nor does it take the next
        with pytest.raises(ValueError, match="3 calls of `hop`: the plan has 1 hops"):
            run.hop(p.k, p.v, tiling, dk, dv)


@pytest.mark.parametrize("unit", UNITS)
def test_kernels_that_start_early_wait(
    emulated: Machine, unit: Unit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Preprocess, backward and postprocess overlap, as programmatic launches do."""
    for seed in range(4):
        emulated.settings(seed, EAGERNESS[seed])
        p = checks.problem(seed, unit, "cpu", [(200, 200)], (2, 1), (-1, 0))
        with monkeypatch.context() as patch:
            patch.setattr(emulated, "finish", lambda: None)
            got = checks.differentiate(unit, p, deterministic=True)  # nothing to add up afterwards
        emulated.finish()
        checks.hold_gate(got, p, f"seed {seed}")


def test_the_public_function_runs_on_the_kernels(
    emulated: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward and backward in emulation, against the PyTorch fallback."""
    p = checks.problem(
        1, select_units(["backward-d128-bf16"])[0], "cpu", [(90, 90)], (2, 1), (-1, 0)
    )
    gradients = []
    for kernels_run in (True, False):
        emulated.settings(0)
        if not kernels_run:
            monkeypatch.setattr(dispatch, "unit_for", lambda *_: None)
        leaves = [x.detach().clone().requires_grad_() for x in (p.q, p.k, p.v)]
        out, lse = flash_attn_varlen_func(*leaves, [0, 90], [0, 90], causal=True, return_lse=True)
        gradients.append(torch.autograd.grad((out, lse), leaves, (p.dout, p.dlse)))
    for x, y in zip(*gradients, strict=True):
        assert not torch.equal(x, y), "both ran on the PyTorch fallback"
        assert (x - y).abs().max() < 5e-2
    checks.hold_gate(list(gradients[0]), p, "public function")


@pytest.mark.soak
@pytest.mark.parametrize("precision", ["fp8", "int8"])
def test_an_8_bit_backward_runs_on_the_kernels(emulated: Machine, precision: str) -> None:
    """GQA, K with a mean, a sink and a gradient of LSE: within .006 of the fallback's rms."""
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(1, 300, h, 128).bfloat16() for h in (2, 1, 1, 2))
    k, sink = k + 3, torch.randn(2)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "unit_for", lambda *_: None)
        out, lse = flash_attn_func(*leaves, precision=precision, return_lse=True, sink=sink)
        dlse = torch.randn_like(lse)
        expected = torch.autograd.grad((out, lse), leaves, (dout, dlse), retain_graph=True)
    emulated.settings(0, 0.3)
    got = torch.autograd.grad((out, lse), leaves, (dout, dlse))
    for x, y in zip(got, expected, strict=True):
        assert not torch.equal(x, y), "both ran on the PyTorch fallback"
        assert relative(x, y.double()) <= 0.006
