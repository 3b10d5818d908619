"""Which K/V rows ranks exchange: every row that a rank needs, in a prefix of each buffer."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given

from ringfa3.planning.context_plan import plan_context
from ringfa3.planning.kv_exchange import MAX_SPLIT_TOKENS, first_heads
from tests.support.dense import cumulative, mask
from tests.support.strategies import Case, cases, key_tokens


def visible_rows(case: Case, owner: int, hop: int) -> np.ndarray:
    """(local_tokens,) bool: which rows of `owner` rank owner + hop sees. Reference: the mask."""
    plans = case.plans()
    allowed = mask(case.lengths, case.lengths, *case.band)
    queries = plans[(owner + hop) % case.world].token_index.numpy()
    return allowed[np.ix_(queries, plans[owner].token_index.numpy())].any(0)


@given(case=cases)
def test_every_hop_holds_all_rows_that_its_rank_sees_in_a_prefix(case: Case) -> None:
    for owner, plan in enumerate(case.plans()):
        rows, own = plan.kv_exchange.rows, plan.kv_exchange.published
        assert rows.shape == (case.world, case.world + 1)
        assert (np.diff(rows[owner]) <= 0).all()
        assert rows[owner, 0] == plan.local_tokens
        assert rows[owner, case.world] == 0
        assert len(own) == rows[owner, 1]
        assert len(set(own.tolist())) == len(own)
        for hop in range(1, case.world):
            here = np.zeros(plan.local_tokens, bool)
            here[own[: rows[owner, hop]]] = True
            assert (here | ~visible_rows(case, owner, hop)).all()


@given(case=cases)
def test_no_run_travels_farther_or_wider_than_ranks_see_it(case: Case) -> None:
    """The run of a segment ends with the first and the last row that other ranks see, and travels
    up to the last rank that sees a row of it."""
    for owner, plan in enumerate(case.plans()):
        segments = plan.shards[owner]
        seen = {hop: visible_rows(case, owner, hop) for hop in range(1, case.world)}
        expected = np.zeros(case.world + 1, int)
        for row, length in zip(segments.row, segments.length, strict=True):
            inside = slice(row, row + length)
            hops = [hop for hop, s in seen.items() if s[inside].any()]
            if hops:
                (at,) = np.nonzero(np.any([seen[h][inside] for h in hops], axis=0))
                expected[1 : max(hops) + 1] += at[-1] + 1 - at[0]
        np.testing.assert_array_equal(plan.kv_exchange.rows[owner, 1:], expected[1:])


@given(case=cases)
def test_first_active_is_the_first_hop_that_sees_a_row(case: Case) -> None:
    first = case.plan(0).kv_exchange.first_active
    for owner in range(case.world):
        hops = [h for h in range(1, case.world) if visible_rows(case, owner, h).any()]
        assert first[owner] == min(hops, default=case.world)


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
            assert expected[1] <= plan.kv_exchange.rows[owner, hop]


@given(case=cases)
def test_every_row_returns_once_as_new_and_then_as_repeated(case: Case) -> None:
    """A hop returns exactly its visible rows; `active_index` counts the peer's active hops before,
    and `max_rows.returned` is the end of the last repeated run."""
    exchange = case.plan(0).kv_exchange
    last_repeated = 0
    for owner in range(case.world):
        received = np.zeros(exchange.rows[owner, 1], bool)
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
        for name in ("rows", "first_active", "visible"):
            first = getattr(plans[0].kv_exchange, name)
            np.testing.assert_array_equal(getattr(plan.kv_exchange, name), first)
        for hop, tiling in enumerate(plan.hops.forward(8)):
            held = len(key_tokens(plans, plan.rank, hop))
            assert (tiling.spans["k1"] <= held).all()


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_nothing_travels_for_documents_that_lie_on_one_rank(layout: str) -> None:
    """So many that balance needs no cut: 32 for each of 4 ranks."""
    cu = cumulative([100] * 128)
    for rank in range(4):
        kv_exchange = plan_context(cu, (rank, 4), layout).kv_exchange
        assert not kv_exchange.rows[:, 1:].any()
        assert (kv_exchange.first_active == 4).all()
        assert not len(kv_exchange.published)


@pytest.mark.parametrize("window", [0, 1, 7, 100, 256, 300, 1000])
def test_a_window_moves_its_own_width(window: int) -> None:
    """Contiguous and causal, 1,024 tokens on 4 ranks: exactly the window's rows, hop by hop."""
    for owner in range(4):
        plan = plan_context(1024, (owner, 4), "contiguous", window_size=(window, 0))
        local = 256
        leaving = min(window, local) if owner < 3 else 0
        for hop in range(1, 4):
            reached = owner + hop < 4 and window > (hop - 1) * local
            assert plan.kv_exchange.rows[owner, hop] == (leaving if reached else 0)


def test_short_shards_with_several_kv_heads_split_their_own_heads() -> None:
    """A third of the heads, rounded up, comes first; at least one comes last."""
    assert [first_heads(n, MAX_SPLIT_TOKENS) for n in (1, 2, 3, 4, 8)] == [0, 1, 1, 2, 3]
    assert all(0 < first_heads(n, 1) < n for n in range(2, 65))
    assert first_heads(8, MAX_SPLIT_TOKENS + 1) == 0


def test_causal_contiguous_sends_forward_only() -> None:
    """The 3 - r ranks behind rank r see its keys, which travel that far."""
    rows = plan_context(4000, (0, 4), "contiguous").kv_exchange.rows
    assert (rows[:, 1:] > 0).sum(1).tolist() == [3, 2, 1, 0]
