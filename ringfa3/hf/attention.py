"""The registered attention function: one layer of a transformers model."""

from __future__ import annotations

from typing import Any

import torch

from ringfa3.attention_op import with_columns
from ringfa3.custom_op import autocast_inputs
from ringfa3.hf import ring_layer
from ringfa3.hf.checks import check_arguments, check_mask, check_spans, group_of, uncompiled
from ringfa3.hf.masks import Mask
from ringfa3.hf.models.encoder_decoder import check_cross, crosses, is_cross, plan_of_layer
from ringfa3.hf.op import padded_attention
from ringfa3.hf.probe import Probe
from ringfa3.kernels.reference import accum_dtype
from ringfa3.ring.prepare_call import raise_on_all_ranks
from ringfa3.validation import (
    HEAD_DIM_STEP,
    check_batch,
    check_qkv,
    check_sink,
    resolve_scale,
)


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Mask | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    s_aux: torch.Tensor | None = None,
    **keywords: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one layer, with the arguments of transformers' `sdpa_attention_forward`.

    Args:
        query: (b, h, s, d); key: (b, h_kv, s_k, d); value: (b, h_kv, s_k, d_v).
        attention_mask: from `masks.mask_function`. None: if `is_causal`, the window is
            (sliding_window - 1, 0), else (sliding_window - 1, sliding_window - 1); -1, which is
            unlimited, stands for sliding_window - 1 where sliding_window is None.
        s_aux: (h,) attention sinks, a logit a head that takes part in the softmax.
        keywords: position_ids, or cu_seq_lens_q and cu_seq_lens_k, give packed documents.
            ringfa3_plan, a ContextPlan: the tokens are those of this rank of the plan's group. In a
            decoder that attends to an encoder it is a plan of `ContextPlan.cross`.
            ringfa3_mask, a ringfa3.Mask of all tokens, or a dict of them by layer type, replaces
            the model's mask; default that of the plan.

    Returns:
        (out (b, s, h, d_v), None).

    Raises:
        ValueError: an argument asks for what RingFA3 does not compute exactly. With ringfa3_plan
            every rank of the group raises it.
        RingError: as `ring_attn_func`.
    """
    plan, spans = keywords.get("ringfa3_plan"), keywords.get("ringfa3_mask")
    for probe in (plan, spans):
        if isinstance(probe, Probe):
            check_arguments(0.0, keywords)
            crossing = crosses(module, attention_mask)
            return probe.attend(module, query, key, value, crossing), None
    eager = plan is not None or spans is not None
    attend = _attend_uncompiled if eager else _attend
    settings = dropout, scaling, sliding_window, is_causal, s_aux, keywords
    return attend(module, query, key, value, attention_mask, *settings), None


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Mask | None,
    dropout: float,
    scaling: float | None,
    sliding_window: int | None,
    is_causal: bool | None,
    s_aux: torch.Tensor | None,
    keywords: dict[str, Any],
) -> torch.Tensor:
    """out of `attention_forward`."""
    plan = plan_of_layer(module, keywords.get("ringfa3_plan"), attention_mask)
    given = keywords.get("ringfa3_mask")
    given = getattr(plan, "mask", None) if given is None else given
    mask, spans = Mask(), None
    try:
        check_arguments(dropout, keywords)
        if given is None or is_cross(plan):
            mask = check_mask(module, attention_mask, sliding_window, is_causal, query, key)
        if is_cross(plan):
            spans = check_cross(module, plan, given, mask)
        elif given is not None:
            tensors = attention_mask, query, key
            spans = check_spans(module, given, *tensors, keywords, plan is not None)
        if plan is not None:
            plan = ring_layer.check_context(module, plan, mask, spans, keywords, query, key)
    except (TypeError, ValueError) as problem:
        raise_on_all_ranks(group_of(plan), problem)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    q, k, v = autocast_inputs(q, k, v)
    scale = resolve_scale(scaling, q)
    d_v = v.shape[-1]
    d = max(q.shape[-1], d_v)
    q, k = with_columns(q, d), with_columns(k, d)
    if d_v % HEAD_DIM_STEP:
        v = with_columns(v, d)
    sink = None if s_aux is None else s_aux.to(accum_dtype(q.dtype))
    settings = scale, mask.left, mask.right, False  # the backward asks for PyTorch's mode
    if spans is not None:
        return ring_layer.attend_spans(plan, q, k, v, sink, scale, spans)[..., :d_v]
    if plan is None:
        check_qkv(q, k, v, dims=4)
        check_batch(q, k)
        check_sink(sink, q)
        out, _ = padded_attention(q, k, v, sink, *_documents(mask, keywords, q), *settings)
    else:
        out = ring_layer.attend(plan, q, k, v, sink, *settings)
    return out[..., :d_v]


_attend_uncompiled = uncompiled(_attend)


_Documents = tuple[
    torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, int
]


def _documents(mask: Mask, keywords: dict[str, Any], q: torch.Tensor) -> _Documents:
    """(padding, packed, cu_q, cu_k, step) of `padded_attention`.

    Padding that hides nothing is none. Then cumulative lengths decide, then the documents of the
    mask, then breaks of position_ids; the op refuses what cannot go together, because a compiler,
    which has no values, traces this. Raises ValueError: one that cannot be read.
    """
    cu_q, cu_k = (keywords.get(name) for name in ("cu_seq_lens_q", "cu_seq_lens_k"))
    if cu_q is not None or cu_k is not None:
        if cu_q is None or cu_k is None:
            raise ValueError("cu_seq_lens_q: give cu_seq_lens_k too, and neither without the other")
        return mask.padding, mask.documents, cu_q, cu_k, 0
    if mask.documents is not None:
        return mask.padding, mask.documents, None, None, 0
    positions = keywords.get("position_ids")
    crossing = mask.left < 0 and mask.right < 0 and mask.keys != q.shape[1]
    if crossing:  # the keys are other tokens than those that have the positions
        return mask.padding, None, None, None, 0
    if positions is not None and positions.shape in ((1, q.shape[1]), (q.shape[0], q.shape[1])):
        return mask.padding, positions, None, None, 1
    if mask.unread:
        raise ValueError(
            "position_ids do not reach attention in this model, so torch.compile cannot see packed "
            "documents: do not compile, or pass cu_seq_lens_q and cu_seq_lens_k"
        )
    return mask.padding, None, None, None, 0
