"""If this fails, gradients lack parts, or GPUs idle in the backward. How backward work is cut:
every block of every tile and head once, and only where it helps."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfa3.masks.mask import Mask
from ringfa3.planning import work_split
from ringfa3.planning.context_plan import plan_context
from ringfa3.planning.tile_schedule import Tiling
from ringfa3.planning.tiling import plan_local
from ringfa3.planning.work_split import SHARED, split_work, visited_blocks
from tests.planning.test_tiling import rectangles
from tests.support.strategies import Case, cases, tiles


def blocks_by_mask(tiling: Tiling, tile: np.void, m: int) -> int:
    """Blocks of m rows in which a tile's keys see anything, counted pair by pair."""
    count = 0
    for _, rows, _, allowed in rectangles(tiling, tile, "backward"):
        count += sum(bool(allowed[i : i + m].any()) for i in range(0, len(rows), m))
    return count


@given(case=cases, m=tiles, n=tiles)
def test_visited_blocks_are_those_with_a_pair(case: Case, m: int, n: int) -> None:
    for plan in case.plans():
        for tiling in plan.hops.backward(n, m):
            expected = [blocks_by_mask(tiling, tile, m) for tile in tiling.tiles]
            assert visited_blocks(tiling, m).tolist() == expected


@given(
    case=cases,
    m=tiles,
    n=tiles,
    group=st.sampled_from([1, 2, 4, 5, 6, 12]),
    kv_heads=st.integers(1, 3),
    num_ctas=st.integers(1, 40),
    deterministic=st.booleans(),
    outlier=st.sampled_from([4, 1, 0]),
)
def test_work_units_cover_every_block_of_every_head_once(
    case: Case,
    m: int,
    n: int,
    group: int,
    kv_heads: int,
    num_ctas: int,
    deterministic: bool,
    outlier: int,
) -> None:
    """SHARED where a tile has several units, and only there; in the order of the tiles. Also where
    some tiles or all of them count as far longer than the others.

    Deterministic: at most two units, since three sums depend on their order; and each query head
    has units in the order of the tiles, each with all row blocks, else additions to dQ deadlock."""
    part = 1 / 2 if outlier else 0
    limits = {"OUTLIER": outlier, "OUTLIER_PART": part, "OUTLIER_UNIT": part / 4}
    for plan in case.plans():
        for tiling in plan.hops.backward(n, m, deterministic):
            with patch.multiple(work_split, **limits):
                table = split_work(tiling, m, group, kv_heads, num_ctas, 128, deterministic)
            blocks = visited_blocks(tiling, m)
            assert (table["blocks"] > 0).all()
            row0 = tiling.tiles["row0"].tolist()
            parts = set(table["first_head"].tolist()) if deterministic else ()
            for units in [table[table["first_head"] == part] for part in parts] or [table]:
                order = [row0.index(row) for row in units["row0"].tolist()]
                assert order == sorted(order)
            for index, tile in enumerate(tiling.tiles):
                done = np.zeros((group, blocks[index]), int)
                mine = table[table["row0"] == tile["row0"]]
                for unit in mine:
                    heads = slice(unit["first_head"], unit["first_head"] + unit["num_heads"])
                    done[heads, unit["skip"] : unit["skip"] + unit["blocks"]] += 1
                    assert unit["rows"] == tile["rows"]
                    assert unit["first_span"] == tile["first_span"]
                    assert unit["flags"] == tile["flags"] | SHARED * (len(mine) > 1)
                assert (done == 1).all()
                if deterministic:
                    assert len(mine) <= 2
                    assert (mine["blocks"] == blocks[index]).all()


def test_few_tiles_are_cut_until_the_gpu_is_full_and_many_are_not() -> None:
    """8k tokens, 128 keys a tile: one KV head leaves half of 132 CTAs idle, eight do not."""
    tiling = plan_local(np.array([8192]), np.array([8192]), -1, -1).backward(128, 64)[0]
    few = split_work(tiling, 64, 8, 1, 132, 128)
    assert (few["flags"] & SHARED).all()
    assert len(few) == 2 * 64
    assert len(split_work(tiling, 64, 4, 8, 132, 128)) == 64


@pytest.mark.parametrize(
    ("lengths", "group", "right", "heads"),
    [
        ([16384], 4, 0, {2}),
        ([8192, 8192], 7, 0, {3, 4}),
        ([8192, 8192], 4, -1, {4}),  # equal tiles
        ([512] * 32, 4, 0, {4}),
        ([16384], 1, 0, {1}),
    ],
)
def test_deterministic_tiles_are_halved_where_that_shortens_the_end(
    lengths: list[int], group: int, right: int, heads: set[int]
) -> None:
    """8 KV heads, one after the other; longest tiles come last. Reference: the makespan is at most
    0.96 of that of whole tiles where they are halved, and halves are no faster elsewhere."""
    rows = np.array(lengths)
    tiling = plan_local(rows, rows, -1, right).backward(128, 64, True)[0]
    table = split_work(tiling, 64, group, 8, 132, 128, deterministic=True)
    assert set(table["num_heads"].tolist()) == heads
    blocks = visited_blocks(tiling, 64)

    def makespan(parts: int) -> int:
        units = work_split._heads_outer(work_split._cut(tiling, blocks, group, parts, 1))
        return work_split._makespan(np.tile(work_split._costs(units), 8), 1, 132)

    if group in heads:
        assert group == 1 or makespan(2) >= makespan(1)
    else:
        assert makespan(2) < 0.96 * makespan(1)


