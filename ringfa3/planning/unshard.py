"""Gathers the tokens of all ranks, in the order of the documents, differentiably."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.distributed as dist

from ringfa3.custom_op import custom_op, register_fake
from ringfa3.planning.handles import from_handle, graph_handle

Agree: TypeAlias = Callable[[dist.ProcessGroup, dict[str, str], Exception | None], None]
_agree: Agree | None = None


# PyTorch indexes rows of signed integers alone.
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def select(x: torch.Tensor, index: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """`torch.index_select` of any dtype, of an index on any device."""
    index = index.to(x.device)
    if x.dtype not in _SIGNED:  # a view as another dtype would end the gradient
        return x.index_select(dim, index)
    return x.view(_SIGNED[x.dtype]).index_select(dim, index).view(x.dtype)


def upload(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the host on `device`. The host does not wait for work of a GPU's stream."""
    if device.type == "cuda" and len(x):
        x = x.pin_memory()  # PyTorch reuses it only after the copy that reads it
    return x.to(device, non_blocking=True)


def set_agreement(agree: Agree) -> None:
    """agree(group, settings, error) runs before ranks gather: it raises on all of them, or none.

    `ringfa3.ring`, which `import ringfa3` imports, gives it: planning knows no groups.
    """
    global _agree
    _agree = agree


def require_agreement(
    group: dist.ProcessGroup | None, settings: dict[str, str], error: Exception | None
) -> None:
    """Raises an error of any rank on all ranks of the group; None: there is only this rank.

    Raises RuntimeError: nobody has called `set_agreement`.
    """
    if group is None:
        if error is not None:
            raise error
        return
    if _agree is None:
        raise RuntimeError("ranks cannot agree before ringfa3.ring is imported: import ringfa3")
    _agree(group, settings, error)


class Unshard(torch.autograd.Function):
    """apply(x_local, plan, dim): `ContextPlan.unshard`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x_local, plan, dim):  # type: ignore[no-untyped-def]
        return gather_tokens(x_local, graph_handle(plan), dim, plan.total_tokens)

    @staticmethod
    def setup_context(ctx, inputs, output):  # type: ignore[no-untyped-def]
        _, ctx.plan, ctx.dim = inputs

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return ctx.plan.shard(grad, ctx.dim), None, None


@custom_op
def gather_tokens(x_local: torch.Tensor, plan: int, dim: int, tokens: int) -> torch.Tensor:
    """All `tokens` tokens along `dim`; `plan` is a plan's handle."""
    context = from_handle(plan)
    error, settings = None, {}
    try:
        settings = agreed_settings(x_local, context, dim)
    except Exception as problem:  # whatever it is, the other ranks wait
        error = problem
    require_agreement(context.group if context.world > 1 else None, settings, error)
    rows = x_local.movedim(dim, 0)
    if context.world == 1:
        gathered = rows.contiguous()
    else:
        padded = rows.new_zeros((max(context.tokens_per_rank), *rows.shape[1:]))
        padded[: len(rows)] = rows
        parts = [torch.empty_like(padded) for _ in range(context.world)]
        # as bytes: gloo and NCCL have no int16, and not every 8-bit float
        dist.all_gather(
            [x.view(torch.uint8) for x in parts], padded.view(torch.uint8), group=context.group
        )
        gathered = torch.cat([p[:n] for p, n in zip(parts, context.tokens_per_rank, strict=True)])
    index = np.argsort(np.concatenate([context.index_of(r) for r in range(context.world)]))
    return select(gathered, torch.from_numpy(index)).movedim(0, dim)


@register_fake(gather_tokens)
def _fake_gather(x_local: torch.Tensor, plan: int, dim: int, tokens: int) -> torch.Tensor:
    rows = x_local.movedim(dim, 0)
    return rows.new_empty((tokens, *rows.shape[1:])).movedim(0, dim)


def agreed_settings(x_local: torch.Tensor, plan: Any, dim: int) -> dict[str, str]:
    """What must be equal on all ranks. Raises ValueError, IndexError: this rank's is wrong."""
    if x_local.shape[dim] != plan.local_tokens:
        raise ValueError(
            f"x_local has {x_local.shape[dim]} tokens along dim {dim}; the plan gives this rank "
            f"{plan.local_tokens} of {plan.total_tokens}: pass this rank's shard"
        )
    sizes = [str(n) for n in x_local.shape]
    sizes[dim] = "tokens"
    return {
        "plan": f"{plan.total_tokens} tokens, digest {plan.digest}",
        "x_local": f"({', '.join(sizes)}) of {x_local.dtype} on {x_local.device.type}",
    }
