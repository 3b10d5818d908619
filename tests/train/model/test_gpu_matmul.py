"""If this fails, gradients of weights lose precision on a GPU. Gradients of matrices on a GPU
against float64: `pytest -m gpu tests/train`."""

from __future__ import annotations

import pytest
import torch

from train.model.loss import token_losses
from train.model.matmul import Linear
from train.model.swiglu import ALL, chunked_swiglu

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


@pytest.mark.parametrize("chunk", [ALL, 2048])
def test_chunks_of_the_mlp_do_not_round_gradients_of_weights(chunk: int) -> None:
    """ddown is the product of two bfloat16 matrices that float64 can multiply: error <= 2e-5."""
    torch.manual_seed(0)
    x, dy = (torch.randn(TOKENS, DIM, device="cuda").bfloat16() for _ in range(2))
    weights = [
        (torch.randn(*shape, device="cuda") / shape[1] ** 0.5).requires_grad_()
        for shape in ((WIDTH, DIM), (WIDTH, DIM), (DIM, WIDTH))
    ]
    with torch.autocast("cuda", torch.bfloat16):
        chunked_swiglu(x, *weights, chunk).backward(dy)
    gate, up = (torch.nn.functional.linear(x, w.detach().bfloat16()) for w in weights[:2])
    exact = dy.double().T @ (torch.nn.functional.silu(gate) * up).double()
    grad = weights[2].grad
    assert grad is not None
    assert (grad.double() - exact).norm() <= 2e-5 * exact.norm()
    for weight in weights[:2]:  # not a number of bfloat16 each
        assert weight.grad is not None
        assert (weight.grad.bfloat16().float() != weight.grad).float().mean() > 0.9


def test_chunks_of_the_loss_do_not_round_the_gradient_of_the_head() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, DIM, device="cuda").bfloat16()
    head = (torch.randn(WIDTH, DIM, device="cuda") / DIM**0.5).requires_grad_()
    labels = torch.randint(WIDTH, (TOKENS,), device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        token_losses(hidden, head, labels, TOKENS).sum().backward()
    assert head.grad is not None
    assert (head.grad.bfloat16().float() != head.grad).float().mean() > 0.9
