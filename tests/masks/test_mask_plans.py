"""If this fails, a pair of a mask is computed twice, or never. Plans of random masks against the
dense mask: every pair once, over ranks, hops and tiles."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringfa3.masks.mask import Mask
from ringfa3.planning.context_plan import ContextPlan, plan_context
from ringfa3.planning.tile_schedule import Tiling
from tests.planning.test_tiling import FORMS, MODES, rectangles, tilings
from tests.support.masks import Union, unions
from tests.support.strategies import layouts, tiles


def plans_of(mask: Mask, world: int, layout: str) -> list[ContextPlan]:
    return [plan_context(mask, (rank, world), layout) for rank in range(world)]


def keys_at(plans: list[ContextPlan], rank: int, hop: int) -> np.ndarray:
    """The global key of each K/V row of a block, up to the last that `rank` sees at `hop`."""
    owner = plans[(rank - hop) % len(plans)]
    keys = owner._key_index
    if hop == 0:
        return keys
    return keys[owner.kv_exchange.published][: owner.kv_exchange.visible[owner.rank, hop, 1]]


def coverage(
    plans: list[ContextPlan], mode: str, m: int, n: int, clipped: bool = False
) -> np.ndarray:
    """How often each (query, key) is covered, over all ranks, hops and tiles."""
    count = np.zeros((plans[0].total_tokens, sum(plan.local_keys for plan in plans)), int)
    for plan in plans:
        queries = plan.token_index.numpy()
        hops = plan.hops.clipped if clipped else plan.hops
        for hop, tiling in enumerate(tilings(hops, mode, m, n)):
            keys, visited = keys_at(plans, plan.rank, hop), []
            for tile in tiling.tiles:
                visited.append(0)
                for _, rows, columns, allowed in rectangles(tiling, tile, mode):
                    visited[-1] += int(allowed.any(0).sum())
                    count[np.ix_(queries[rows], keys[columns])] += allowed
                    assert allowed.any() or not clipped, "a tile visits a span for nothing"
            if mode == "forward":
                assert tiling.visited_columns().tolist() == visited
    return count


@pytest.mark.parametrize(("mode", "clipped"), FORMS)
@settings(max_examples=60)
@given(union=unions(40), world=st.integers(1, 5), layout=layouts, m=tiles, n=tiles)
def test_every_allowed_pair_is_covered_once_and_no_other(
    mode: str, clipped: bool, union: Union, world: int, layout: str, m: int, n: int
) -> None:
    """Reference: the mask, cell by cell, exactly."""
    plans = plans_of(union.mask(), world, layout)
    np.testing.assert_array_equal(coverage(plans, mode, m, n, clipped), union.dense())


@pytest.mark.soak
@pytest.mark.parametrize(("mode", "clipped"), FORMS)
@settings(max_examples=2000)
@given(union=unions(40), world=st.integers(1, 5), layout=layouts, m=tiles, n=tiles)
def test_pairs_of_many_unions(
    mode: str, clipped: bool, union: Union, world: int, layout: str, m: int, n: int
) -> None:
    """As above, of 2,000 masks."""
    plans = plans_of(union.mask(), world, layout)
    np.testing.assert_array_equal(coverage(plans, mode, m, n, clipped), union.dense())


@settings(max_examples=40)
@given(union=unions(40), world=st.integers(2, 4), layout=layouts, m=tiles)
def test_clipped_spans_over_gathered_keys(union: Union, world: int, layout: str, m: int) -> None:
    """One launch for all hops: every pair once, exactly. Spans wait for the flag of their keys."""
    plans = plans_of(union.mask(), world, layout)
    count = np.zeros(union.dense().shape, int)
    for plan in plans:
        first, rows = plan.kv_exchange.gathered_layout(plan.rank)
        keys, flags = np.full((2, rows), -1)
        for hop in range(world):
            seen = keys_at(plans, plan.rank, hop)
            begin = plan.kv_exchange.visible[(plan.rank - hop) % world, hop, 0] if hop else 0
            there = slice(first[hop] + begin, first[hop] + len(seen))
            keys[there], flags[there] = seen[begin:], hop
        clipped = plan.gathered.clipped
        assert clipped.clips == plan.hops.clipped.clips
        (tiling,) = clipped.forward(m)
        for tile in tiling.tiles:
            for number, of_tile, columns, pairs in rectangles(tiling, tile, "forward"):
                count[np.ix_(plan.token_index.numpy()[of_tile], keys[columns])] += pairs
                assert (flags[columns] == tiling.spans[number]["arrival"]).all()
    np.testing.assert_array_equal(count, union.dense())


def test_clipped_tiles_that_wait_for_keys_are_fetched_together() -> None:
    """More visits than bands: a tile waits if one of the spans that it visits does. Exactly."""
    mask = Mask.documents(800).with_bidirectional([50, 500], [90, 540])
    clipped = plan_context(mask, (0, 2)).gathered.clipped
    (tiling,) = clipped.forward(16)
    assert len(tiling.spans) > len(clipped.bands)
    parts = zip(tiling.tiles["first_span"], tiling.tiles["num_spans"], strict=True)
    waits = [bool(tiling.spans["arrival"][i : i + n].any()) for i, n in parts]
    assert any(waits)
    assert not waits[0]
    assert np.count_nonzero(np.diff(waits)) <= 2


@settings(max_examples=60)
@given(union=unions(40), world=st.integers(1, 4), m=tiles, n=st.sampled_from([64, 80, 128]))
def test_turns_of_a_dq_block_count_the_tiles_that_add_before(
    union: Union, world: int, m: int, n: int
) -> None:
    """Tiles and their spans, in fetch order, find the turns 0, 1, 2, ... at each block. So the
    earliest tile that is not done never waits. Reference: a count, exactly."""
    for plan in plans_of(union.mask(), world, "zigzag"):
        for tiling in plan.hops.backward(n, m, deterministic=True):
            check_turns(tiling, m)


def check_turns(tiling: Tiling, m: int) -> None:
    added: dict[int, int] = {}
    for tile in tiling.tiles:
        for number in range(tile["first_span"], tile["first_span"] + tile["num_spans"]):
            span = tiling.spans[number]
            key_tile = int(tile["row0"] - span["k0"]) // tiling.size
            for block in range(-(-int(span["q1"] - span["q0"]) // m)):
                begin, end = tiling.visiting_key_tiles(number, block, m)
                if begin <= key_tile < end:
                    at = int(span["padded_q0"]) + block * m
                    assert tiling.dq_order(number, key_tile, block, m) == added.get(at, 0)
                    added[at] = added.get(at, 0) + 1


@pytest.mark.parametrize(
    ("mask", "queries", "keys"),
    [
        (Mask.documents(900).with_bidirectional([50, 300], [90, 360]), [0, 50, 300], [0, 90, 360]),
        (Mask.tree([70, 40, 40, 40], [-1, 0, 0, 0]), [0, 110, 150], [0, 70, 110, 150]),
        (Mask.documents(900, window_size=(51, 0), first_keys=4), [0], [0, 4]),
        (Mask.documents([0, 90, 300], seqused_q=[50, 210]), [0, 50, 90], [0, 50, 90]),
        (Mask([[9, 20, 9, 20, 0, 0], [0, 30, 0, 30, -20, -10]], 30), [0, 9, 20], [0, 20]),
        (Mask([[0, 30, 0, 9, 0, 0], [0, 30, 9, 30, -8, -8]], 30), [0], [0, 9]),
    ],
    ids=["images", "responses", "first keys", "padding", "corners", "step"],
)
def test_refinement_cuts_where_a_rectangle_hides_pairs(
    mask: Mask, queries: list[int], keys: list[int]
) -> None:
    """First tokens of the segments. Reference: by hand. Diagonals end most rectangles themselves;
    documents, and padding, stay apart."""
    hops = plan_context(mask, (0, 1)).hops
    assert hops.queries.position.tolist() == queries
    assert hops.keys.position.tolist() == keys
    for mode in MODES:
        covered = coverage(plans_of(mask, 3, "zigzag"), mode, 16, 64)
        np.testing.assert_array_equal(covered, mask.dense())


def test_neighbouring_key_tiles_share_the_clipped_spans_that_they_visit() -> None:
    """A table has few entries for a long prompt: by hand, 1 for its ten tiles, and for the tiles of
    its responses 2, 3, 2 and 2."""
    clipped = plan_context(Mask.tree([640] + 6 * [40], [-1] + 6 * [0]), (0, 1)).hops.clipped
    (tiling,) = clipped.backward(64, 64)
    tiles = tiling.tiles[np.argsort(tiling.tiles["row0"])]
    assert tiles["num_spans"].tolist() == [1] * 10 + [2, 3, 2, 2]
    assert tiles["first_span"].tolist() == [0] * 10 + [1, 3, 6, 8]
    assert len(tiling.spans) == 10


DILATED = [[0, 300, 0, 300, -250, -100], [0, 300, 0, 300, -50, -20], [0, 300, 0, 300, 7, 40]]


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("n", [64, 128])
def test_bands_of_one_pair_of_segments_that_stay_apart(world: int, n: int) -> None:
    """Three bands of one rectangle, longer than a tile: turns as above, and every pair once."""
    mask = Mask(DILATED, 300)
    plans = plans_of(mask, world, "zigzag")
    for plan in plans:
        for tiling in plan.hops.backward(n, 16, deterministic=True):
            check_turns(tiling, 16)
    for mode in MODES:
        np.testing.assert_array_equal(coverage(plans, mode, 16, n), mask.dense())


def test_a_plan_of_images_names_no_pair_of_them() -> None:
    """Each of 100 images attends to all before it. What ranks need has an entry for a reader and a
    key segment, and the refined bands are made when a kernel runs them, also after a pickle: the
    same ones, exactly."""
    begins = np.arange(40, 6400, 64)
    mask = Mask.documents(6400).with_bidirectional(begins.tolist(), (begins + 20).tolist())
    plan = ContextPlan._remade(plan_context(mask, (1, 3)), (-1, -1), mask)  # no test has used it
    assert 100 < plan.kv_exchange.needs.shape[1] <= 3 * (100 + 2 * 3)
    assert plan.hops.clipped.clips
    assert not plan.hops.clips
    assert "bands" not in vars(plan.hops)
    copied = pickle.loads(pickle.dumps(plan))
    assert "bands" not in vars(copied.hops)
    for form in (plan.hops, copied.hops, plan.gathered):
        assert len(form.bands) > 1000
    for name in ("query", "key", "lo", "hi"):
        x, y = (getattr(form.bands, name) for form in (plan.hops, copied.hops))
        np.testing.assert_array_equal(x, y)


class _UsesPlan:
    """While it is pickled, another thread makes what a call would make."""

    def __init__(self, plan: ContextPlan) -> None:
        self.plan = plan

    def __reduce__(self) -> tuple[type, tuple[()]]:
        hops, exchange = self.plan.hops, self.plan.kv_exchange
        for use in (hops.bands, hops.backward(64, 64, deterministic=True), exchange.max_rows):
            assert use is not None
        assert self.plan.gathered.bands is not None
        assert self.plan.digest
        return str, ()


@pytest.mark.parametrize("part", ["hops", "kv_exchange"])
def test_a_plan_can_be_pickled_while_a_call_uses_it(part: str) -> None:
    """Data loaders pickle on a thread. The copy has the same bands, exactly."""
    mask = Mask.documents(640).with_bidirectional([40, 200], [60, 230])
    plan = ContextPlan._remade(plan_context(mask, (1, 3)), (-1, -1), mask)  # no test has used it
    vars(getattr(plan, part))["user"] = _UsesPlan(plan)
    copied = pickle.loads(pickle.dumps(plan))
    np.testing.assert_array_equal(copied.hops.bands.lo, plan.hops.bands.lo)
    np.testing.assert_array_equal(copied.kv_exchange.max_rows, plan.kv_exchange.max_rows)


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_as_many_keys_as_queries_of_other_documents(layout: str) -> None:
    """80 queries and 80 keys over three ranks: every pair once."""
    mask = Mask.documents([0, 30, 80], [0, 50, 80], causal=False)
    plans = plans_of(mask, 3, layout)
    for mode in MODES:
        np.testing.assert_array_equal(coverage(plans, mode, 16, 16), mask.dense())


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_runs_of_keys_that_begin_inside_a_segment(layout: str) -> None:
    """A window of 20 keys over three ranks: every pair once."""
    mask = Mask.documents(300, window_size=(20, 0))
    plans = plans_of(mask, 3, layout)
    assert max(plan.kv_exchange.block_rows[0] for plan in plans) < 100
    for mode in MODES:
        np.testing.assert_array_equal(coverage(plans, mode, 16, 64), mask.dense())
