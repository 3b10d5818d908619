"""What a ring call over `symmetric` needs before it can be captured in a CUDA graph.

A capture runs nothing on any device and lets no memory be taken: what the first call of its kind
does must have been done.
"""

from __future__ import annotations

import torch

from ringfa3.planning.context_plan import ContextPlan
from ringfa3.symmetric.backend import CudaMachine
from ringfa3.symmetric.forward_mode import kind_of_forward
from ringfa3.symmetric.ring_pass import Cargo

REMEDY = "run a call of the same plan, shapes, strides and settings, in the same direction, before"


def refusal(
    machine: CudaMachine | None,
    plan: ContextPlan,
    direction: str,
    q: torch.Tensor,
    k: torch.Tensor,
    known: bool,
) -> ValueError | None:
    """Why a "forward" or "backward" cannot be captured now, the same on all ranks, or None.

    known: a call of its kind has been accepted before.
    """
    if machine is None:
        return _not_now("the group has not tried the transport yet")
    if not known:
        return _not_now("it is the first of its kind")
    if direction == "forward" and kind_of_forward(plan, q, k) == "gathered":
        direction = "gathered"
    cargo = Cargo(plan, direction, k)
    if not machine.arena.holds({b: n * cargo.row_bytes[b] for b, n in cargo.rows.items()}):
        return _not_now("the group's memory would have to grow")
    return None


def _not_now(reason: str) -> ValueError:
    return ValueError(
        f"a ring call over 'symmetric' cannot be captured in a CUDA graph yet, {reason}: {REMEDY}"
    )
