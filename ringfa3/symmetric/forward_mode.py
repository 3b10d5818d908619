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
    if plan.kv_budget is not None and most.gathered > plan.kv_budget:
        return "hops"
    if asked is not None:
        return asked
    running_o = most.local * q.shape[1] * q.shape[2] * accum_dtype(q.dtype).itemsize
    kv_recv = min(2, plan.world - 1) * most.published * _row_bytes(k)
    return "gathered" if gathered_bytes(plan, k) <= running_o + kv_recv else "hops"


def budget_error(plan: ContextPlan) -> ValueError | None:
    """The error of a plan whose budget is less than what a backward over `symmetric` holds at once:
    two blocks of float32 dK/dV that go to other ranks, and what these return."""
    if plan.kv_budget is None:  # before max_rows, whose time is cubic in the world
        return None
    most = plan.kv_exchange.max_rows
    rows = min(2, plan.world - 1) * most.published + most.returned
    if plan.kv_budget >= rows:
        return None
    return ValueError(
        f"kv_budget={plan.kv_budget}: transport 'symmetric' holds {rows} rows of dK/dV at once: "
        f"give kv_budget={rows} or more, or transport='nccl'"
    )


def gathered_bytes(plan: ContextPlan, k: torch.Tensor) -> int:
    """Bytes of all K/V to which a rank attends, on the rank where that is most; k (t, hk, d)."""
    return plan.kv_exchange.max_rows.gathered * _row_bytes(k)


def _row_bytes(k: torch.Tensor) -> int:
    return 2 * k.shape[1] * k.shape[2] * k.itemsize  # K and V
