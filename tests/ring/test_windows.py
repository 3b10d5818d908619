"""If this fails, models with layers of different windows compute wrong results under a ring. Layers
of different windows on the tokens of one plan."""

from __future__ import annotations

import random

import pytest
import torch.distributed as dist

from ringfa3 import plan_context
from tests.ring.test_ring_op import (
    EXACT,
    dense_results,
    random_case,
    ring_results,
    shards_of,
)
from tests.support.dense import cumulative, tensors, worst
from tests.support.ranks import Ranks


def _compare_windows(group: dist.ProcessGroup, seed: int, count: int) -> float:
    """Largest error of three layers on the tokens of one plan, each with a window of its own."""
    rng = random.Random(seed)
    error = 0.0
    for i in range(count):
        lengths, layout, causal, window, heads = random_case(rng)
        plan = plan_context(cumulative(lengths), group, layout, causal, window)
        everything = tensors(i, sum(lengths), heads, 4)
        for other in (window, (rng.choice([-1, 0, 5, 20]), rng.choice([-1, 0, 7])), (3, -1)):
            got = ring_results(plan.with_window(other), everything)
            whole = dense_results(lengths, causal, other, everything)
            error = max(error, worst(list(zip(got, shards_of(plan, whole), strict=True))))
    return error


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_layers_of_several_windows_share_the_tokens_of_one_plan(ranks: Ranks, world: int) -> None:
    """Float64 reference, 1e-12: 8 random cases, three windows on one placement."""
    assert max(ranks.run(world, _compare_windows, 300 + world, 8)) < EXACT
