"""The ring of a compiled call that has no plan yet: its op makes the plan when the graph runs.

So a graph serves every plan and, with dynamic shapes, every length.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._C._distributed_c10d import _resolve_process_group

from ringfa3.attention_op import register_attention
from ringfa3.custom_op import custom_op
from ringfa3.planning.context_plan import ContextPlan, dense_plan
from ringfa3.ring.prepare_call import bind_to_group


@custom_op
def graph_ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sink: torch.Tensor | None,
    plan: int,
    batch: int,
    tokens: int,
    layout: str,
    causal: bool,
    group: str,
    left: int,
    right: int,
    scale: float,
    deterministic: bool,
    precision: str,
    transport: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`ring_attention` with the plan of `GraphPlan.arguments`."""
    context = _plan(plan, batch, tokens, layout, causal, group, left, right)
    ring = torch.ops.ringfa3.ring_attention.default
    out, lse = ring(q, k, v, sink, context.handle, scale, deterministic, precision, transport)
    return out, lse


@custom_op
def graph_ring_attention_backward(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    sink: torch.Tensor | None,
    plan: int,
    batch: int,
    tokens: int,
    layout: str,
    causal: bool,
    group: str,
    left: int,
    right: int,
    scale: float,
    deterministic: bool,
    precision: str,
    transport: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`ring_attention_backward`, likewise."""
    context = _plan(plan, batch, tokens, layout, causal, group, left, right)
    settings = context.handle, scale, deterministic, precision, transport
    backward = torch.ops.ringfa3.ring_attention_backward.default
    dq, dk, dv, dsink = backward(dout, dlse, q, k, v, out, lse, sink, *settings)
    return dq, dk, dv, dsink


def _plan(
    plan: int,
    batch: int,
    tokens: int,
    layout: str,
    causal: bool,
    group: str,
    left: int,
    right: int,
) -> ContextPlan:
    """The same object for the same arguments, while `plan_context`'s cache has it."""
    process_group = _resolve_process_group(group) if group else None  # type: ignore[arg-type]
    if plan:
        context = bind_to_group(ContextPlan.from_handle(plan), process_group)
        return context if context.mask is not None else context.with_window((left, right))
    return dense_plan(batch, tokens, process_group, layout, causal, (left, right))


def _split(ctx: Any, plan: int, *settings: Any) -> tuple[tuple[()], tuple[Any, ...]]:
    if isinstance(plan, int) and plan:  # a compiler traces with a symbol
        ctx.plan = ContextPlan.from_handle(plan)  # alive until the backward
    return (), (plan, *settings)


register_attention(graph_ring_attention, graph_ring_attention_backward, _split)
