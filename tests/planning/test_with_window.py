"""If this fails, layers of different windows disagree about a rank's tokens.
`ContextPlan.with_window`: the same tokens on the same ranks under another window."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given

from ringfa3.planning.context_plan import ContextPlan, plan_context
from tests.planning.test_tiling import coverage
from tests.support.dense import band, mask
from tests.support.strategies import Case, cases, tiles, windows


@given(case=cases, other=windows)
def test_another_window_keeps_every_token_where_it_is(case: Case, other: tuple[int, int]) -> None:
    """Tokens, positions and shards are those of the plan; the digest is not, unless the mask is."""
    for plan in case.plans():
        twin = plan.with_window(other)
        assert torch.equal(twin.token_index, plan.token_index)
        assert torch.equal(twin.positions, plan.positions)
        assert twin.window_size == other
        assert twin.tokens_per_rank == plan.tokens_per_rank
        assert (twin.digest == plan.digest) == (band(case.causal, other) == case.band)
        assert plan.with_window(other) is twin
        assert twin.with_window(other) is twin
        assert twin.with_window(case.window) is plan
        assert ContextPlan.from_handle(twin.handle) is twin


def test_a_pickled_plan_of_another_window_is_complete() -> None:
    """Its tables are equal, and it makes plans of further windows by itself."""
    plan = plan_context([0, 5, 9, 30], (1, 3)).with_window((2, 0))
    twin = pickle.loads(pickle.dumps(plan))
    assert twin.digest == plan.digest
    assert torch.equal(twin.token_index, plan.token_index)
    assert twin.with_window((4, 0)).digest == plan.with_window((4, 0)).digest


@pytest.mark.parametrize("mode", ["forward", "backward"])
@given(case=cases, window=windows, m=tiles)
def test_a_plan_of_another_window_covers_the_pairs_of_that_window(
    mode: str, case: Case, window: tuple[int, int], m: int
) -> None:
    """`with_window`, on the placement of the case's window. Reference: the mask, exactly."""
    count = coverage([p.with_window(window) for p in case.plans()], mode, m, 8)
    allowed = mask(case.lengths, case.lengths, *band(case.causal, window))
    np.testing.assert_array_equal(count, allowed)
