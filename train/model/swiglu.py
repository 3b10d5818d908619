"""The SwiGLU of a block, whole or in chunks of tokens.

Shapes are written as suffixes, as in ``transformer.py``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from train.config import ModelConfig
from train.model.precision import product_dtype, sum_dtype


class SwiGLU(nn.Module):
    """``down(silu(gate(x)) * up(x))``, (T, D) -> (T, D); the hidden states are (T, F).

    With ``chunk`` the hidden states of only so many tokens exist at a time.
    """

    def __init__(self, model: ModelConfig, chunk: int | None = None) -> None:
        super().__init__()
        self.gate = nn.Linear(model.dim, model.ffn_dim, bias=False)
        self.up = nn.Linear(model.dim, model.ffn_dim, bias=False)
        self.down = nn.Linear(model.ffn_dim, model.dim, bias=False)
        self.chunk = chunk

    def forward(self, x_TD: Tensor) -> Tensor:
        if self.chunk is None:
            return self.down(F.silu(self.gate(x_TD)) * self.up(x_TD))
        weights = self.gate.weight, self.up.weight, self.down.weight
        return chunked_swiglu(x_TD, *weights, self.chunk)


def chunked_swiglu(
    x_TD: Tensor, gate_FD: Tensor, up_FD: Tensor, down_DF: Tensor, chunk: int
) -> Tensor:
    """The SwiGLU of ``chunk`` tokens at a time, (T, D) in the dtype that autocast multiplies in.

    The graph holds ``x`` in that dtype and the weights; the backward computes gate and up again. It
    sums the gradients of the weights over chunks in float32 (float64 for float64 inputs). The
    recomputation of an activation checkpoint skips the products of the forward: it ends at the last
    tensor that the graph holds, which is an input of this function.
    """
    dtype = product_dtype(x_TD)
    x_TD = _Inputs.apply(x_TD, gate_FD, up_FD, down_DF, chunk, dtype)
    with torch.no_grad():
        gate_FD, up_FD, down_DF = (weight.to(dtype) for weight in (gate_FD, up_FD, down_DF))
        y_TD = torch.empty_like(x_TD)
        for x, y in zip(x_TD.split(chunk), y_TD.split(chunk), strict=True):
            y.copy_(F.linear(F.silu(F.linear(x, gate_FD)) * F.linear(x, up_FD), down_DF))
    return _Output.apply(x_TD, y_TD)


class _Output(torch.autograd.Function):
    """Returns the output; passes its gradient on to ``_Inputs`` in the place of one of x."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, y_TD: Tensor) -> Tensor:
        return y_TD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TD: Tensor) -> tuple[Tensor, None]:
        return dy_TD, None


class _Inputs(torch.autograd.Function):
    """Rounds ``x`` to ``dtype`` and saves the inputs; its backward is that of the SwiGLU."""

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
        x_TD, *weights = ctx.saved_tensors
        gate_FD, up_FD, down_DF = (weight.to(x_TD.dtype) for weight in weights)
        sums = (torch.zeros_like(w, dtype=sum_dtype(x_TD.dtype)) for w in weights)
        dgate_FD, dup_FD, ddown_DF = sums
        dx_TD = torch.empty_like(x_TD, dtype=ctx.dtype)
        chunks = (tensor.split(ctx.chunk) for tensor in (x_TD, dy_TD, dx_TD))
        for x, dy, dx in zip(*chunks, strict=True):
            gate_TF, up_TF = F.linear(x, gate_FD), F.linear(x, up_FD)
            silu_TF = F.silu(gate_TF)
            ddown_DF += dy.T @ (silu_TF * up_TF)
            dhidden_TF = dy @ down_DF
            dup_TF = dhidden_TF * silu_TF
            dgate_TF = torch.ops.aten.silu_backward(dhidden_TF * up_TF, gate_TF)
            dgate_FD += dgate_TF.T @ x
            dup_FD += dup_TF.T @ x
            dx.copy_(torch.addmm(dgate_TF @ gate_FD, dup_TF, up_FD))
        dweights = zip((dgate_FD, dup_FD, ddown_DF), weights, strict=True)
        return dx_TD, *(total.to(weight.dtype) for total, weight in dweights), None, None
