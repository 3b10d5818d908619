"""If this fails, a ring on GPUs with a memory budget or with keys of another plan is wrong, or has
more rows in memory than its budget. References are in float64: `pytest -m gpu`."""

from __future__ import annotations

import random

import pytest
import torch

from ringfa3 import plan_context
from ringfa3.symmetric.forward_mode import select_forward_mode
from tests.support.gpus import spawn, worlds
from tests.support.mask_checks import case_of, given_of
from tests.support.masks import Union
from tests.support.ring_checks import DKV, KV, check_ring, least_budget

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

TOKENS = 1500
CAUSAL = Union(TOKENS, TOKENS, [("|", (0, TOKENS, 0, TOKENS, -TOKENS, 0))])


def check_budgets(world: int, transport: str, device: str) -> None:
    """With the least budget of messages, with a larger one and without. By messages, buffers hold
    no more rows; over `symmetric` the least one forbids to gather K/V."""
    torch.manual_seed(world)
    given = given_of(CAUSAL, 8, 2, 128, torch.bfloat16, False, device)
    least = least_budget(CAUSAL.mask(), (0, world))
    for budget in (least, 2 * least, None):
        plan = plan_context(CAUSAL.mask(), kv_budget=budget)
        what = f"rank {plan.rank} of {world}, {transport}, budget {budget}"
        passes = check_ring(plan, CAUSAL, given, transport, False, what)
        if transport == "symmetric":
            mode = select_forward_mode(plan, *given[0][:2])
            assert budget != least or mode == "hops", what
        elif budget is not None:
            for rows in passes:
                assert 0 < rows[KV] // 2 <= budget, what
            assert passes[1][DKV] - plan.local_keys <= budget, what


def check_cross(world: int, transport: str, device: str) -> None:
    """Packed documents, one of them without keys; and random masks. Keys of another layout."""
    documents = [
        (0, 700, 0, 300),
        (700, 701, 300, 900),
        (701, 1100, 900, 900),
        (1100, 1500, 900, 1400),
    ]
    steps = [("|", (*x, -TOKENS, TOKENS)) for x in documents]
    torch.manual_seed(world)
    packed = Union(1500, 1400, steps)
    given = given_of(packed, 8, 2, 128, torch.bfloat16, False, device)
    keys = plan_context([0, 300, 900, 900, 1400], None, "contiguous", causal=False)
    plan = plan_context([0, 700, 701, 1100, 1500]).cross(keys)
    check_ring(plan, packed, given, transport, False, f"rank {plan.rank}, documents")
    rng = random.Random(world)
    for number in (7, 11, 19, 23, 31, 35):  # cross-attention without sinks
        union, given = case_of(rng, number, device)
        if union.q_tokens and union.k_tokens:
            keys = plan_context(union.k_tokens, causal=False)
            plan = plan_context(union.q_tokens).cross(keys, union.mask())
            what = f"rank {plan.rank}, case {number}: {union}"
            check_ring(plan, union, given, transport, bool(number % 4 // 2), what)


def _worker(rank: int, world: int) -> None:
    for transport in ("nccl", "symmetric"):
        check_budgets(world, transport, "cuda")
        check_cross(world, transport, "cuda")


@worlds(2, 4)
def test_plans_with_a_budget_and_cross_plans_hold_the_gate(world: int) -> None:
    spawn(_worker, world)
