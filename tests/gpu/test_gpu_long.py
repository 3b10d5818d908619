"""If this fails, long contexts give wrong results. Long sequences on a Hopper GPU: `pytest -m "gpu
and soak" tests/gpu/test_gpu_long.py`."""

from __future__ import annotations

import random

import pytest
import torch

from ringfa3 import flash_attn_varlen_func
from ringfa3.kernels import dispatch
from tests.support import dense

pytestmark = [pytest.mark.gpu, pytest.mark.soak, pytest.mark.timeout(600)]

WINDOWS = ((-1, -1), (-1, 0), (100, 0), (64, 64), (300, -1), (1000, 0), (4096, 0))


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_up_to_16k_tokens_hold_the_gate(dtype: torch.dtype, d: int) -> None:
    """out, dq, dk, dv: max|x - ref| <= 2 max|x_pt - ref| + 1e-5, ref in float64; 12 cases."""
    for case in range(12):
        rng = random.Random(2000 * d + case)
        torch.manual_seed(case)
        lengths, left = [], rng.choice((2001, 5003, 16383))
        while left:  # from the longest document to the shortest
            lengths.append(rng.randint(left // 2, left) or 1)
            left -= lengths[-1]
        window, (h, hk) = rng.choice(WINDOWS), rng.choice(((1, 1), (2, 1), (2, 2)))
        t, cu = sum(lengths), dense.cumulative(lengths)
        leaves = [torch.randn(t, n, d, device="cuda").to(dtype) for n in (h, hk, hk)]
        leaves = [x.requires_grad_() for x in leaves]
        assert dispatch.fallback_reason("backward", leaves[0]) is None
        out = flash_attn_varlen_func(*leaves, cu, cu, window_size=window)
        assert isinstance(out, torch.Tensor)
        dout = torch.randn_like(out)
        got = [out, *torch.autograd.grad(out, leaves, dout)]
        mask = torch.from_numpy(dense.mask(lengths, lengths, *window)).cuda()
        results = []
        for kind in (torch.float64, dtype):
            again = [x.detach().to(kind).requires_grad_() for x in leaves]
            outputs = dense.attention(*again, mask)
            gradients = dense.gradients(again, outputs, dout.to(kind))
            results.append([outputs[0].detach(), *gradients])
            del outputs
        for name, x, ref, pt in zip(("out", "dq", "dk", "dv"), got, *results, strict=True):
            error = (x.double() - ref).abs().max().item()
            bound = 2 * (pt.double() - ref).abs().max().item() + 1e-5
            what = f"case {case}: {lengths}, window {window}, heads {h}:{hk}, {name}"
            assert error <= bound, f"{what} is off by {error:.2e}, allowed {bound:.2e}"


@pytest.mark.parametrize("d", [64, 128, 256])
def test_fifty_forwards_have_the_same_bits(d: int) -> None:
    """out and LSE of 6,000 packed tokens, causal and windowed, 16:4 heads."""
    torch.manual_seed(d)
    cu = [0, 40, 3000, 3129, 6000]
    q, k, v = (torch.randn(cu[-1], n, d, device="cuda").bfloat16() for n in (16, 4, 4))
    for window in ((-1, 0), (500, 0)):
        first = flash_attn_varlen_func(q, k, v, cu, cu, window_size=window, return_lse=True)
        for run in range(50):
            again = flash_attn_varlen_func(q, k, v, cu, cu, window_size=window, return_lse=True)
            assert all(map(torch.equal, first, again)), f"run {run}, window {window}"
