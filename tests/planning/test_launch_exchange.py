"""If this fails, ranks by messages attend to missing or wrong K/V, or send rows that nobody needs.
What ranks send by messages, on every link, against the dense mask: each row that a reader needs
once, and no other."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ringfa3.planning.context_plan import ContextPlan, plan_context
from ringfa3.planning.exchange.landing import Landing
from ringfa3.planning.exchange.launch_exchange import LaunchExchange, RowFlow
from ringfa3.planning.exchange.launches import launch_of_step
from ringfa3.planning.kv_exchange import plan_ring
from ringfa3.planning.sharding import Segments
from ringfa3.planning.tile_schedule import concat_ranges, join_ranges
from tests.planning.test_tiling import FORMS, WHOLE, rectangles, tilings
from tests.support.dense import mask
from tests.support.masks import Union, unions
from tests.support.strategies import Case, cases, layouts, tiles

WORLDS = st.integers(1, 8)


def launches_of(plan: ContextPlan) -> np.ndarray:
    """(steps,) the launch of each step; with one host (world,) of each hop."""
    exchange = plan.kv_exchange
    return launch_of_step(exchange, Landing.of(exchange, plan.hosts))


def sent_rows(flow: RowFlow, keys: int, world: int) -> np.ndarray:
    """(world, keys) how often each row of one buffer goes to each rank."""
    count = np.zeros((world, keys), int)
    for rows, leaving in zip(flow.sent, flow.leaving, strict=True):
        for _, peer, begin, end in leaving:
            count[peer] += np.bincount(rows[begin:end], minlength=keys)
    return count


def launch_keys(plans: list[ContextPlan], rank: int) -> list[np.ndarray]:
    """The global key of each row of the K/V of each launch of a rank, as its owners send them.

    Checks that each hop is one message, and that messages fill every row once.
    """
    exchange = plans[rank].by_messages()
    keys = [plans[rank]._key_index]
    for launch, arriving in enumerate(exchange.direct.arriving[1:], 1):
        keys.append(np.full(exchange.rows[launch], -1))
        for hop, peer, begin, end in arriving:
            assert peer == (rank - hop) % len(plans)
            assert (keys[-1][begin:end] == -1).all(), "a row arrives twice"
            there = plans[peer].by_messages()
            (sent,) = (part for part in there.direct.leaving[launch] if part.hop == hop)
            assert sent.peer == rank
            rows = there.direct.sent[launch][sent.begin : sent.end]
            keys[-1][begin:end] = plans[peer]._key_index[rows]
        assert (keys[-1] >= 0).all(), "a row of the buffer never arrives"
    return keys


def check_exchange(
    plans: list[ContextPlan],
    allowed: np.ndarray,
    m: int,
    n: int,
    forms: tuple[tuple[str, bool], ...] = WHOLE,
) -> None:
    """allowed: (all queries, all keys)."""
    world = len(plans)
    covered = {form: np.zeros(allowed.shape, int) for form in forms}
    for plan in plans:
        sent = sent_rows(plan.by_messages().direct, plan.local_keys, world)
        for peer in plans:
            pairs = allowed[np.ix_(peer.token_index.numpy(), plan._key_index)]
            needed = pairs.any(0) & (peer is not plan)
            np.testing.assert_array_equal(sent[peer.rank], needed)
    for plan in plans:
        keys = launch_keys(plans, plan.rank)
        queries = plan.token_index.numpy()
        for mode, clipped in forms:
            hops = plan.by_messages().hops
            launches = tilings(hops.clipped if clipped else hops, mode, m, n)
            for tiling, here in zip(launches, keys, strict=True):
                stored = np.zeros(len(here), int)
                for tile in tiling.tiles:
                    if mode != "forward":
                        stored[tile["row0"] :][: tile["rows"]] += 1
                    for _, rows, columns, pairs in rectangles(tiling, tile, mode):
                        covered[mode, clipped][np.ix_(queries[rows], here[columns])] += pairs
                assert mode == "forward" or (stored == 1).all(), "dK/dV are stored once"
    for count in covered.values():
        np.testing.assert_array_equal(count, allowed)


@given(case=cases, world=WORLDS, m=tiles, n=tiles)
def test_documents_and_windows(case: Case, world: int, m: int, n: int) -> None:
    """Packed documents on 1 to 8 ranks, exactly: rows on each link, pairs of launches, and that a
    backward stores each row that returns."""
    allowed = mask(case.lengths, case.lengths, *case.band)
    check_exchange(replace(case, world=world).plans(), allowed, m, n)


@settings(max_examples=60)
@given(union=unions(40), world=WORLDS, layout=layouts, m=tiles, n=tiles)
def test_masks(union: Union, world: int, layout: str, m: int, n: int) -> None:
    """Random masks, also of other keys than queries, exactly, as above; with clipped spans, too."""
    plans = [plan_context(union.mask(), (rank, world), layout) for rank in range(world)]
    check_exchange(plans, union.dense(), m, n, FORMS)


@given(case=cases, world=WORLDS, keys=tiles)
def test_whole_tiles_of_keys(case: Case, world: int, keys: int) -> None:
    """On a grid a tile of keys leaves once for each reader that needs one of them, else not."""
    plans = replace(case, world=world).plans()
    allowed = mask(case.lengths, case.lengths, *case.band)
    for plan in plans:
        shard = plan.shards[plan.rank]
        count = -(-shard.length // keys)
        first = np.repeat(shard.row, count) + keys * concat_ranges(np.zeros_like(count), count)
        sent = sent_rows(plan.by_messages(None, keys).direct, len(first), world)
        for peer in plans:
            pairs = allowed[np.ix_(peer.token_index.numpy(), plan._key_index)]
            needed = pairs.any(0) & (peer is not plan)
            by_tile = np.add.reduceat(needed, first) > 0 if len(first) else needed
            np.testing.assert_array_equal(sent[peer.rank], by_tile)


@given(case=cases, world=WORLDS)
def test_rows_of_a_launch_are_bounded(case: Case, world: int) -> None:
    """Hop 0 is alone. On no rank has a launch more rows, received or sent, than two thirds of the
    largest block or of what is visible at one hop."""
    plans = replace(case, world=world).plans()
    exchange = plans[0].kv_exchange
    launch = launches_of(plans[0])
    assert (np.diff(launch) >= 0).all()
    assert (launch[1:] > 0).all()
    most = max(2 * exchange.block_rows.max() // 3, np.diff(exchange.visible).max())
    for plan in plans:
        by_messages = plan.by_messages()
        assert len(by_messages.rows) == launch[-1] + 1
        assert max([*by_messages.rows[1:], *map(len, by_messages.direct.sent)]) <= most


@pytest.mark.parametrize(
    ("window", "launches", "rows"),
    [
        ((60, 60), [0, 1, 1, 1, 1, 1, 1, 1], [256, 120]),  # of both neighbours, hops 1 and 7
        ((300, 0), [0, 1, 2, 2, 2, 2, 2, 2], [256, 256, 44]),  # hop 1 is as large as it can be
    ],
)
def test_a_launch_joins_hops_that_fit(
    window: tuple[int, int], launches: list[int], rows: list[int]
) -> None:
    """Rank 3 of 8, 256 tokens each, contiguous."""
    plan = plan_context(2048, (3, 8), "contiguous", False, window)
    assert launches_of(plan).tolist() == launches
    assert plan.by_messages().rows == rows


def test_a_long_document_has_a_launch_for_each_hop() -> None:
    for world in (2, 3, 8):
        launch = launches_of(plan_context(1024 * world, (0, world)))
        assert launch.tolist() == list(range(world))


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_nothing_leaves_for_documents_that_lie_on_one_rank(layout: str) -> None:
    """So many that balance needs no cut: 32 for each of 4 ranks. They have one empty launch."""
    cu = [100 * i for i in range(129)]
    for rank in range(4):
        exchange = plan_context(cu, (rank, 4), layout).by_messages()
        assert exchange.rows == [3200, 0]
        assert not any(exchange.direct.leaving + exchange.direct.arriving)
        assert not any(map(len, exchange.direct.sent))


@pytest.mark.parametrize("window", [0, 1, 7, 100, 256, 300, 1000])
def test_a_window_moves_its_own_width(window: int) -> None:
    """Contiguous and causal, 1,024 tokens on 4 ranks: exactly the window's rows, hop by hop."""
    for rank in range(4):
        plan = plan_context(1024, (rank, 4), "contiguous", window_size=(window, 0))
        arriving = plan.by_messages().direct.arriving
        rows = [0] * 4
        for hop, _, begin, end in (run for runs in arriving for run in runs):
            rows[hop] += end - begin
        left = [max(0, min(window - 256 * (hop - 1), 256)) for hop in range(1, 4)]
        assert rows == [0, *(n if hop <= rank else 0 for hop, n in enumerate(left, 1))]


