"""Cross entropy over a chunked sequence."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from train.data.samples import IGNORED


def token_losses(hidden_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, chunk: int) -> Tensor:
    """Cross entropy of every token in nats, (T,) float32; 0 where the label is ``IGNORED``.

    The logits of only ``chunk`` tokens exist at a time; the backward pass recomputes them. Without
    any token the result is empty and still part of the autograd graph.
    """
    chunks = zip(hidden_TD.split(chunk), labels_T.split(chunk), strict=True)
    if torch.is_grad_enabled():
        losses = [
            checkpoint(_losses_of_chunk, hidden, weight_VD, labels, use_reentrant=False)
            for hidden, labels in chunks
        ]
    else:
        losses = [_losses_of_chunk(hidden, weight_VD, labels) for hidden, labels in chunks]
    return torch.cat(losses)


def _losses_of_chunk(hidden_TD: Tensor, weight_VD: Tensor, labels_T: Tensor) -> Tensor:
    logits_TV = F.linear(hidden_TD, weight_VD).float()
    return F.cross_entropy(logits_TV, labels_T, ignore_index=IGNORED, reduction="none")
