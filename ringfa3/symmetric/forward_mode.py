"""Which forward runs over peers' memory: one launch over gathered K/V, or one for each hop.

One launch merges nothing, keeps no float32 O and has one tail; it takes room for all K/V that a
rank sees. So it is chosen where that is no more than what it saves.
"""

from __future__ import annotations

import os

import torch

from ringfa3.kernels.launch import WORDS
from ringfa3.kernels.reference import statistics_dtype
from ringfa3.planning.context_plan import ContextPlan

FORWARD = "RINGFA3_FORWARD"  # overrides the rule, on all ranks alike, to measure it
KINDS = ("gathered", "hops")


def kind_of_forward(plan: ContextPlan, q: torch.Tensor, k: torch.Tensor) -> str:
    """One of `KINDS`, the same on all ranks of a plan, for q (t, h, d) and k (t, hk, d).

    Raises ValueError: the environment asks for another.
    """
    asked = os.environ.get(FORWARD)
    if asked is not None and asked not in KINDS:
        raise ValueError(f"{FORWARD}={asked!r}: allowed are {', '.join(map(repr, KINDS))}")
    most = plan.kv_exchange.max_rows
    if not most.published or plan.world > WORDS:  # nothing to gather, or no word for each owner
        return "hops"
    running = most.local * q.shape[1] * q.shape[2] * statistics_dtype(q.dtype).itemsize
    landing = min(2, plan.world - 1) * most.published * _row_bytes(k)
    return asked or KINDS[0 if gathered_bytes(plan, k) <= running + landing else 1]


def gathered_bytes(plan: ContextPlan, k: torch.Tensor) -> int:
    """Of all K/V that a rank sees, the rank with most; k (t, hk, d)."""
    return plan.kv_exchange.max_rows.gathered * _row_bytes(k)


def _row_bytes(k: torch.Tensor) -> int:
    return 2 * k.shape[1] * k.shape[2] * k.itemsize  # K and V
