"""If this fails, rings over NCCL give wrong results. The ring over NCCL on real GPUs, against
float64 on one device: `pytest -m gpu`."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from ringfa3 import flash_attn_varlen_func, plan_context, ring_attn_func
from tests.support.gpus import spawn, worlds

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


def plain_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: Sequence[int],
    window: tuple[int, int],
) -> torch.Tensor:
    """softmax(Q K^T / sqrt(d)) V with a dense mask, document by document, in the inputs' dtype."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    outs, start = [], 0
    for length in lengths:
        here = slice(start, start + length)
        s = torch.einsum("qhd,khd->hqk", q[here], k[here]) * q.shape[-1] ** -0.5
        index = torch.arange(length, device=q.device)
        diagonal = index.unsqueeze(0) - index.unsqueeze(1)
        left, right = (length if w < 0 else w for w in window)
        s = s.masked_fill((diagonal < -left) | (diagonal > right), -torch.inf)
        outs.append(torch.einsum("hqk,khd->qhd", s.softmax(-1), v[here]))
        start += length
    return torch.cat(outs)


def _worker(rank: int, world: int) -> None:
    rng = random.Random(world)
    for case in range(24):
        dtype = rng.choice((torch.bfloat16, torch.float16))
        lengths = [rng.choice((1, 2, 127, 128, rng.randint(1, 900))) for _ in range(6)]
        h, hk, d = rng.choice(((8, 2, 64), (4, 4, 128), (4, 1, 256)))
        causal = rng.random() < 0.7
        window = rng.choice(((-1, -1), (100, -1), (300, 50)))
        layout = rng.choice(("zigzag", "contiguous"))
        torch.manual_seed(case)
        total = sum(lengths)
        q, k, v, dout = (torch.randn(total, n, d, device="cuda") for n in (h, hk, hk, h))
        q, k, v, dout = (x.to(dtype) for x in (q, k, v, dout))

        cu = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
        plan = plan_context(cu, None, layout, causal, window)
        mine = [plan.shard(x).requires_grad_() for x in (q, k, v)]
        out = ring_attn_func(*mine, plan, transport="nccl")
        assert isinstance(out, torch.Tensor)
        out.backward(plan.shard(dout))
        got = [plan.unshard(x.detach()) for x in (out, *(x.grad for x in mine))]

        truth, plain = [], []
        for results, kind in ((truth, torch.float64), (plain, dtype)):
            inputs = [x.to(kind).requires_grad_() for x in (q, k, v)]
            y = plain_attention(*inputs, lengths, plan.effective_window)
            y.backward(dout.to(kind))
            results += [y.detach(), *(x.grad for x in inputs)]
        for name, x, reference, x_pt in zip(
            ["out", "dq", "dk", "dv"], got, truth, plain, strict=True
        ):
            error = (x - reference).abs().max().item()
            bound = 2 * (x_pt - reference).abs().max().item() + 1e-5
            assert error <= bound, f"case {case}: {name} is off by {error:.2e}, allowed {bound:.2e}"


def _worker_in_8_bits(rank: int, world: int) -> None:
    """Rms errors against float64 over one device's: of out and LSE at most 1.02, of gradients 1.1.

    The gradients go over `auto`, whose windows cut tiles of keys, and over nccl.
    """
    for precision, d, transport, window in (
        ("fp8", 128, "auto", (-1, -1)),
        ("int8", 128, "nccl", (-1, -1)),
        ("int8", 128, "auto", (300, -1)),
        ("fp8", 64, "auto", (300, -1)),
        ("fp8", 256, "auto", (300, -1)),
    ):
        torch.manual_seed(d)
        cu = torch.tensor([0, 1500, 1501, 2048])
        q, k, v, dout = (torch.randn(2048, n, d, device="cuda").bfloat16() for n in (4, 2, 2, 4))
        plan = plan_context(cu.tolist(), window_size=window)
        settings = {"causal": True, "window_size": window, "return_lse": True}
        exact = [x.double().cpu().requires_grad_() for x in (q, k, v)]
        one = [x.clone().requires_grad_() for x in (q, k, v)]
        mine = [plan.shard(x).requires_grad_() for x in (q, k, v)]
        results = [
            flash_attn_varlen_func(*exact, cu, cu, **settings),
            flash_attn_varlen_func(*one, cu, cu, **settings, precision=precision),
            ring_attn_func(*mine, plan, return_lse=True, precision=precision, transport=transport),
        ]
        gradients = (dout.double().cpu(), dout, plan.shard(dout))
        for (out, _), do in zip(results, gradients, strict=True):
            out.backward(do)
        truth, alone, ring = (
            (out.detach(), lse.detach().t(), *(x.grad for x in leaves))
            for (out, lse), leaves in zip(results, (exact, one, mine), strict=True)
        )
        names = "out", "lse", "dq", "dk", "dv"
        for name, e, a, r in zip(names, truth, alone, ring, strict=True):
            whole = plan.unshard(r).double().cpu()
            error, reference = ((x.double().cpu() - e).square().sum() for x in (whole, a))
            limit = 1.02 if name in ("out", "lse") else 1.1
            ratio = float(error / reference) ** 0.5
            assert 0 < ratio <= limit, f"{precision}, d{d}, {transport}: {name} {ratio:.3f}"


@worlds(2, 4, soak=(3,))
def test_a_ring_in_8_bits_is_as_exact_as_one_gpu(world: int) -> None:
    spawn(_worker_in_8_bits, world)


@worlds(2, 3, 4, 8)
def test_ring_over_nccl_holds_the_single_device_gate(world: int) -> None:
    """max|x - ref| <= 2 max|x_pt - ref| + 1e-5 for out, dq, dk, dv; ref is float64."""
    spawn(_worker, world)
