"""If this fails, training minimises another loss. The chunked loss against torch's cross entropy,
unchunked and in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from train.config import MemoryConfig
from train.model import compiled
from train.model.loss import token_losses
from train.sections.training import LEAST_LOSS_TOKENS, MOST_LOGITS


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("chunk", [1, 7, 64, 1000])
def test_losses_and_gradients_equal_cross_entropy(chunk, fused, monkeypatch):
    """float64 throughout but for the loss, which is float32: 1e-6 absolute. Fused by AOTAutograd,
    without code generation."""
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")
    torch.manual_seed(0)
    hidden = torch.randn(100, 16, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(50, 16, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 50, (100,))
    labels[::7] = -100
    losses = token_losses(hidden, weight, labels, chunk, fused)
    reference = F.cross_entropy(hidden @ weight.T, labels, ignore_index=-100, reduction="none")
    assert losses.dtype == torch.float32
    torch.testing.assert_close(losses.double(), reference, atol=1e-6, rtol=1e-6)
    weights = torch.rand(100)
    got = torch.autograd.grad((losses * weights).sum(), (hidden, weight))
    expected = torch.autograd.grad((reference * weights).sum(), (hidden, weight))
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5)


def test_the_gradient_of_a_nearly_certain_token_keeps_its_digits():
    """bfloat16, p = 1 - 9e-4, against float64 to 2^-8: p - 1 after rounding would be 0."""
    hidden = torch.tensor([[7.0]], requires_grad=True)
    weight = torch.tensor([[1.0], [0.0]])
    with torch.autocast("cpu", torch.bfloat16):
        losses = token_losses(hidden, weight, torch.zeros(1, dtype=torch.int64), chunk=1)
        losses.sum().backward()
    expected = -1 / (1 + math.exp(7))
    assert hidden.grad is not None
    assert abs(float(hidden.grad) / expected - 1) <= 2**-8


@pytest.mark.parametrize(
    ("asked", "rows", "tokens"),
    [
        (None, 8192, MOST_LOGITS // 8192),
        (None, 128_256, LEAST_LOSS_TOKENS),
        (77, 8192, 77),
        (5000, 128_256, 5000),
    ],
)
def test_by_default_the_chunk_of_the_loss_depends_on_the_vocabulary(asked, rows, tokens):
    assert MemoryConfig(loss_chunk=asked).loss_tokens(rows) == tokens


def test_without_tokens_the_weights_still_get_a_gradient():
    hidden = torch.zeros(0, 16, requires_grad=True)
    weight = torch.randn(50, 16, requires_grad=True)
    token_losses(hidden, weight, torch.zeros(0, dtype=torch.int64), chunk=8).sum().backward()
    assert weight.grad is not None
    assert weight.grad.abs().sum() == 0


def test_logits_exist_for_one_chunk_at_a_time():
    """No operation returns more than a chunk of them, and the graph saves none for the backward."""
    chunk, vocabulary, largest, kept = 32, 300, 0, 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            nonlocal largest
            out = op(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                largest = max(largest, out.numel())
            return out

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal kept
        kept = max(kept, tensor.numel())
        return tensor

    hidden = torch.randn(512, 8, requires_grad=True)
    weight = torch.randn(vocabulary, 8, requires_grad=True)
    labels = torch.randint(0, vocabulary, (512,))
    with Watch():
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            losses = token_losses(hidden, weight, labels, chunk)
        losses.sum().backward()
    assert largest == chunk * vocabulary
    assert kept < chunk * vocabulary


def test_the_gradient_of_the_head_does_not_degrade_with_chunks():
    """bfloat16, relative error against float32: at 64, 256 and 1,024 chunks <= 1.2 of one chunk's.

    Gradients of all chunks have the same sign, so that a sum in bfloat16 would stall.
    """
    torch.manual_seed(0)
    tokens, width, vocabulary = 4096, 32, 40
    hidden = torch.randn(tokens, width) + 1
    weight = torch.randn(vocabulary, width) / width**0.5
    labels = torch.randint(0, vocabulary, (tokens,))

    def gradient(chunk: int, dtype: torch.dtype) -> torch.Tensor:
        leaf = weight.clone().requires_grad_()
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            token_losses(hidden, leaf, labels, chunk).mean().backward()
        assert leaf.grad is not None
        assert leaf.grad.dtype == torch.float32
        return leaf.grad

    expected = gradient(tokens, torch.float32)
    errors = [
        ((gradient(tokens // n, torch.bfloat16) - expected).norm() / expected.norm()).item()
        for n in (1, 64, 256, 1024)
    ]
    assert max(errors[1:]) <= 1.2 * errors[0], errors
