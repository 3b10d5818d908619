"""If this fails, the reason why no FP8 backward exists is not the measured one.
`benchmarks.fp8_backward_errors`: its reference is the gradient, and it rounds what it names."""

from __future__ import annotations

import torch

from benchmarks.fp8_backward_errors import PRODUCTS, gradients, relative, row


def test_without_rounding_it_is_the_gradient() -> None:
    """Against autograd of dense attention in float64, to 1e-12."""
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(128, 64, dtype=torch.float64) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = torch.softmax(q @ k.T / 8, -1) @ v
    expected = torch.autograd.grad(out, leaves, dout)
    got = gradients(*(x.detach() for x in (q, k, v, dout)), in_e4m3=None)
    for x, y in zip(got, expected, strict=True):
        assert relative(x, y) < 1e-12


def test_a_product_in_e4m3_changes_the_gradients_that_it_enters() -> None:
    """e4m3 has 3 bits after the leading one: an error of some 2.6%; bfloat16 of some .2%."""
    found = dict(zip(PRODUCTS, row(256, 64, 1, 0), strict=True))
    large = {name: [x > 0.01 for x in errors] for name, errors in found.items()}
    assert large == {
        "bf16": [False, False, False],
        "dP in e4m3": [True, True, False],
        "dQ in e4m3": [True, False, False],
        "both": [True, True, False],
    }
    assert all(x < 0.05 for errors in found.values() for x in errors)
