"""Which forward runs over peers' memory: one launch over gathered K/V, or one launch for each hop.

One launch needs no merge, no float32 O and has one tail, but needs memory for all K/V to which
a rank attends. The rule chooses it where that memory is no more than what it saves.
"""

from __future__ import annotations

import os

import torch

from ringfa3.kernels.forward import MAX_ARRIVAL_FLAGS
from ringfa3.kernels.reference import accum_dtype
from ringfa3.planning.context_plan import ContextPlan

FORWARD_MODE_ENV = "RINGFA3_FORWARD"  # overrides the rule for measurements; equal on all ranks
FORWARD_MODES = ("gathered", "hops")


def select_forward_mode(plan: ContextPlan, q: torch.Tensor, k: torch.Tensor) -> str:
    """One of `FORWARD_MODES`, the same on all ranks of a plan, for q (t, h, d) and k (t, hk, d).

    Raises ValueError: the environment asks for another.
    """
    asked = os.environ.get(FORWARD_MODE_ENV)
    if asked is not None and asked not in FORWARD_MODES:
        allowed = ", ".join(map(repr, FORWARD_MODES))
        raise ValueError(f"{FORWARD_MODE_ENV}={asked!r}: allowed are {allowed}")
    if plan.world > MAX_ARRIVAL_FLAGS:  # before max_rows, whose time is cubic in the world
        return "hops"
    most = plan.kv_exchange.max_rows
    if not most.published:  # nothing to gather
        return "hops"
    if asked is not None:
        return asked
    if plan.kv_budget is not None and most.gathered > plan.kv_budget:
        return "hops"
    running_o = most.local * q.shape[1] * q.shape[2] * accum_dtype(q.dtype).itemsize
    kv_recv = min(2, plan.world - 1) * most.published * _row_bytes(k)
    return "gathered" if gathered_bytes(plan, k) <= running_o + kv_recv else "hops"


def budget_error(plan: ContextPlan) -> ValueError | None:
    """The error of a plan whose budget is less than what passes over `symmetric` receive at once:
    the blocks of two other ranks."""
    if plan.kv_budget is None:  # before max_rows, whose time is cubic in the world
        return None
    rows = min(2, plan.world - 1) * plan.kv_exchange.max_rows.published
    if plan.kv_budget >= rows:
        return None
    return ValueError(
        f"kv_budget={plan.kv_budget}: transport 'symmetric' receives {rows} rows of K/V at once: "
        f"give kv_budget={rows} or more, or transport='nccl'"
    )


def gathered_bytes(plan: ContextPlan, k: torch.Tensor) -> int:
    """Bytes of all K/V to which a rank attends, on the rank where that is most; k (t, hk, d)."""
    return plan.kv_exchange.max_rows.gathered * _row_bytes(k)


def _row_bytes(k: torch.Tensor) -> int:
    return 2 * k.shape[1] * k.shape[2] * k.itemsize  # K and V
