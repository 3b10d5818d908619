"""PyTorch's attention over packed documents, a baseline for RingFA3's.

Shapes are written as suffixes, as in ``transformer.py``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CAUSAL, SELF_ONLY = (-1, 0), (0, 0)  # windows, (left, right) keys around a query


class SdpaAttention(nn.Module):
    """Causal attention by ``scaled_dot_product_attention``, document by document.

    It has the signature of ``RingFA3Attention``. It supports the causal window and the window
    (0, 0), in which each token attends only to itself. One process must hold the whole sample.
    ``softmax_scale`` None means head_dim ** -0.5.
    """

    def __init__(self, softmax_scale: float | None = None) -> None:
        super().__init__()
        self.softmax_scale = softmax_scale

    def forward(self, q_THC: Tensor, k_TKC: Tensor, v_TKC: Tensor, plan: Any) -> Tensor:
        if plan.world > 1:
            raise ValueError(f"plan is for {plan.world} ranks: this attention needs one of 1 rank")
        if plan.effective_window == SELF_ONLY:  # the softmax of one score is 1
            return v_TKC.repeat_interleave(q_THC.shape[1] // v_TKC.shape[1], dim=1)
        if plan.effective_window != CAUSAL:
            raise ValueError(
                f"plan has window (left, right) = {plan.effective_window}: it must be causal"
            )
        lengths = plan.shards[0].length.tolist()  # of the documents, in their order
        documents = zip(*(x.split(lengths) for x in (q_THC, k_TKC, v_TKC)), strict=True)
        return torch.cat([self._document(*qkv) for qkv in documents])

    def _document(self, *qkv: Tensor) -> Tensor:
        q_1HTC, k_1KTC, v_1KTC = (x.transpose(0, 1)[None] for x in qkv)
        grouped = q_1HTC.shape[1] != k_1KTC.shape[1]
        y_1HTC = F.scaled_dot_product_attention(
            q_1HTC,
            k_1KTC,
            v_1KTC,
            is_causal=True,
            scale=self.softmax_scale,
            enable_gqa=grouped,
        )
        return y_1HTC[0].transpose(0, 1)
