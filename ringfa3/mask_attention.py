"""Attention under any mask on one device: the ring of one rank."""

from __future__ import annotations

import torch

from ringfa3.masks.mask import Mask
from ringfa3.planning.context_plan import plan_context
from ringfa3.ring.op import ring_attn_func
from ringfa3.validation import check_tensors


def flash_attn_mask_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: Mask,
    *,
    softmax_scale: float | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    precision: str = "native",
    sink: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Exact attention, softmax(scale * Q K^T) V, over the pairs that a mask allows.

    Its plan is made at the first call with a mask and kept for later ones. In a group, use
    `plan_context(mask, group)` and `ring_attn_func`.

    Args:
        q: (t, h, d); k: (t_k, h_kv, d); v: (t_k, h_kv, d_v), packed, as in
            `flash_attn_varlen_func`; t = mask.q_tokens and t_k = mask.k_tokens.
        mask: a `ringfa3.Mask`.
        precision: "native"; 8 bits take documents only.

    Other arguments and results as in `flash_attn_varlen_func`; lse is (h, t). A query that
    attends to no key has output 0, LSE -inf (with a sink: the sink) and gradient 0.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it and what is allowed.
        RuntimeError: torch.compile traces the call.
    """
    if torch.compiler.is_compiling():
        raise RuntimeError(
            "flash_attn_mask_func inside a compiled function: make plan_context(mask, (0, 1)) "
            "outside, and give the plan to ring_attn_func inside"
        )
    if not isinstance(mask, Mask):
        raise TypeError(
            f"mask must be a ringfa3.Mask, got {type(mask).__name__}: make one of spans, documents, "
            "trees or blocks; a function of indices has no spans"
        )
    check_tensors(q, k, v)
    for name, x, tokens in (("q", q, mask.q_tokens), ("k", k, mask.k_tokens)):
        if x.dim() != 3 or x.shape[0] != tokens:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}: this mask needs ({tokens}, heads, head_dim)"
            )
    return ring_attn_func(
        q,
        k,
        v,
        plan_context(mask, (0, 1)),
        softmax_scale=softmax_scale,
        deterministic=deterministic,
        return_lse=return_lse,
        precision=precision,
        sink=sink,
    )