def test_two_runs_of_a_segment_leave_without_what_lies_between() -> None:
    """The other rank holds what is before and after this rank's only segment, and needs both of
    its ends."""
    around = Segments(*(np.array(x) for x in ([0, 1000], [1000, 1000], [0, 0], [0, 3000])))
    middle = Segments(*(np.array([x]) for x in (0, 2000, 0, 1000)))
    plan, exchange = plan_ring([around, middle], 1, 10, 10)
    assert LaunchExchange.of(exchange, plan, 1, (0, 0)).direct.sent[1].tolist() == [
        *range(10),
        *range(1990, 2000),
    ]


@given(
    ranges=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 30), st.integers(1, 9)), max_size=9)
)
def test_joined_ranges_are_those_of_a_set(ranges: list[tuple[int, int, int]]) -> None:
    """Reference: sets of numbers, exactly."""
    group, begin, size = np.array(ranges, np.int64).reshape(-1, 3).T
    joined, *found = join_ranges(group, begin, begin + size)
    rows = [(g, set(range(b, e))) for g, b, e in zip(*(x.tolist() for x in found), strict=True)]
    assert [(g, min(r)) for g, r in rows] == sorted((g, min(r)) for g, r in rows)
    for (g, b, n), number in zip(ranges, joined, strict=True):
        assert rows[number][0] == g
        assert set(range(b, b + n)) <= rows[number][1]
    for g in range(4):
        here = [r for other, r in rows if other == g]
        touched = set().union(*(set(range(b, b + n)) for other, b, n in ranges if other == g))
        assert set().union(*here) == touched
        assert all(a.isdisjoint({x + d for x in b for d in (-1, 0, 1)})
                   for i, a in enumerate(here) for b in here[:i])  # fmt: skip


OVERLAPPING = Case(
    [30, 43, 50, 13], 6, "zigzag", True, (20, 0)
)  # with rows counted twice: other launches


@given(case=cases)
@example(case=OVERLAPPING)
def test_rows_that_are_needed_twice_count_once(case: Case) -> None:
    """Launches are those of needs without overlaps, exactly: `needs` may name a row again."""
    plan = case.plans()[0]
    exchange, landing = plan.kv_exchange, Landing.of(plan.kv_exchange, plan.hosts)
    again = replace(exchange, needs=np.tile(exchange.needs, 2))
    assert launch_of_step(again, landing).tolist() == launch_of_step(exchange, landing).tolist()
