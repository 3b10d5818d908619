"""If this fails, cross-attention over a ring pairs the wrong tokens. `plan.cross`: queries of one
plan attend to the tokens of another one, as both are sharded."""

from __future__ import annotations

import pickle
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.autograd import grad

from ringfa3 import ContextPlan, Mask, flash_attn_varlen_func, plan_context, ring_attn_func
from tests.masks.test_mask_plans import coverage
from tests.planning.test_tiling import MODES
from tests.support.ranks import Ranks

CU_Q, CU_K = [0, 300, 301, 330, 480], [0, 50, 400, 400, 520]  # document 2 has no keys
PAIRS = Mask.documents(CU_Q, CU_K, causal=False)


def cross(rank: int, world: int, layout: str = "zigzag", mask: Mask | None = None) -> ContextPlan:
    keys = plan_context(CU_K, (rank, world), layout, causal=False)
    return plan_context(CU_Q, (rank, world)).cross(keys, mask)


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_every_pair_of_documents_is_covered_once_and_no_other(layout: str) -> None:
    """Over three ranks. Reference: the mask, cell by cell, exactly."""
    plans = [cross(rank, 3, layout) for rank in range(3)]
    for mode in MODES:
        np.testing.assert_array_equal(coverage(plans, mode, 16, 64), PAIRS.dense())


def test_tokens_stay_where_the_two_plans_have_them() -> None:
    for rank in range(3):
        plan = cross(rank, 3)
        queries, keys = plan.query_plan, plan.key_plan
        assert queries is plan_context(CU_Q, (rank, 3))
        assert keys is plan_context(CU_K, (rank, 3), causal=False)
        ids = torch.arange(520)
        assert torch.equal(plan.shard(ids[:480]), queries.shard(ids[:480]))
        assert torch.equal(plan.shard_keys(ids), keys.shard(ids))
        assert torch.equal(plan.positions, queries.positions)
        assert torch.equal(plan.key_positions, keys.positions)
        assert cross(rank, 3) is plan
        twin = pickle.loads(pickle.dumps(plan))
        assert twin.digest == plan.digest
        assert twin.key_plan.digest == keys.digest


def test_the_two_plans_are_bound_too() -> None:
    """A data loader's plan finds its group with all of its parts."""
    group: Any = mock.Mock()
    with mock.patch("ringfa3.planning.token_shards.warn_of_hosts"):
        bound = cross(0, 2).bound_to(group)
        parts = bound.query_plan, bound.key_plan
        assert all(x._group is not None and x._group() is group for x in (bound, *parts))
        assert cross(0, 2).bound_to(group) is bound
        assert (bound.query_plan, bound.key_plan) == parts
    assert cross(0, 2).query_plan._group is None


@pytest.mark.parametrize(
    ("of_queries", "of_keys", "budget"),
    [(9000, 5000, 9000), (None, 5000, None), (5000, None, None)],
)
def test_a_budget_is_the_larger_of_both(
    of_queries: int | None, of_keys: int | None, budget: int | None
) -> None:
    keys = plan_context(CU_K, (0, 2), causal=False, kv_budget=of_keys)
    assert plan_context(CU_Q, (0, 2), kv_budget=of_queries).cross(keys).kv_budget == budget


def test_ranks_notice_keys_of_another_layout() -> None:
    assert cross(0, 3).digest != cross(0, 3, "contiguous").digest
    assert cross(0, 3).digest == cross(2, 3).digest


def test_positions_are_those_of_both_plans_under_a_mask() -> None:
    tree = Mask.tree([8, 6, 8], [-1, 0, 0])
    plan = plan_context(tree).cross(plan_context(5), Mask.documents([0, 22], [0, 5], causal=False))
    assert plan.positions.tolist() == tree.positions.tolist()
    assert plan.key_positions.tolist() == [*range(5)]


def _against_one_device(group: dist.ProcessGroup) -> float:
    """The largest difference of out and of the gradients of this rank's q, k, v."""
    keys = plan_context(CU_K, group, causal=False)
    plan = plan_context(CU_Q, group).cross(keys)
    generator = torch.Generator().manual_seed(0)
    tensors = [
        torch.randn(n, h, 8, generator=generator, dtype=torch.float64, requires_grad=True)
        for n, h in ((480, 4), (520, 2), (520, 2), (480, 4))
    ]
    *qkv, dout = tensors
    expected = flash_attn_varlen_func(*qkv, torch.tensor(CU_Q), torch.tensor(CU_K))
    shards = plan.shard, plan.shard_keys, plan.shard_keys
    wanted = [shard(x) for shard, x in zip(shards, grad(expected, qkv, dout), strict=True)]
    local = [shard(x.detach()).requires_grad_() for shard, x in zip(shards, qkv, strict=True)]
    out = ring_attn_func(*local, plan)
    found = grad(out, local, plan.shard(dout))
    pairs = [(out, plan.shard(expected)), *zip(found, wanted, strict=True)]
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.soak)])
def test_a_ring_equals_one_device(ranks: Ranks, world: int) -> None:
    """Out and gradients in float64, within 1e-12 of flash_attn_varlen_func."""
    assert max(ranks.run(world, _against_one_device)) <= 1e-12


@pytest.mark.parametrize(
    ("keys", "mask", "message"),
    [
        (plan_context(CU_K, (0, 2)), None, r"keys has world=2, and the plan of the queries 3"),
        (plan_context(CU_K, (1, 3)), None, r"keys has rank=1, and the plan of the queries 0"),
        (plan_context(CU_K, (0, 3), hosts=3), None, r"keys has hosts=\(0, 1, 2\), and the plan"),
        (plan_context([0, 9], (0, 3)), None, "cu has 4 documents, cu_k has 1"),
        (plan_context(PAIRS, (0, 3)), None, r"documents of a plan with Mask\(.*give the mask of"),
        (plan_context(CU_K, (0, 3)), Mask.documents(CU_Q), "480 queries and 480 keys, the plan"),
        ([0, 9], None, "plan must come from plan_context, got list"),
        (plan_context(CU_K, (0, 3)), CU_K, "mask must be a ringfa3.Mask, got list"),
    ],
)
def test_what_does_not_fit_is_refused(keys: ContextPlan, mask: Mask | None, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        plan_context(CU_Q, (0, 3)).cross(keys, mask)
