"""What the custom ops of attention share: fakes, gradients, layouts of tensors and LSE.

Letters in shapes: b sequences of s rows, t rows in all; h heads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from ringfa3.custom_op import (
    checkpointed,
    differentiable_once,
    register_autograd,
    register_fake,
)
from ringfa3.kernels.reference import accum_dtype
from ringfa3.validation import PRECISIONS

SINK = 4  # its number in `ctx.needs_input_grad`


def register_attention(
    op: Callable[..., Any], backward: Callable[..., Any], split: Callable[..., Any]
) -> None:
    """Registers fakes and the gradient of an op, whose outputs `keep_attention` keeps.

    Args:
        op: op(q, k, v, sink, *others) gives out, which is (b, s, h, d_v) or (t, h, d_v) for v of
            head dim d_v, and LSE, (b, h, s) or (h, t).
        backward: an op; backward(dout, dlse, q, k, v, out, lse, sink, *tensors, *settings) gives
            (dq, dk, dv, dsink). dlse may be None. sink is None where it needs no gradient and dq
            does not depend on it; dsink has shape (0,) and the dtype of lse then.
        split: split(ctx, *others) gives (tensors, settings) for `backward`.
    """

    @register_fake(op)
    def fake(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (*q.shape[:-3], q.shape[-2], q.shape[-3])
        return q.new_empty(out_shape(q, v)), q.new_empty(shape, dtype=accum_dtype(q.dtype))

    @register_fake(backward)
    def fake_backward(
        dout: torch.Tensor, dlse: torch.Tensor | None, *qkv_and_more: Any
    ) -> tuple[torch.Tensor, ...]:
        q, k, v, _, lse, sink = qkv_and_more[:6]
        dsink = lse.new_empty((0,)) if sink is None else sink.new_empty(sink.shape)
        return *(x.new_empty(x.shape) for x in (q, k, v)), dsink

    def save(ctx: Any, inputs: tuple[Any, ...], outputs: tuple[torch.Tensor, ...]) -> None:
        q, k, v, sink, *others = inputs
        tensors, ctx.settings = split(ctx, *others)
        ctx.save_for_backward(sink, q, k, v, *outputs, *tensors)

    def gradients(
        ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        sink, q, k, v, out, lse, *tensors = ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else dout
        in_8_bits = any(x in PRECISIONS[1:] for x in ctx.settings)
        needed = sink if ctx.needs_input_grad[SINK] or in_8_bits else None
        grads: tuple[torch.Tensor, ...] = backward(
            dout, dlse, q, k, v, out, lse, needed, *tensors, *ctx.settings
        )
        return grads if ctx.needs_input_grad[SINK] else grads[:3]

    register_autograd(op, save, gradients)
    differentiable_once(backward, op)
    checkpointed.append(op)


def packed(x: torch.Tensor) -> torch.Tensor:
    """(b, s, h, d) or (t, h, d) as (t, h, d)."""
    return x.flatten(0, 1) if x.dim() == 4 else x


def with_columns(x: torch.Tensor, d: int) -> torch.Tensor:
    """x with columns of zeros up to head dim d. They change no score and no other column of out."""
    return F.pad(x, (0, d - x.shape[-1])) if x.shape[-1] < d else x


def out_shape(q: torch.Tensor, v: torch.Tensor) -> tuple[int, ...]:
    """The shape of out: that of q with the head dim of v."""
    return *q.shape[:-1], v.shape[-1]


def lse_by_sequence(lse: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """LSE (h, b * s) as (b, h, s), contiguous, for q (b, s, h, d)."""
    return lse.view(q.shape[2], q.shape[0], q.shape[1]).transpose(0, 1).contiguous()


def lse_by_head(lse: torch.Tensor) -> torch.Tensor:
    """LSE (b, h, s) as (h, b * s)."""
    return lse.transpose(0, 1).flatten(1)
