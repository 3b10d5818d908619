"""The op behind `attn_implementation="ringfa3"` on one device.

It reads padding and position ids itself. So a compiler, which has no values, sees one node with
outputs (out, lse), and so does a checkpoint's policy.
"""

from __future__ import annotations

from functools import partial

import torch

from ringfa3 import functional
from ringfa3.custom_op import checkpointed, custom_op, register_autograd, register_fake
from ringfa3.hf.documents import Documents, documents_of
from ringfa3.kernels.reference import statistics_dtype
from ringfa3.kernels.sinks import SINK, sink_gradient


@custom_op
def padded_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sink: torch.Tensor | None,
    padding: torch.Tensor | None,
    packed: torch.Tensor | None,
    cu_q: torch.Tensor | None,
    cu_k: torch.Tensor | None,
    step: int,
    scale: float,
    left: int,
    right: int,
    deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of a batch: q and out (b, s, h, d), k and v (b, s_k, h_kv, d), lse (b, h, s).

    The last rows of queries and keys are aligned. `padding`, `packed` and `step` as in
    `documents_of`; with `cu_q` and `cu_k` documents of given lengths, over all b * s tokens.
    """
    documents = _documents(q, k, padding, packed, cu_q, cu_k, step, right)
    attend = partial(
        functional.attention,
        scale=scale,
        left=left,
        right=right,
        deterministic=deterministic,
        precision="native",
    )
    if documents is None:
        return attend(q, k, v, sink, None, None)
    out, lse = attend(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), sink, *documents)
    return out.view(q.shape), _by_batch(lse, q)


@register_fake(padded_attention)
def _(q, k, v, *_):  # type: ignore[no-untyped-def]
    shape = (q.shape[0], q.shape[2], q.shape[1])
    return q.new_empty(q.shape), q.new_empty(shape, dtype=statistics_dtype(q.dtype))


@custom_op
def padded_attention_backward(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    padding: torch.Tensor | None,
    packed: torch.Tensor | None,
    cu_q: torch.Tensor | None,
    cu_k: torch.Tensor | None,
    step: int,
    scale: float,
    left: int,
    right: int,
    deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq, dk, dv) in the shapes and dtypes of q, k, v."""
    documents = _documents(q, k, padding, packed, cu_q, cu_k, step, right)
    differentiate = partial(
        functional.attention_backward,
        scale=scale,
        left=left,
        right=right,
        deterministic=deterministic,
    )
    if documents is None:
        return differentiate(dout, dlse, q, k, v, out, lse, None, None)
    flat_q, flat_k, flat_v, flat_out, dout = (x.flatten(0, 1) for x in (q, k, v, out, dout))
    dlse = None if dlse is None else _by_head(dlse)
    grads = differentiate(dout, dlse, flat_q, flat_k, flat_v, flat_out, _by_head(lse), *documents)
    dq, dk, dv = (x.view(y.shape) for x, y in zip(grads, (q, k, v), strict=True))
    return dq, dk, dv


@register_fake(padded_attention_backward)
def _(dout, dlse, q, k, v, *_):  # type: ignore[no-untyped-def]
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _documents(
    q: torch.Tensor,
    k: torch.Tensor,
    padding: torch.Tensor | None,
    packed: torch.Tensor | None,
    cu_q: torch.Tensor | None,
    cu_k: torch.Tensor | None,
    step: int,
    right: int,
) -> Documents | None:
    if cu_q is not None and cu_k is not None:
        return Documents(cu_q, cu_k)
    causal = right >= 0
    return documents_of(q.shape[0], q.shape[1], k.shape[1], causal, padding, packed, step)


def _by_batch(lse: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """(h, b * s) as (b, h, s)."""
    return lse.view(q.shape[2], q.shape[0], q.shape[1]).transpose(0, 1).contiguous()


def _by_head(lse: torch.Tensor) -> torch.Tensor:
    """(b, h, s) as (h, b * s)."""
    return lse.transpose(0, 1).flatten(1)


def _save(ctx, inputs, outputs):  # type: ignore[no-untyped-def]
    q, k, v, sink, padding, packed, cu_q, cu_k, *ctx.settings = inputs
    ctx.save_for_backward(sink, q, k, v, *outputs, padding, packed, cu_q, cu_k)


def _gradients(ctx, dout, dlse):  # type: ignore[no-untyped-def]
    sink, *saved = ctx.saved_tensors
    out, lse = saved[3:5]
    dout = torch.zeros_like(out) if dout is None else dout
    grads = padded_attention_backward(dout, dlse, *saved, *ctx.settings)
    if sink is None or not ctx.needs_input_grad[SINK]:
        return grads
    return *grads, sink_gradient(dout, dlse, out, lse, sink)


register_autograd(padded_attention, _save, _gradients)
checkpointed.append(padded_attention)
