"""If this fails, ranks attend to missing or wrong K/V, or lose gradients of them. The blocks that
ranks publish, the parts that their readers copy, and how dK/dV return."""

from __future__ import annotations

import numpy as np
from hypothesis import given

from tests.support.dense import mask
from tests.support.strategies import Case, cases, key_tokens


def visible_rows(case: Case, owner: int, hop: int) -> np.ndarray:
    """(local_tokens,) bool: which rows of `owner` rank owner + hop sees. Reference: the mask."""
    plans = case.plans()
    allowed = mask(case.lengths, case.lengths, *case.band)
    queries = plans[(owner + hop) % case.world].token_index.numpy()
    return allowed[np.ix_(queries, plans[owner].token_index.numpy())].any(0)


@given(case=cases)
def test_a_block_has_a_run_of_each_segment(case: Case) -> None:
    """From the first to the last row of the segment that other ranks see."""
    for owner, plan in enumerate(case.plans()):
        seen = np.zeros(plan.local_tokens, bool)
        for hop in range(1, case.world):
            seen |= visible_rows(case, owner, hop)
        expected = []
        segments = plan.shards[owner]
        for row, length in zip(segments.row, segments.length, strict=True):
            (at,) = np.nonzero(seen[row : row + length])
            expected += [row + i for i in range(at[0], at[-1] + 1)] if len(at) else []
        exchange = plan.kv_exchange
        assert sorted(exchange.published.tolist()) == sorted(expected)
        assert exchange.block_rows[owner] == len(expected)
        assert exchange.tokens[owner] == plan.local_tokens


@given(case=cases)
def test_visible_rows_reach_from_the_first_run_that_a_rank_sees_to_the_last(case: Case) -> None:
    for owner, plan in enumerate(case.plans()):
        segments, own = plan.shards[owner], plan.kv_exchange.published
        for hop in range(1, case.world):
            seen = visible_rows(case, owner, hop)
            pulled = np.zeros(len(seen), bool)
            for row, length in zip(segments.row, segments.length, strict=True):
                pulled[row : row + length] = seen[row : row + length].any()
            (at,) = np.nonzero(pulled[own])
            expected = [at[0], at[-1] + 1] if len(at) else [0, 0]
            assert plan.kv_exchange.visible[owner, hop].tolist() == expected


@given(case=cases)
def test_every_row_returns_once_as_new_and_then_as_repeated(case: Case) -> None:
    """A hop returns exactly its visible rows; `active_index` counts the peer's active hops before,
    and `max_rows.returned` is the end of the last repeated run."""
    exchange = case.plan(0).kv_exchange
    last_repeated = 0
    for owner in range(case.world):
        received = np.zeros(exchange.block_rows[owner], bool)
        hops = [t for t in range(1, case.world) if exchange.visible[owner, t].any()]
        returns = exchange.grad_returns(owner)
        assert [x.hop for x in returns] == hops
        for hop, index, new, repeated in returns:
            here = np.zeros(len(received), int)
            for begin, end in (*new, *repeated):
                here[begin:end] += 1
            begin, end = exchange.visible[owner, hop]
            assert here.sum() == end - begin
            assert (here[begin:end] == 1).all()
            assert not any(received[a:b].any() for a, b in new)
            assert all(received[a:b].all() for a, b in repeated)
            received |= here > 0
            last_repeated = max([last_repeated, *(end for _, end in repeated)])
            peer = (owner + hop) % case.world
            before = [exchange.visible[(peer - t) % case.world, t].any() for t in range(1, hop)]
            assert index == sum(before)
        assert received.all()
    assert exchange.max_rows.returned == last_repeated


@given(case=cases)
def test_all_ranks_agree_on_what_moves(case: Case) -> None:
    """Every rank computes the same exchange, and spans index only rows that their hop holds."""
    plans = case.plans()
    for plan in plans:
        for name in ("tokens", "block_rows", "visible"):
            first = getattr(plans[0].kv_exchange, name)
            np.testing.assert_array_equal(getattr(plan.kv_exchange, name), first)
        runs = plan.kv_exchange.runs()
        np.testing.assert_array_equal(runs, plans[0].kv_exchange.runs())
        for hop, tiling in enumerate(plan.hops.forward(8)):
            held = len(key_tokens(plans, plan.rank, hop))
            assert (tiling.spans["k1"] <= held).all()
