"""If this fails, chunks of the MLP change results. The SwiGLU in chunks of tokens, against the
whole one."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from train.config import ModelConfig
from train.model.swiglu import SwiGLU


def build(chunk: int | None, dtype: torch.dtype = torch.float64, ffn_dim: int = 24) -> SwiGLU:
    torch.manual_seed(0)
    return SwiGLU(ModelConfig(dim=16, ffn_dim=ffn_dim), chunk).to(dtype)


def gradients(mlp: SwiGLU, x_TD: torch.Tensor, recompute: bool = False) -> tuple:
    x_TD = x_TD.clone().requires_grad_()
    y_TD = checkpoint(mlp, x_TD, use_reentrant=False) if recompute else mlp(x_TD)
    weights = torch.arange(y_TD.numel()).view(y_TD.shape) % 7 - 2
    return (y_TD, *torch.autograd.grad((y_TD * weights).sum(), (x_TD, *mlp.parameters())))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("chunk", [1, 7, 64, 1000])
def test_chunks_change_neither_output_nor_gradients(chunk, recompute):
    """float64 against the whole SwiGLU: 1e-12 of unit values."""
    x_TD = torch.randn(100, 16, dtype=torch.float64)
    got = gradients(build(chunk), x_TD, recompute)
    for one, other in zip(got, gradients(build(None), x_TD), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_without_tokens_the_weights_still_get_a_gradient():
    _, dx_TD, *dweights = gradients(build(8), torch.zeros(0, 16, dtype=torch.float64))
    assert dx_TD.shape == (0, 16)
    assert all(dweight.abs().sum() == 0 for dweight in dweights)


def test_hidden_states_exist_for_one_chunk_at_a_time():
    """No operation returns more than a chunk of them, and the graph holds none for the backward."""
    chunk, ffn_dim, largest, kept = 32, 300, 0, 0
    mlp, x_TD = build(chunk, torch.float32, ffn_dim), torch.randn(512, 16, requires_grad=True)

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

    with Watch():
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            y_TD = mlp(x_TD)
        y_TD.sum().backward()
    assert largest == chunk * ffn_dim
    assert kept == 512 * 16


def test_a_checkpoint_computes_no_product_twice_more():
    """4 chunks: 3 products each in the forward; 8 in the backward, gate and up among them."""

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            products[op.overloadpacket.__name__] += 1
            return op(*args, **(kwargs or {}))

    products = Counter()
    with Count():
        gradients(build(25), torch.randn(100, 16, dtype=torch.float64), recompute=True)
    names = ("linear", "matmul", "add_matmul")
    assert sum(products[name] for name in names) == 4 * (3 + 8)


@pytest.mark.parametrize("residual", [torch.float32, torch.bfloat16])
def test_gradients_do_not_degrade_with_chunks(residual):
    """bfloat16, relative error against float32: at 64, 256 and 1,024 chunks <= 1.2 of one chunk's,
    whose error is at most that of the whole SwiGLU.

    Gradients of all chunks have the same sign, so that a sum in bfloat16 would stall.
    """
    tokens = 4096
    x_TD = (torch.randn(tokens, 16, generator=torch.Generator().manual_seed(1)) + 1).to(residual)

    def found(chunk: int | None, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        mlp = build(chunk, torch.float32)
        with torch.no_grad():  # gradients would cancel where weights have two signs
            for weight in mlp.parameters():
                weight.abs_()
        given = x_TD.to(torch.float32 if dtype == torch.float32 else residual).requires_grad_()
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            loss = mlp(given).float().mean()
        grads = torch.autograd.grad(loss, (given, *mlp.parameters()))
        assert [grad.dtype for grad in grads[1:]] == [torch.float32] * 3
        return grads

    expected = found(None, torch.float32)

    def errors(chunk: int | None) -> torch.Tensor:
        pairs = zip(found(chunk, torch.bfloat16), expected, strict=True)
        return torch.stack([(got - want).norm() / want.norm() for got, want in pairs])

    one = errors(tokens)
    assert (one <= 1.2 * errors(None)).all()
    for chunks in (64, 256, 1024):
        assert (errors(tokens // chunks) <= 1.2 * one).all(), chunks
