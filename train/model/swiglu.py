"""The SwiGLU of a block, whole or in chunks of tokens.

Shapes are written as suffixes, as in ``transformer.py``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ringfa3.custom_op import custom_op, register_autograd, register_fake
from train.config import ModelConfig
from train.model.matmul import Linear, add_matmul, linear, matmul
from train.model.precision import product_dtype, sum_dtype

ALL = 1 << 62  # tokens: more than any sample has


class SwiGLU(nn.Module):
    """``down(silu(gate(x)) * up(x))``, (T, D) -> (T, D); the hidden states are (T, F).

    With ``chunk`` the hidden states of only so many tokens exist at a time. ``ALL`` means one
    chunk, for activation checkpoints: they recompute less with chunks than without.
    """

    def __init__(self, model: ModelConfig, chunk: int | None = None) -> None:
        super().__init__()
        self.gate = Linear(model.dim, model.ffn_dim)
        self.up = Linear(model.dim, model.ffn_dim)
        self.down = Linear(model.ffn_dim, model.dim)
        self.chunk = chunk

    def forward(self, x_TD: Tensor) -> Tensor:
        if self.chunk is None:
            x_TD = x_TD.to(product_dtype(x_TD))  # gate and up save the same tensor
            return self.down(F.silu(self.gate(x_TD)) * self.up(x_TD))
        weights = self.gate.weight, self.up.weight, self.down.weight
        return chunked_swiglu(x_TD, *weights, self.chunk)


def chunked_swiglu(
    x_TD: Tensor, gate_FD: Tensor, up_FD: Tensor, down_DF: Tensor, chunk: int
) -> Tensor:
    """The SwiGLU of ``chunk`` tokens at a time, (T, D) in the dtype of matrix products.

    Autograd saves ``x`` in that dtype and the weights; the backward recomputes gate and up. It sums
    the gradients of the weights over chunks in float32 (float64 for float64 inputs). Under an
    activation checkpoint the recomputation skips this function's products: it ends at the last
    saved tensor, and all saved tensors are inputs here. For a compiler the function is one node.
    """
    weights, dtype = (gate_FD, up_FD, down_DF), product_dtype(x_TD)
    if torch.compiler.is_compiling():
        return swiglu(x_TD.to(dtype), *weights, chunk)
    x_TD = _Inputs.apply(x_TD, *weights, chunk, dtype)
    with torch.no_grad():
        y_TD = _forward(x_TD, *weights, chunk)
    return _Output.apply(x_TD, y_TD)


def _forward(x_TD: Tensor, gate_FD: Tensor, up_FD: Tensor, down_DF: Tensor, chunk: int) -> Tensor:
    gate_FD, up_FD, down_DF = (weight.to(x_TD.dtype) for weight in (gate_FD, up_FD, down_DF))
    y_TD = torch.empty_like(x_TD)
    for x, y in zip(x_TD.split(chunk), y_TD.split(chunk), strict=True):
        y.copy_(linear(F.silu(linear(x, gate_FD)) * linear(x, up_FD), down_DF))
    return y_TD


def _backward(
    dy_TD: Tensor,
    x_TD: Tensor,
    gate_FD: Tensor,
    up_FD: Tensor,
    down_DF: Tensor,
    chunk: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dx, dgate, dup, ddown); dx is in ``dtype``, the others are in those of the weights."""
    weights = gate_FD, up_FD, down_DF
    gate_FD, up_FD, down_DF = (weight.to(x_TD.dtype) for weight in weights)
    sums = (torch.zeros_like(w, dtype=sum_dtype(x_TD.dtype)) for w in weights)
    dgate_FD, dup_FD, ddown_DF = sums
    dx_TD = torch.empty_like(x_TD, dtype=dtype)
    chunks = (tensor.split(chunk) for tensor in (x_TD, dy_TD, dx_TD))
    for x, dy, dx in zip(*chunks, strict=True):
        gate_TF, up_TF = linear(x, gate_FD), linear(x, up_FD)
        silu_TF = F.silu(gate_TF)
        add_matmul(ddown_DF, dy.T, silu_TF * up_TF)
        dhidden_TF = matmul(dy, down_DF)
        dup_TF = dhidden_TF * silu_TF
        dgate_TF = torch.ops.aten.silu_backward(dhidden_TF * up_TF, gate_TF)
        add_matmul(dgate_FD, dgate_TF.T, x)
        add_matmul(dup_FD, dup_TF.T, x)
        dx.copy_(matmul(dup_TF, up_FD, matmul(dgate_TF, gate_FD)))
    dweights = zip((dgate_FD, dup_FD, ddown_DF), weights, strict=True)
    dgate_FD, dup_FD, ddown_DF = (total.to(weight.dtype) for total, weight in dweights)
    return dx_TD, dgate_FD, dup_FD, ddown_DF


class _Output(torch.autograd.Function):
    """Returns y; its backward passes dy to ``_Inputs`` as if dy were the gradient of x."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, y_TD: Tensor) -> Tensor:
        return y_TD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TD: Tensor) -> tuple[Tensor, None]:
        return dy_TD, None


class _Inputs(torch.autograd.Function):
    """Rounds ``x`` to ``dtype`` and saves the inputs; its backward is the whole SwiGLU's."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        gate_FD: Tensor,
        up_FD: Tensor,
        down_DF: Tensor,
        chunk: int,
        dtype: torch.dtype,
    ) -> Tensor:
        ctx.chunk, ctx.dtype = chunk, x_TD.dtype
        x_TD = x_TD.to(dtype) if x_TD.dtype != dtype else x_TD.view_as(x_TD)
        ctx.save_for_backward(x_TD, gate_FD, up_FD, down_DF)
        return x_TD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TD: Tensor) -> tuple[Tensor | None, ...]:
        return *_backward(dy_TD, *ctx.saved_tensors, ctx.chunk, ctx.dtype), None, None


@custom_op
def swiglu(x_TD: Tensor, gate_FD: Tensor, up_FD: Tensor, down_DF: Tensor, chunk: int) -> Tensor:
    """``chunked_swiglu`` as one op; x is in the dtype of matrix products."""
    return _forward(x_TD, gate_FD, up_FD, down_DF, chunk)


@custom_op
def swiglu_backward(
    dy_TD: Tensor, x_TD: Tensor, gate_FD: Tensor, up_FD: Tensor, down_DF: Tensor, chunk: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of ``swiglu``."""
    return _backward(dy_TD, x_TD, gate_FD, up_FD, down_DF, chunk, x_TD.dtype)


@register_fake(swiglu)
def _(x_TD: Tensor, *_: Any) -> Tensor:
    return x_TD.new_empty(x_TD.shape)


@register_fake(swiglu_backward)
def _(dy_TD: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    return tuple(tensor.new_empty(tensor.shape) for tensor in inputs[:4])


def _save(ctx: Any, inputs: tuple[Any, ...], outputs: Any) -> None:
    *tensors, ctx.chunk = inputs
    ctx.save_for_backward(*tensors)


def _gradients(ctx: Any, dy_TD: Tensor) -> tuple[Tensor, ...]:
    return swiglu_backward(dy_TD, *ctx.saved_tensors, ctx.chunk)


register_autograd(swiglu, _save, _gradients)
