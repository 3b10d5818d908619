"""If this fails, gradients on a GPU are wrong. The backward kernels on a Hopper GPU against
float64: `pytest -m gpu`."""

from __future__ import annotations

import pytest
import torch

from ringfa3 import flash_attn_varlen_func
from ringfa3.build.units import UNITS, Unit
from ringfa3.kernels import dispatch, launch
from tests.support import backward_checks as checks

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

UNITS = [pytest.param(u, id=u.name) for u in UNITS if u.direction == "backward" and not u.clips]
BF16 = [u for u in UNITS if u.id is not None and u.id.endswith("bf16")]


@pytest.mark.parametrize("unit", UNITS)
def test_random_sequences_hold_the_gate(unit: Unit) -> None:
    """60 cases, every fifth deterministic; what nothing sees has gradient 0."""
    for case in range(60):
        p = checks.random_problem(case, unit, "cuda", longest=1500)
        if p is None:
            continue
        got = checks.differentiate(unit, p, deterministic=case % 5 == 0, free_sms=case % 3 * 8)
        what = f"case {case}: {p.lengths}, window {p.window}, heads {p.q.shape[1]}:{p.k.shape[1]}"
        checks.hold_gate(got, p, what)


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("deterministic", [False, True])
def test_ctas_with_several_tiles_hold_the_gate(unit: Unit, deterministic: bool) -> None:
    """All SMs with several whole tiles each, and one CTA that runs all tiles."""
    p = checks.problem(3, unit, "cuda", [(1000, 1000)] * 3, (16, 8), (-1, 0))
    most = launch.num_ctas(p.q.device) - 1
    for free in (0, most):
        got = checks.differentiate(unit, p, deterministic, free)
        checks.hold_gate(got, p, f"{free} SMs free")


@pytest.mark.parametrize("unit", UNITS)
def test_large_lse_is_exact(unit: Unit) -> None:
    checks.large_lse_is_exact(unit, "cuda")


@pytest.mark.parametrize("unit", UNITS)
def test_nan_and_inf_stay_in_their_document(unit: Unit) -> None:
    checks.nan_and_inf_stay_in_their_document(unit, "cuda")


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("deterministic", [False, True])
def test_hops_hold_the_gate(unit: Unit, deterministic: bool) -> None:
    checks.hops_hold_the_gate(unit, "cuda", deterministic)


@pytest.mark.parametrize("unit", BF16)
def test_deterministic_gradients_have_the_same_bits(unit: Unit) -> None:
    checks.same_bits(unit, "cuda", 20, lambda _: None)


@pytest.mark.soak
@pytest.mark.parametrize("unit", BF16)
def test_a_thousand_deterministic_runs_have_the_same_bits(unit: Unit) -> None:
    checks.same_bits(unit, "cuda", 1000, lambda _: None)


@pytest.mark.parametrize("unit", BF16)
def test_the_public_function_runs_on_the_kernels(unit: Unit) -> None:
    p = checks.problem(1, unit, "cuda", [(700, 700), (90, 90)], (4, 2), (-1, 0))
    assert dispatch.fallback_reason("backward", p.q) is None
    leaves = [x.detach().clone().requires_grad_() for x in (p.q, p.k, p.v)]
    cu = [0, 700, 790]
    out, lse = flash_attn_varlen_func(*leaves, cu, cu, causal=True, return_lse=True)
    got = torch.autograd.grad((out, lse), leaves, (p.dout, p.dlse))
    checks.hold_gate(list(got), p, unit.name)


@pytest.mark.parametrize("unit", BF16)
def test_a_step_in_a_graph_equals_an_eager_step_bit_by_bit(unit: Unit) -> None:
    """Forward and backward are programmatic dependent launches. Up to three replays queue up, on
    fresh inputs each turn."""
    p = checks.problem(1, unit, "cuda", [(700, 700), (2000, 2000)], (4, 2), (-1, 0))
    leaves = [x.detach().clone().requires_grad_() for x in (p.q, p.k, p.v)]
    cu = [0, 700, 2700]

    def step() -> tuple[torch.Tensor, ...]:
        out = flash_attn_varlen_func(*leaves, cu, cu, causal=True, deterministic=True)
        assert isinstance(out, torch.Tensor)
        return out.detach(), *torch.autograd.grad(out, leaves, p.dout)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for turn in range(20):
        with torch.no_grad():
            for x in leaves:
                x.normal_()
            for y in captured:
                y.fill_(torch.nan)
        for _ in range(1 + turn % 3):
            graph.replay()
        assert all(torch.equal(x, y) for x, y in zip(captured, step(), strict=True)), turn