def test_tiles_of_very_many_heads_are_cut_to_four() -> None:
    """Or three: in long sequences, from nine heads of a KV head on."""
    lengths = np.array([8192, 8192])
    tiling = plan_local(lengths, lengths, -1, 0).backward(128, 64)[0]
    for group, kv_heads, expected in (
        (32, 1, 4),
        (16, 2, 4),
        (12, 2, 4),
        (9, 8, 3),
        (11, 8, 11),
        (8, 4, 8),
        (4, 8, 4),
    ):
        table = split_work(tiling, 64, group, kv_heads, 132, 128)
        assert set(table["num_heads"].tolist()) == {expected}, group
        assert len(table) == 128 * group // expected
    short = np.full(64, 256)
    tiling = plan_local(short, short, -1, 0).backward(128, 64)[0]
    assert set(split_work(tiling, 64, 32, 8, 132, 128)["num_heads"].tolist()) == {32}
    beside = np.array([2048] + [128] * 512)  # most work is in short documents
    tiling = plan_local(beside, beside, -1, 0).backward(128, 64)[0]
    assert set(split_work(tiling, 64, 16, 8, 132, 128)["num_heads"].tolist()) == {16}


def test_units_of_long_rows_have_one_head_heads_outer() -> None:
    """Where Q, dO and dQ of a unit exceed 160 MiB; full mask, 8 KV heads."""

    def heads(rows: int, group: int, head_dim: int) -> list[int]:
        """Heads of the units; their order is checked."""
        lengths = np.array([rows])
        tiling = plan_local(lengths, lengths, -1, -1).backward(128, 64)[0]
        table = split_work(tiling, 64, group, 8, 132, head_dim)
        assert (np.diff(table["first_head"]) >= 0).all()
        for first in np.unique(table["first_head"]):
            rows0 = table["row0"][table["first_head"] == first]
            assert rows0.tolist() == tiling.tiles["row0"].tolist()
        assert ((table["flags"] & SHARED) > 0).all() == (table["num_heads"] < group).all()
        return np.unique(table["num_heads"]).tolist()

    assert heads(32768, 4, 128) == [4]
    assert heads(65536, 4, 128) == [1]
    assert heads(65536, 4, 64) == [4]
    assert heads(32768, 4, 256) == [1]
    assert heads(32768, 8, 128) == [1]
    assert heads(131072, 1, 128) == [1]
    assert heads(65536, 16, 128) == [1]


def test_long_rows_on_few_keys_still_fill_the_gpu() -> None:
    """64k rows see 512 keys of one KV head: 16 units of one head are cut between row blocks."""
    tiling = plan_local(np.array([65536]), np.array([512]), -1, -1).backward(128, 64)[0]
    table = split_work(tiling, 64, 4, 1, 132, 128)
    assert len(table) >= 128
    assert (np.diff(table["first_head"]) >= 0).all()


@pytest.mark.parametrize("world", [2, 8])
def test_cuts_that_cannot_be_faster_are_not_tried(
    world: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A packing has a few long tiles and too few others to fill the GPU.

    The reference tries every cut. At worst it assigns 50,000 work items for one hop.
    """
    assigned = 0
    makespan = work_split._makespan

    def count(costs: np.ndarray, kv_heads: int, num_ctas: int) -> int:
        nonlocal assigned
        assigned += len(costs) * kv_heads
        return makespan(costs, kv_heads, num_ctas)

    random = np.random.default_rng(0)
    for _ in range(5):
        lengths = np.minimum(random.lognormal(6.8, 1.4, 99).astype(int) + 1, 1024 * world)
        cu = np.minimum(np.r_[0, np.cumsum(lengths)], 4096 * world)
        plan = plan_context(np.unique(cu).tolist(), (0, world))
        for tiling in plan.hops.backward(128, 64):
            blocks = visited_blocks(tiling, 64)
            cuts = [(1, 1), *work_split._cuts(4, int(blocks.max(initial=0)))]
            tables = [work_split._cut(tiling, blocks, 4, *cut) for cut in cuts]
            times = [makespan(work_split._costs(table), 8, 132) for table in tables]
            monkeypatch.setattr(work_split, "_makespan", count)
            table = split_work(tiling, 64, 4, 8, 132, 128)
            monkeypatch.undo()
            time = makespan(work_split._costs(table), 8, 132)
            filled = int(blocks.sum()) * 32 >= work_split.FULL * 132 * time
            many = len(table) * 8 >= work_split.WAVES * 132
            assert time == min(times) or filled or many
    assert assigned < 5 * world * 1500


def test_a_tile_that_every_query_visits_is_cut_and_no_other() -> None:
    """First keys under a window: whole, its unit takes 6 times as long as the mean CTA."""
    mask = Mask.documents(16384, window_size=(1023, 0), first_keys=4)
    (tiling,) = plan_context(mask).hops.backward(128, 64)
    blocks, units = visited_blocks(tiling, 64), split_work(tiling, 64, 4, 2, 132, 128)
    cut = units["row0"] == 0
    assert set(units["flags"][cut].tolist()) == {SHARED}
    assert set(units["flags"][~cut].tolist()) == {0}
    assert units["blocks"].sum() == blocks.sum()
    assert work_split._makespan(work_split._costs(units), 2, 132) < 1.2 * 8 * blocks.sum() / 132
