"""If this fails, `torch.compile` on a GPU fails, or computes other results. Compiled calls,
transforms and imports of attention on a GPU."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from ringfa3 import flash_attn_func, plan_context, ring_attn_func

pytestmark = pytest.mark.gpu

FIRST_CALLS = """
import sys, torch
from ringfa3 import flash_attn_func, host
x = torch.randn(1, 300, 2, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
for _ in range(3):
    flash_attn_func(x, x, x, causal=True).float().sum().backward()
heavy = [n for n in ("torch._dynamo", "torch._inductor", "sympy") if n in sys.modules]
print(heavy, host._selected)
"""


def test_eager_calls_import_no_compiler() -> None:
    """Three calls, forward and backward, of which the host library replays the last."""
    run = subprocess.run([sys.executable, "-c", FIRST_CALLS], capture_output=True, text=True)
    assert run.stdout.startswith("[]"), run.stdout + run.stderr


def inputs() -> list[torch.Tensor]:
    g = torch.Generator("cuda").manual_seed(0)
    shapes = [(300, h, 64) for h in (4, 2, 2)]
    return [torch.randn(s, generator=g, device="cuda").bfloat16() for s in shapes]


def test_gradients_of_transforms() -> None:
    """grad, and vmap over it, of a deterministic call: the bits of plain autograd."""
    q, k, v = inputs()

    def loss(x: torch.Tensor) -> torch.Tensor:
        out = flash_attn_func(x[None], k[None], v[None], causal=True, deterministic=True)
        assert isinstance(out, torch.Tensor)
        return out.float().sin().sum()

    for _ in range(3):
        leaf = q.clone().requires_grad_()
        (wanted,) = torch.autograd.grad(loss(leaf), leaf)
        assert torch.equal(torch.func.grad(loss)(q), wanted)
        per_sample = torch.func.vmap(torch.func.grad(loss))(torch.stack((q, q)))
        assert torch.equal(per_sample, torch.stack((wanted, wanted)))


def test_a_window_inside_a_graph() -> None:
    """inductor, one rank, three plans: the outputs and gradients of the eager call, to the bit."""

    def attend(x: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: object) -> torch.Tensor:
        out = ring_attn_func(x, k, v, plan.with_window((64, 0)), deterministic=True)  # type: ignore[attr-defined]
        assert isinstance(out, torch.Tensor)
        return plan.unshard(out)  # type: ignore[attr-defined]

    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True)
    for cut in (100, 150, 299):
        plan = plan_context([0, cut, 300], (0, 1))
        results = []
        for run in (compiled, attend):
            leaves = [x.requires_grad_() for x in inputs()]
            out = run(*leaves, plan)
            results.append((out, *torch.autograd.grad(out.float().sin().sum(), leaves)))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
