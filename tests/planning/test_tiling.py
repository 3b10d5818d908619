"""If this fails, attention skips a visible pair or computes a hidden one. Plans against a
brute-force mask: every allowed pair once; invariants that kernels rely on."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfa3.planning.context_plan import ContextPlan, plan_context
from ringfa3.planning.tile_schedule import FIRST, LAST, Tiling
from ringfa3.planning.tiling import Plan, plan_local
from tests.support.dense import mask
from tests.support.strategies import Case, cases, key_tokens, tiles, windows

MODES = ("forward", "backward", "deterministic")
WHOLE = tuple((mode, False) for mode in MODES)
# (mode, whether spans are clipped): deterministic tilings have whole spans.
FORMS = (*WHOLE, ("forward", True), ("backward", True))


def tilings(plan: Plan, mode: str, m: int, n: int) -> list[Tiling]:
    return plan.forward(m) if mode == "forward" else plan.backward(n, m, mode == "deterministic")


def rectangles(tiling: Tiling, tile: np.void, mode: str):  # type: ignore[no-untyped-def]
    """(span, rows, columns, allowed) of each span that a tile visits."""
    mine = np.arange(tile["row0"], tile["row0"] + tile["rows"])
    for number in range(tile["first_span"], tile["first_span"] + tile["num_spans"]):
        s = tiling.spans[number]
        rows, columns = np.arange(s["q0"], s["q1"]), np.arange(s["k0"], s["k1"])
        axis, others = ("q", rows) if mode == "forward" else ("k", columns)
        end = f"{axis}_end" if tiling.clips else f"{axis}1"
        assert mine[-1] < s[end], "a tile leaves its segment"
        assert tiling.clips or mine[0] in others, "a tile leaves its segment"
        inside = np.isin(others, mine)
        rows, columns = (rows[inside], columns) if axis == "q" else (rows, columns[inside])
        distance = (columns - s["k0"])[None] - (rows - s["q0"])[:, None]
        yield number, rows, columns, (s["lo"] <= distance) & (distance <= s["hi"])


def coverage(plans: list[ContextPlan], mode: str, m: int, n: int) -> np.ndarray:
    """How often each (query token, key token) is covered, over all ranks, hops and tiles."""
    total = plans[0].total_tokens
    count = np.zeros((total, total), int)
    for plan in plans:
        queries = plan.token_index.numpy()
        for hop, tiling in enumerate(tilings(plan.hops, mode, m, n)):
            keys = key_tokens(plans, plan.rank, hop)
            visited = []
            for tile in tiling.tiles:
                visited.append(0)
                for _, rows, columns, allowed in rectangles(tiling, tile, mode):
                    assert allowed.any(), "a tile visits a span for nothing"
                    visited[-1] += int(allowed.any(0).sum())
                    count[np.ix_(queries[rows], keys[columns])] += allowed
            if mode == "forward":
                assert tiling.visited_columns().tolist() == visited
    return count


@pytest.mark.parametrize("mode", MODES)
@given(case=cases, m=tiles, n=tiles)
def test_every_allowed_pair_is_covered_once_and_no_other(
    mode: str, case: Case, m: int, n: int
) -> None:
    """Reference: the mask of all documents, exactly."""
    count = coverage(case.plans(), mode, m, n)
    np.testing.assert_array_equal(count, mask(case.lengths, case.lengths, *case.band))


@given(case=cases, m=tiles)
def test_a_gathered_plan_covers_the_same_pairs_in_one_launch(case: Case, m: int) -> None:
    """Reference: the mask, exactly. A tile visits hops in their order, each with its own word."""
    plans = case.plans()
    total = plans[0].total_tokens
    count = np.zeros((total, total), int)
    for plan in plans:
        arrived = [key_tokens(plans, plan.rank, hop) for hop in range(plan.world)]
        sizes = [len(keys) for keys in arrived]
        first_row = np.cumsum(sizes) - sizes + 3 * np.arange(plan.world)  # with gaps
        (tiling,) = plan.hops.gathered(lambda rows=first_row: rows).forward(m)
        rows_of = np.full(first_row[-1] + sizes[-1], -1)
        for first, keys in zip(first_row, arrived, strict=True):
            rows_of[first : first + len(keys)] = keys
        queries = plan.token_index.numpy()
        for tile in tiling.tiles:
            assert tile["flags"] == FIRST | LAST
            words = []
            for number, rows, columns, allowed in rectangles(tiling, tile, "forward"):
                hop = int(tiling.spans[number]["arrival"])
                words.append(hop)
                assert first_row[hop] <= columns[0]
                assert columns[-1] < first_row[hop] + sizes[hop]
                count[np.ix_(queries[rows], rows_of[columns])] += allowed
            assert words == sorted(words)
    np.testing.assert_array_equal(count, mask(case.lengths, case.lengths, *case.band))


@pytest.mark.parametrize("mode", MODES)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), max_size=5),
    window=windows,
    m=tiles,
    n=tiles,
)
def test_local_plan_aligns_unequal_lengths_at_the_bottom_right(
    mode: str, lengths: list[tuple[int, int]], window: tuple[int, int], m: int, n: int
) -> None:
    """Reference: the mask with its diagonal ending in the last row and column, exactly."""
    q, k = np.array(lengths, np.int64).reshape(-1, 2).T
    plan = plan_local(q, k, *window)
    (tiling,) = tilings(plan, mode, m, n)
    count = np.zeros((q.sum(), k.sum()), int)
    for tile in tiling.tiles:
        for _, rows, columns, allowed in rectangles(tiling, tile, mode):
            count[np.ix_(rows, columns)] += allowed
    np.testing.assert_array_equal(count, mask(q.tolist(), k.tolist(), *window))


@given(case=cases, m=tiles)
def test_span_bounds_are_finite_and_inside_the_rectangle(case: Case, m: int) -> None:
    """-(nq-1) <= lo <= hi <= nk-1, so that no sum of a bound and an index can overflow."""
    for plan in case.plans():
        for mode in MODES:
            for tiling in tilings(plan.hops, mode, m, m):
                s = tiling.spans
                nq, nk = s["q1"] - s["q0"], s["k1"] - s["k0"]
                assert (nq > 0).all()
                assert (nk > 0).all()
                assert (1 - nq <= s["lo"]).all()
                assert (s["lo"] <= s["hi"]).all()
                assert (s["hi"] <= nk - 1).all()


@given(case=cases, m=tiles)
def test_every_row_has_first_at_its_first_hop_and_last_at_its_last(case: Case, m: int) -> None:
    """Each once, also for a row that sees nothing."""
    for plan in case.plans():
        fetched = [[] for _ in range(plan.local_tokens)]
        for tiling in plan.hops.forward(m):
            for tile in tiling.tiles:
                for row in range(tile["row0"], tile["row0"] + tile["rows"]):
                    fetched[row].append(int(tile["flags"]))
        for flags in fetched:
            assert flags
            for i, flag in enumerate(flags):
                assert bool(flag & FIRST) == (i == 0)
                assert bool(flag & LAST) == (i == len(flags) - 1)


@given(case=cases, m=tiles, n=tiles, deterministic=st.booleans())
def test_a_backward_hop_stores_every_row_that_it_sees(
    case: Case, m: int, n: int, deterministic: bool
) -> None:
    """Each row of dK/dV once, visited or not: all of hop 0, then `KVExchange.visible`."""
    for plan in case.plans():
        for hop, tiling in enumerate(plan.hops.backward(n, m, deterministic)):
            rows = [np.arange(t["row0"], t["row0"] + t["rows"]) for t in tiling.tiles]
            stored = np.sort(np.concatenate([np.zeros(0, int), *rows]))
            seen = plan.kv_exchange.visible[(plan.rank - hop) % case.world, hop]
            bounds = (0, plan.local_tokens) if hop == 0 else seen.tolist()
            np.testing.assert_array_equal(stored, np.arange(*bounds))


@pytest.mark.parametrize("world", [2, 3, 8])
def test_no_tile_of_a_long_document_sees_nothing(world: int) -> None:
    """Causal and zigzag: no backward hop fills rows with zeros."""
    for rank in range(world):
        for tiling in plan_context(world << 10, (rank, world)).hops.backward(128, 128):
            assert len(tiling.tiles)
            assert (tiling.tiles["num_spans"] > 0).all()


@given(case=cases, m=tiles)
def test_padded_rows_are_the_same_in_every_hop(case: Case, m: int) -> None:
    """Padded rows: each query segment starts at the sum of earlier lengths rounded up to m."""
    for plan in case.plans():
        q = plan.hops.queries
        start = np.cumsum([0, *(-(-q.length // m) * m)])
        np.testing.assert_array_equal(plan.hops.padded_rows(m), start)
        row_to_grid = {int(r): int(g) for r, g in zip(q.row, start, strict=False)}
        for tiling in plan.hops.forward(m):
            for tile in tiling.tiles:
                segment = np.searchsorted(q.row, tile["row0"], side="right") - 1
                assert tile["padded_row0"] - start[segment] == tile["row0"] - q.row[segment]
                assert (tile["row0"] - q.row[segment]) % m == 0
                assert tile["rows"] == min(m, q.row[segment] + q.length[segment] - tile["row0"])
        for mode in MODES:
            for tiling in tilings(plan.hops, mode, m, m):
                assert [row_to_grid[s] for s in tiling.spans["q0"].tolist()] == tiling.spans[
                    "padded_q0"
                ].tolist()


def columns_visited(tiling: Tiling, tile: np.void, mode: str) -> int:
    """Columns (or rows) that a tile visits: per span from the first allowed one to the last."""
    total = 0
    for _, _, _, allowed in rectangles(tiling, tile, mode):
        (at,) = np.nonzero(allowed.any(0 if mode == "forward" else 1))
        total += int(at[-1] - at[0]) + 1
    return total


@pytest.mark.parametrize("mode", ["forward", "backward"])
@given(case=cases, m=tiles, n=tiles)
def test_longest_tiles_come_first(mode: str, case: Case, m: int, n: int) -> None:
    """In a backward by quarters of an octave; inside of one, segment by segment."""
    for plan in case.plans():
        for tiling in tilings(plan.hops, mode, m, n):
            cost = [columns_visited(tiling, tile, mode) for tile in tiling.tiles]
            if mode == "forward":
                assert cost == sorted(cost, reverse=True)
                continue
            quarter = [quarter_of_octave(x) for x in cost]
            assert quarter == sorted(quarter, reverse=True)
            row0 = tiling.tiles["row0"].tolist()
            followers = itertools.pairwise(zip(quarter, row0, cost, strict=True))
            back = [(a, b) for a, b in followers if a[0] == b[0] and a[1] > b[1]]
            assert all(a[2] >= b[2] for a, b in back)  # of one segment


def quarter_of_octave(cost: int) -> tuple[int, int]:
    octave = cost.bit_length()
    return octave, 8 * cost >> octave


@given(case=cases, m=tiles)
def test_tiles_that_wait_for_keys_come_after_most_of_the_others(case: Case, m: int) -> None:
    """Each part has its longest tiles first; the last part has at most an eighth of the work."""
    for plan in case.plans():
        (tiling,) = plan.gathered.forward(m)
        first, count = tiling.tiles["first_span"], tiling.tiles["num_spans"]
        arrival = tiling.spans["arrival"]
        waits = [bool(arrival[i : i + n].any()) for i, n in zip(first, count, strict=True)]
        cost = tiling.visited_columns().tolist()
        begin = waits.index(True) if any(waits) else len(waits)
        end = begin + sum(waits)
        assert all(waits[begin:end])
        for part in (cost[:begin], cost[begin:end], cost[end:]):
            assert part == sorted(part, reverse=True)
        assert 8 * sum(cost[end:]) <= sum(cost)
        assert sum(cost[end:]) <= sum(cost[:begin])
        assert not begin or not cost[end:] or cost[begin - 1] >= cost[end]


@given(case=cases, m=tiles, n=tiles)
def test_deterministic_turns_follow_the_fetch_order(case: Case, m: int, n: int) -> None:
    """Key tiles descend, rows ascend; each dQ block counts 0, 1, 2 ... as tiles are fetched.

    So the earliest unfinished tile never waits for one that is fetched after it.
    """
    for plan in case.plans():
        for tiling in plan.hops.backward(n, m, True):
            turns: dict[tuple[int, int], int] = {}
            previous: dict[int, int] = {}
            for tile in tiling.tiles:
                starts = []
                for number, rows, _, allowed in rectangles(tiling, tile, "deterministic"):
                    s = tiling.spans[number]
                    starts.append(int(s["q0"]))
                    key_tile = (int(tile["row0"]) - int(s["k0"])) // n
                    assert key_tile < previous.get(number, 1 << 30)
                    previous[number] = key_tile
                    for block in range(-(-len(rows) // m)):
                        if not allowed[block * m : (block + 1) * m].any():
                            continue
                        at = (int(s["q0"]), block)
                        assert tiling.dq_order(number, key_tile, block, m) == turns.get(at, 0)
                        turns[at] = turns.get(at, 0) + 1
                assert starts == sorted(starts), "rows of a tile must ascend"


def test_tilings_are_cached() -> None:
    plan = plan_context([0, 300, 1000], (1, 3)).hops
    assert plan.forward(64) is plan.forward(64)
    assert plan.backward(64, 32) is plan.backward(64, 32)
    kinds = [plan.forward(64), plan.forward(32), plan.backward(64, 32), plan.backward(64, 64)]
    kinds += [plan.backward(32, 64), plan.backward(64, 32, True)]
    assert len({id(k) for k in kinds}) == len(kinds)


def test_four_million_tokens_fit_the_records() -> None:
    """One document, full mask, over 2^31 pairs: hops fetch all rows, and bounds fit int32."""
    plan = plan_context(1 << 22, (3, 4), causal=False)
    forward, backward = plan.hops.forward(128), plan.hops.backward(128, 128)
    for hop, both in enumerate(zip(forward, backward, strict=True)):
        for tiling in both:
            assert tiling.tiles["rows"].sum() == plan.local_tokens == 1 << 20, hop
            nq = tiling.spans["q1"] - tiling.spans["q0"]
            nk = tiling.spans["k1"] - tiling.spans["k0"]
            assert (tiling.spans["lo"] == 1 - nq).all()
            assert (tiling.spans["hi"] == nk - 1).all()
