"""If this fails, gradients of 8-bit attention on a GPU are those of another function. Gradients of
8-bit attention on a Hopper GPU, against the rounded function's in float64."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from ringfa3 import flash_attn_func, flash_attn_varlen_func
from tests.support import straight_through as reference
from tests.support.dense import mask

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

PRECISIONS = pytest.mark.parametrize("precision", ["fp8", "int8"])
# Tensor cores sum e4m3 products to 13 fraction bits; the backward's scores have more.
FP8_MOST = reference.MOST | {"key x100": 0.07, "key x1000": 0.35}
MOST_NATS = {"fp8": 2**9, "int8": 2**17}  # of LSE; see `hold_bounds`
HEAD_DIMS = pytest.mark.parametrize("d", [64, 128, 256])


@contextmanager
def deterministic_algorithms() -> Iterator[None]:
    """PyTorch's mode, which refuses what it does not take to be deterministic."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def errors(inputs: tuple[torch.Tensor, ...], precision: str, causal: bool) -> list[float]:
    """Rms errors of dq, dk and dv over the rms of each.

    The reference takes the kernel's own output: P's rounding is the forward's.
    """
    q, k, v, dout = (x.cuda() for x in inputs)
    leaves = [x[None].requires_grad_() for x in (q, k, v)]
    out = flash_attn_func(*leaves, precision=precision, causal=causal)
    got = [x[0] for x in torch.autograd.grad(out, leaves, dout[None])]
    allowed = torch.from_numpy(mask([len(q)], [len(k)], -1, 0 if causal else -1)).cuda()
    given = reference.Rounded.of_call(q, k, v, precision, np.array([len(k)]))
    expected = reference.gradients(q, k, v, dout, out[0].detach(), allowed, given)
    return [reference.relative(x, y) for x, y in zip(got, expected, strict=True)]


@PRECISIONS
@HEAD_DIMS
@pytest.mark.parametrize("name", reference.INPUTS)
def test_hostile_inputs_have_the_gradient_of_the_rounded_function(
    name: str, d: int, precision: str
) -> None:
    """Medians of 5 draws: 256 and 1,000 keys, causal and full, one and four heads a KV head."""
    draws = []
    for seed in range(5):
        heads, causal = ((1, 1), False) if seed % 2 else ((4, 1), True)
        inputs = reference.inputs(name, (256, 1000)[seed % 2], heads, d, seed)
        draws.append(errors(inputs, precision, causal))
    dq, dk, dv = np.median(draws, axis=0)
    print(f"{name} d{d} {precision}: {dq:.4f} {dk:.4f} {dv:.4f}")
    most = FP8_MOST if precision == "fp8" else reference.MOST
    assert max(dq, dk) <= most.get(name, 0.006), draws
    assert dv <= (0.004 if precision == "int8" else 0.1 if name == "key x1000" else 0.025), draws


@PRECISIONS
@HEAD_DIMS
def test_long_rows_have_the_gradient_of_the_rounded_function(d: int, precision: str) -> None:
    for causal in (False, True):
        inputs = reference.inputs("outliers", 8192, (1, 1), d, d)
        dq, dk, dv = errors(inputs, precision, causal)
        print(f"8k d{d} {precision} causal {causal}: {dq:.4f} {dk:.4f} {dv:.4f}")
        assert max(dq, dk) <= 0.01
        assert dv <= (0.004 if precision == "int8" else 0.025)


@PRECISIONS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_packed_documents_sinks_and_gradients_of_lse(dtype: torch.dtype, precision: str) -> None:
    """GQA, a window, K with means: within .006 of the reference; equal bits when deterministic."""
    torch.manual_seed(0)
    lengths, heads = [150, 1, 700, 300], (4, 2)
    cu = [0, *np.cumsum(lengths).tolist()]
    t = cu[-1]
    q, k, v, dout = (
        torch.randn(t, h, 128, device="cuda") for h in (heads[0], heads[1], heads[1], heads[0])
    )
    k += 3 * torch.randn(2, 128, device="cuda")
    leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
    dout, dlse = dout.to(dtype), torch.randn(heads[0], t, device="cuda")
    sink = torch.randn(heads[0], device="cuda", requires_grad=True)
    settings = {"causal": True, "window_size": (100, -1), "precision": precision}
    got = []
    for _ in range(3):
        out, lse = flash_attn_varlen_func(
            *leaves, cu, cu, return_lse=True, sink=sink, deterministic=True, **settings
        )
        with deterministic_algorithms():
            got.append(torch.autograd.grad((out, lse), [*leaves, sink], (dout, dlse)))
    allowed = torch.from_numpy(mask(lengths, lengths, 100, 0)).cuda()
    rows = [x.detach() for x in leaves]
    given = reference.Rounded.of_call(*rows, precision, np.array(lengths))
    expected = reference.gradients(*rows, dout, out.detach(), allowed, given, sink, dlse)
    for x, y, *others in zip(got[0], expected, *got[1:], strict=True):
        assert reference.relative(x, y) <= 0.006
        assert all(torch.equal(x, other) for other in others)


@PRECISIONS
@HEAD_DIMS
def test_random_hostile_inputs_have_bounded_gradients(d: int, precision: str) -> None:
    """As `hold_bounds`."""
    reference.hold_bounds(150, (200, 2, d), precision, "cuda", d, MOST_NATS[precision])
