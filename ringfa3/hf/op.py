"""The op behind `attn_implementation="ringfa3"` on one device.

It reads padding, labels and position ids itself. So a compiler, which has no values, sees one node
with outputs (out, lse), and so does a checkpoint's policy.
"""

from __future__ import annotations

from functools import partial

import torch

from ringfa3 import functional
from ringfa3.attention_op import lse_by_head, lse_by_sequence, out_shape, register_attention
from ringfa3.custom_op import custom_op
from ringfa3.hf.documents import Documents, check_lengths, documents_of, require_no_padding


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
    """(out, lse) of a batch: q (b, s, h, d), out with the head dim of v, k and v (b, s_k, h_kv, d),
    lse (b, h, s).

    The last rows of queries and keys are aligned. `padding`, `packed` and `step` as in
    `documents_of`; with `cu_q` and `cu_k` documents of given lengths, over all b * s tokens, with
    which `packed`, if given, is compared as labels. Then `padding` must hide nothing.
    """
    if cu_q is not None and padding is not None:
        require_no_padding(padding)
    if cu_q is not None and packed is not None:
        check_lengths(packed, cu_q, q.shape[0])
    documents = _documents(q, k, padding, packed, cu_q, cu_k, step, left, right)
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
    return out.view(out_shape(q, v)), lse_by_sequence(lse, q)


@custom_op
def padded_attention_backward(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq, dk, dv, dsink) as of `functional.attention_backward`, in the shapes of q, k, v."""
    documents = _documents(q, k, padding, packed, cu_q, cu_k, step, left, right)
    differentiate = partial(
        functional.attention_backward,
        scale=scale,
        left=left,
        right=right,
        deterministic=deterministic,
        precision="native",
    )
    if documents is None:
        return differentiate(dout, dlse, q, k, v, out, lse, sink, None, None)
    flat_q, flat_k, flat_v, flat_out, dout = (x.flatten(0, 1) for x in (q, k, v, out, dout))
    dlse = None if dlse is None else lse_by_head(dlse)
    *grads, dsink = differentiate(
        dout, dlse, flat_q, flat_k, flat_v, flat_out, lse_by_head(lse), sink, *documents
    )
    dq, dk, dv = (x.view(y.shape) for x, y in zip(grads, (q, k, v), strict=True))
    return dq, dk, dv, dsink


def _documents(
    q: torch.Tensor,
    k: torch.Tensor,
    padding: torch.Tensor | None,
    packed: torch.Tensor | None,
    cu_q: torch.Tensor | None,
    cu_k: torch.Tensor | None,
    step: int,
    left: int,
    right: int,
) -> Documents | None:
    if cu_q is not None and cu_k is not None:
        return Documents(cu_q, cu_k)
    aligned = left >= 0 or right >= 0
    return documents_of(q.shape[0], q.shape[1], k.shape[1], aligned, padding, packed, step)


register_attention(
    padded_attention,
    padded_attention_backward,
    lambda ctx, *others: (others[:4], others[4:]),
)
