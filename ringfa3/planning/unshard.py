"""Gathers the tokens of all ranks, in the order of the documents, differentiably."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import torch
import torch.distributed as dist

Agree: TypeAlias = Callable[[dist.ProcessGroup, dict[str, str], Exception | None], None]
_agree: Agree | None = None


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
    """apply(x_local, plan, dim), with arguments that fit on all ranks."""

    @staticmethod
    def forward(ctx, x_local, plan, dim):  # type: ignore[no-untyped-def]
        ctx.plan, ctx.dim = plan, dim
        rows = x_local.movedim(dim, 0)
        if plan.world == 1:
            gathered = rows.contiguous()
        else:
            padded = rows.new_zeros((max(plan.tokens_per_rank), *rows.shape[1:]))
            padded[: len(rows)] = rows
            parts = [torch.empty_like(padded) for _ in range(plan.world)]
            # as bytes: gloo and NCCL have no int16, and not every 8-bit float
            dist.all_gather(
                [x.view(torch.uint8) for x in parts], padded.view(torch.uint8), group=plan.group
            )
            gathered = torch.cat([p[:n] for p, n in zip(parts, plan.tokens_per_rank, strict=True)])
        index = np.concatenate([plan.index_of(r) for r in range(plan.world)])
        out = torch.empty_like(gathered)
        out[torch.from_numpy(index).to(rows.device)] = gathered
        return out.movedim(0, dim)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return ctx.plan.shard(grad, ctx.dim), None, None
