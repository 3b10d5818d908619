"""Cross entropy over a chunked sequence.

For a token with logits x and label y, L = log sum exp x - x_y and dL/dx_i = softmax(x)_i - [i = y].
For the label the gradient is softmax(x)_y - 1 = expm1(-L), without cancellation near 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from train.data.samples import IGNORED
from train.model.compiled import compiled_function
from train.model.matmul import add_matmul, linear, matmul
from train.model.precision import product_dtype, sum_dtype


def token_losses(
    hidden_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, chunk: int, fused: bool = False
) -> Tensor:
    """Cross entropy of every token in nats, (T,) float32; 0 where the label is ``IGNORED``.

    The logits of only ``chunk`` tokens exist at a time; the backward recomputes them. It sums the
    gradient of ``weight`` over chunks in float32, in any dtype of matrix products. With ``fused`` a
    compiler fuses the operations between matrix products. Without tokens the result is empty, and
    still part of the autograd graph.
    """
    return _TokenLosses.apply(hidden_TD, weight_VD, labels_T, chunk, fused)


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, chunk: int, fused: bool
    ) -> Tensor:
        ctx.dtype, ctx.chunk, ctx.fused = product_dtype(hidden_TD), chunk, fused
        head_VD = weight_VD.to(ctx.dtype)
        cross_entropy = compiled_function(_cross_entropy) if fused else _cross_entropy
        losses = [
            cross_entropy(linear(rounded, head_VD), labels)
            for rounded, labels in _chunks(ctx, hidden_TD, labels_T)
        ]
        losses_T = torch.cat(losses)
        ctx.save_for_backward(hidden_TD, weight_VD, labels_T, losses_T)
        return losses_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dlosses_T: Tensor) -> tuple[Tensor | None, ...]:
        hidden_TD, weight_VD, labels_T, losses_T = ctx.saved_tensors
        head_VD = weight_VD.to(ctx.dtype)
        dhidden_TD = torch.empty_like(hidden_TD)
        dhead_VD = torch.zeros_like(weight_VD, dtype=sum_dtype(ctx.dtype))
        scaled_softmax = compiled_function(_scaled_softmax) if ctx.fused else _scaled_softmax
        counted_T = labels_T != IGNORED
        targets_T = labels_T.where(counted_T, 0)
        factors_T = dlosses_T * counted_T
        at_target_T = (losses_T.neg().expm1() * factors_T).to(ctx.dtype)
        each = (x.split(ctx.chunk) for x in (targets_T, factors_T, at_target_T, dhidden_TD))
        chunks = zip(_chunks(ctx, hidden_TD, labels_T), zip(*each, strict=True), strict=True)
        for (rounded, _), (targets, factors, at_target, dhidden) in chunks:
            dlogits_TV = scaled_softmax(linear(rounded, head_VD), factors)
            dlogits_TV.scatter_(1, targets[:, None], at_target[:, None])
            dhidden.copy_(matmul(dlogits_TV, head_VD))
            add_matmul(dhead_VD, dlogits_TV.T, rounded)
        return dhidden_TD, dhead_VD.to(weight_VD.dtype), None, None, None


def _chunks(ctx: Any, hidden_TD: Tensor, labels_T: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """(hidden in the compute dtype, labels) of each chunk."""
    for hidden, labels in zip(hidden_TD.split(ctx.chunk), labels_T.split(ctx.chunk), strict=True):
        yield hidden.to(ctx.dtype), labels


def _cross_entropy(logits_TV: Tensor, labels_T: Tensor) -> Tensor:
    return F.cross_entropy(logits_TV.float(), labels_T, ignore_index=IGNORED, reduction="none")


def _scaled_softmax(logits_TV: Tensor, factors_T: Tensor) -> Tensor:
    """Softmax of each row times its factor, computed in float32, (T, V) in the logits' dtype."""
    return (logits_TV.float().softmax(-1) * factors_T[:, None]).to(logits_TV.dtype)
