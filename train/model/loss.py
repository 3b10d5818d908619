"""Cross entropy over a chunked sequence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from train.data.samples import IGNORED
from train.model.matmul import linear, matmul
from train.model.precision import product_dtype, sum_dtype


def token_losses(hidden_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, chunk: int) -> Tensor:
    """Cross entropy of every token in nats, (T,) float32; 0 where the label is ``IGNORED``.

    The logits of only ``chunk`` tokens exist at a time; the backward pass recomputes them. It sums
    the gradient of ``weight`` over chunks in float32, whatever dtype autocast multiplies in.
    Without any token the result is empty and still part of the autograd graph.
    """
    return _TokenLosses.apply(hidden_TD, weight_VD, labels_T, chunk)


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, chunk: int
    ) -> Tensor:
        ctx.dtype, ctx.chunk = product_dtype(hidden_TD), chunk
        ctx.save_for_backward(hidden_TD, weight_VD, labels_T)
        head_VD = weight_VD.to(ctx.dtype)
        losses = [
            F.cross_entropy(logits_TV, labels, ignore_index=IGNORED, reduction="none")
            for labels, _, logits_TV in _chunks(ctx, hidden_TD, head_VD, labels_T)
        ]
        return torch.cat(losses)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dlosses_T: Tensor) -> tuple[Tensor, Tensor, None, None]:
        hidden_TD, weight_VD, labels_T = ctx.saved_tensors
        head_VD = weight_VD.to(ctx.dtype)
        dhidden_TD = torch.empty_like(hidden_TD)
        dhead_VD = torch.zeros_like(weight_VD, dtype=sum_dtype(ctx.dtype))
        chunks = _chunks(ctx, hidden_TD, head_VD, labels_T)
        pieces = zip(dlosses_T.split(ctx.chunk), dhidden_TD.split(ctx.chunk), strict=True)
        for (labels, hidden, logits_TV), (dlosses, dhidden) in zip(chunks, pieces, strict=True):
            counted = labels != IGNORED
            dlogits_TV = logits_TV.softmax(-1)
            target_T1 = labels.where(counted, 0).unsqueeze(1)
            dlogits_TV.scatter_add_(1, target_T1, dlogits_TV.new_full(target_T1.shape, -1))
            dlogits_TV *= (dlosses * counted).unsqueeze(1)
            rounded_TV = dlogits_TV.to(ctx.dtype)
            dhidden.copy_(matmul(rounded_TV, head_VD))
            dhead_VD += matmul(rounded_TV.T, hidden)
        return dhidden_TD, dhead_VD.to(weight_VD.dtype), None, None


def _chunks(
    ctx: Any, hidden_TD: Tensor, head_VD: Tensor, labels_T: Tensor
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """(labels, hidden in the compute dtype, logits in float32) of each chunk."""
    for hidden, labels in zip(hidden_TD.split(ctx.chunk), labels_T.split(ctx.chunk), strict=True):
        rounded = hidden.to(ctx.dtype)
        yield labels, rounded, linear(rounded, head_VD).float()
