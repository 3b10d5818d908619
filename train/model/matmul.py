"""The matrix products of the model, as custom ops: a hook on ops can time them in every engine.

For a compiler each is one node. Shapes are written as suffixes, as in ``transformer.py``.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ringfa3.custom_op import custom_op, register_autograd, register_fake
from train.model.precision import product_dtype


@custom_op
def matmul(a: Tensor, b: Tensor, addend: Tensor | None = None) -> Tensor:
    """``a @ b``, or ``addend + a @ b`` with one rounding, of matrices of one dtype; no gradient."""
    return a @ b if addend is None else torch.addmm(addend, a, b)


@register_fake(matmul)
def _(a: Tensor, b: Tensor, addend: Tensor | None = None) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1])


@partial(custom_op, mutates=("total",))
def add_matmul(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add ``a @ b``, of matrices of one dtype, to ``total``; no gradient.

    A GPU adds its float32 sums to a float32 total without rounding. Other devices round them to the
    dtype of the matrices first.
    """
    if a.is_cuda and total.dtype == torch.float32 != a.dtype:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total += a @ b


@register_fake(add_matmul)
def _(total: Tensor, a: Tensor, b: Tensor) -> None:
    return None


@custom_op
def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x (T, D) times the transpose of ``weight`` (F, D), which is rounded to the dtype of x."""
    return F.linear(x, weight.to(x.dtype))


@register_fake(linear)
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


@custom_op
def linear_backward(dy: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """(dx, dweight) in the dtypes of x and of ``weight``.

    A GPU stores the float32 sums of dweight without rounding. Other devices round them to the dtype
    of dy first.
    """
    dx = dy @ weight.to(dy.dtype)
    if dy.is_cuda and weight.dtype == torch.float32 != dy.dtype:
        return dx, torch.mm(dy.T, x, out_dtype=torch.float32)
    return dx, (dy.T @ x).to(weight.dtype)


@register_fake(linear_backward)
def _(dy: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> None:
    # Save the weight itself, not a copy: ZeRO-3 frees its memory until the backward gathers it.
    ctx.save_for_backward(*inputs)


def _gradients(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
    return linear_backward(dy, *ctx.saved_tensors)


register_autograd(linear, _save, _gradients)


class Linear(nn.Linear):
    """``nn.Linear`` of matrices (T, D). The bias is added to the rounded product."""

    def __init__(self, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__(inputs, outputs, bias=bias, dtype=torch.float32)

    def forward(self, x_TD: Tensor) -> Tensor:
        y_TF = linear(x_TD.to(product_dtype(x_TD)), self.weight)
        return y_TF if self.bias is None else y_TF + self.bias.to(y_TF.dtype)
