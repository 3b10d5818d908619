"""Gradients of matrices on a GPU against float64: `pytest -m gpu tests/train`."""

from __future__ import annotations

import pytest
import torch

from train.model.matmul import Linear

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

TOKENS, DIM, WIDTH = 8192, 512, 768


@pytest.mark.parametrize("products", [torch.bfloat16, torch.float16])
def test_gradients_of_weights_are_not_rounded_to_16_bits(products: torch.dtype) -> None:
    """Root mean square of the error over that of the gradient: 2e-5 for a float32 weight, whose sum
    a rounding to 16 bits would move by 1e-4 or more."""
    torch.manual_seed(0)
    layer = Linear(DIM, WIDTH).cuda()
    x, dy = (torch.randn(TOKENS, n, device="cuda").to(products) for n in (DIM, WIDTH))
    with torch.autocast("cuda", products):
        layer(x).backward(dy)
    exact = dy.double().T @ x.double()
    grad = layer.weight.grad
    assert grad is not None
    assert grad.dtype == torch.float32
    error = (grad.double() - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    assert error <= 2e-5
    rounded = (exact.to(products).double() - exact).square().mean().sqrt()
    assert rounded / exact.square().mean().sqrt() > 1e-4
