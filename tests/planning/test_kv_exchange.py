"""Which K/V rows travel: all that a rank needs, as a prefix of each buffer, and nothing more."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given

from ringfa3.planning.context_plan import plan_context
from ringfa3.planning.kv_exchange import LONGEST_PARTED, first_heads
from tests.support.dense import cumulative, mask
from tests.support.strategies import Case, cases, key_tokens


def seen_by(case: Case, owner: int, hop: int) -> np.ndarray:
    """Which local rows of `owner` the queries of rank owner + hop see. Reference: the mask."""
    plans = case.plans()
    allowed = mask(case.lengths, case.lengths, *case.band)
    queries = plans[(owner + hop) % case.world].token_index.numpy()
    return allowed[np.ix_(queries, plans[owner].token_index.numpy())].any(0)


@given(case=cases)
def test_what_a_rank_sees_is_there_and_every_hop_holds_a_prefix(case: Case) -> None:
    for owner, plan in enumerate(case.plans()):
        rows, own = plan.movement.rows, plan.movement.own
        assert rows.shape == (case.world, case.world + 1)
        assert (np.diff(rows[owner]) <= 0).all()
        assert rows[owner, 0] == plan.local_tokens
        assert rows[owner, case.world] == 0
        assert len(own) == rows[owner, 1]
        assert len(set(own.tolist())) == len(own)
        for hop in range(1, case.world):
            here = np.zeros(plan.local_tokens, bool)
            here[own[: rows[owner, hop]]] = True
            assert (here | ~seen_by(case, owner, hop)).all()


@given(case=cases)
def test_no_segment_travels_farther_or_wider_than_it_is_seen(case: Case) -> None:
    """What leaves is, per segment, the run from the first to the last row seen elsewhere; and a
    segment goes only as far as the last rank that sees a row of it."""
    for owner, plan in enumerate(case.plans()):
        segments = plan.shards[owner]
        seen = {hop: seen_by(case, owner, hop) for hop in range(1, case.world)}
        expected = np.zeros(case.world + 1, int)
        for row, length in zip(segments.row, segments.length, strict=True):
            inside = slice(row, row + length)
            hops = [hop for hop, s in seen.items() if s[inside].any()]
            if hops:
                (at,) = np.nonzero(np.any([seen[h][inside] for h in hops], axis=0))
                expected[1 : max(hops) + 1] += at[-1] + 1 - at[0]
        np.testing.assert_array_equal(plan.movement.rows[owner, 1:], expected[1:])


@given(case=cases)
def test_first_visit_is_the_first_hop_that_sees_a_row(case: Case) -> None:
    first = case.plan(0).movement.first_visit
    for owner in range(case.world):
        hops = [h for h in range(1, case.world) if seen_by(case, owner, h).any()]
        assert first[owner] == min(hops, default=case.world)


@given(case=cases)
def test_a_rank_pulls_from_the_first_piece_it_sees_to_the_last(case: Case) -> None:
    for owner, plan in enumerate(case.plans()):
        segments, own = plan.shards[owner], plan.movement.own
        for hop in range(1, case.world):
            seen = seen_by(case, owner, hop)
            pulled = np.zeros(len(seen), bool)
            for row, length in zip(segments.row, segments.length, strict=True):
                pulled[row : row + length] = seen[row : row + length].any()
            (at,) = np.nonzero(pulled[own])
            expected = [at[0], at[-1] + 1] if len(at) else [0, 0]
            assert plan.movement.seen[owner, hop].tolist() == expected
            assert expected[1] <= plan.movement.rows[owner, hop]


@given(case=cases)
def test_rows_that_come_home_are_first_once_and_more_later(case: Case) -> None:
    """Of each hop what its rank has found; every row that leaves is the first of its number once.
    `visit` counts that rank's hops before, `most.again` reaches over all that is more."""
    move = case.plan(0).movement
    again = 0
    for owner in range(case.world):
        home = np.zeros(move.rows[owner, 1], bool)
        hops = [t for t in range(1, case.world) if move.seen[owner, t].any()]
        returns = move.returns(owner)
        assert [x.hop for x in returns] == hops
        for hop, visit, first, more in returns:
            here = np.zeros(len(home), int)
            for begin, end in (*first, *more):
                here[begin:end] += 1
            begin, end = move.seen[owner, hop]
            assert here.sum() == end - begin
            assert (here[begin:end] == 1).all()
            assert not any(home[a:b].any() for a, b in first)
            assert all(home[a:b].all() for a, b in more)
            home |= here > 0
            again = max([again, *(end for _, end in more)])
            peer = (owner + hop) % case.world
            before = [move.seen[(peer - t) % case.world, t].any() for t in range(1, hop)]
            assert visit == sum(before)
        assert home.all()
    assert move.most.again == again


@given(case=cases)
def test_all_ranks_agree_on_what_moves(case: Case) -> None:
    """Movement is the same on every rank, and spans index only rows that are there."""
    plans = case.plans()
    for plan in plans:
        np.testing.assert_array_equal(plan.movement.rows, plans[0].movement.rows)
        np.testing.assert_array_equal(plan.movement.first_visit, plans[0].movement.first_visit)
        np.testing.assert_array_equal(plan.movement.seen, plans[0].movement.seen)
        for hop, tiling in enumerate(plan.hops.forward(8)):
            held = len(key_tokens(plans, plan.rank, hop))
            assert (tiling.spans["k1"] <= held).all()


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_nothing_travels_for_documents_that_lie_on_one_rank(layout: str) -> None:
    """So many that balance needs no cut: 32 for each of 4 ranks."""
    cu = cumulative([100] * 128)
    for rank in range(4):
        movement = plan_context(cu, (rank, 4), layout).movement
        assert not movement.rows[:, 1:].any()
        assert (movement.first_visit == 4).all()
        assert not len(movement.own)


@pytest.mark.parametrize("window", [0, 1, 7, 100, 256, 300, 1000])
def test_a_window_moves_its_own_width(window: int) -> None:
    """Contiguous and causal, 1,024 tokens on 4 ranks: exactly the window's rows, hop by hop."""
    for owner in range(4):
        plan = plan_context(1024, (owner, 4), "contiguous", window_size=(window, 0))
        local = 256
        leaving = min(window, local) if owner < 3 else 0
        for hop in range(1, 4):
            reached = owner + hop < 4 and window > (hop - 1) * local
            assert plan.movement.rows[owner, hop] == (leaving if reached else 0)


def test_own_keys_come_in_two_parts_where_shards_are_short_and_heads_several() -> None:
    """Of the first part a third of the heads, and of the second at least one."""
    assert [first_heads(n, LONGEST_PARTED) for n in (1, 2, 3, 4, 8)] == [0, 1, 1, 2, 3]
    assert all(0 < first_heads(n, 1) < n for n in range(2, 65))
    assert first_heads(8, LONGEST_PARTED + 1) == 0


def test_causal_contiguous_sends_forward_only() -> None:
    """Rank r's keys are seen by the 3 - r ranks behind it, and travel so far."""
    rows = plan_context(4000, (0, 4), "contiguous").movement.rows
    assert (rows[:, 1:] > 0).sum(1).tolist() == [3, 2, 1, 0]
