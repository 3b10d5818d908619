"""Gathers the tokens of all ranks, in the order of the documents, differentiably."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist


class Unshard(torch.autograd.Function):
    """`ContextPlan.unshard`: apply(x_local, plan, dim)."""

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
