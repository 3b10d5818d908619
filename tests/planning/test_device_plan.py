"""If this fails, kernels visit other blocks than Python planned. The plan arithmetic of the
kernels, csrc/plan, against Python's and against a brute-force mask.

g++ compiles the same headers as nvcc. The backward kernel ends its loop over row blocks after
`blocks` of a work unit. Python computes that number: it must be what the iteration finds.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ringfa3.build.compile import source_folder
from ringfa3.planning.tile_schedule import Table
from ringfa3.planning.tiling import Plan
from ringfa3.planning.work_split import split_work, visited_blocks
from tests.planning.test_tiling import rectangles
from tests.support.masks import MaskCase, Union, mask_cases
from tests.support.strategies import Case, cases, tiles

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

NARROW_KEYS = 4  # as kNarrow
MOST = 1 << 16  # records that a call may return
any_case = st.one_of(cases, mask_cases)  # documents with a window, and masks


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    library = tmp_path_factory.mktemp("device_plan") / "device_plan.so"
    options = ("-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC")
    source = Path(__file__).with_name("device_plan.cpp")
    command = ["g++", *options, f"-I{source_folder()}", source, "-o", library]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(library))


def address(table: Table) -> ctypes.c_void_p:
    """Of contiguous records."""
    return ctypes.c_void_p(table.ctypes.data)


def records(call: Callable[..., int], width: int, *arguments: object) -> list[list[int]]:
    """What a C function writes behind its arguments, in rows of `width` numbers."""
    out = np.empty((MOST, width), np.int32)
    count = call(*arguments, ctypes.c_void_p(out.ctypes.data))
    assert count <= MOST
    return out[:count].tolist()


# A key tile begins before the second span, whose first rows attend to none of its keys.
LATE = MaskCase(Union(40, 40, [("|", (0, 40, 0, 13, -40, 40)), ("|", (0, 40, 13, 40, -40, -9))]), 1)


# Whole spans, of one and of two blocks, before one that is masked, and after it.
BLOCKS = MaskCase(
    Union(
        16, 64, [("|", (0, 8, a, b, -64, 64)) for a, b in ((0, 8), (16, 32), (40, 45), (48, 64))]
    ),
    1,
)


# A narrow span before whole ones; one of which a tile needs its last columns.
NARROW = MaskCase(
    Union(24, 64, [("|", (0, 8, a, b, -64, 64)) for a, b in ((0, 3), (8, 16), (24, 40), (45, 50))]),
    1,
)
NARROW.union.steps.extend([("|", (8, 24, 0, 20, 12, 14)), ("|", (8, 24, 30, 64, -64, 64))])


def all_hops(case: Case | MaskCase) -> Iterator[Plan]:
    """The plans of all ranks; those of masks with whole spans and with clipped ones."""
    for plan in case.plans():
        yield from {plan.hops: None, plan.hops.clipped: None}


@given(
    case=any_case,
    m=tiles,
    n=tiles,
    group=st.sampled_from([1, 2, 6]),
    num_ctas=st.integers(1, 40),
    deterministic=st.booleans(),
)
@example(case=LATE, m=8, n=8, group=1, num_ctas=1, deterministic=False)
def test_a_work_unit_iterates_over_the_blocks_that_python_counts(
    device: ctypes.CDLL,
    case: Case | MaskCase,
    m: int,
    n: int,
    group: int,
    num_ctas: int,
    deterministic: bool,
) -> None:
    """Reference: blocks of the mask with a pair, in the order of a tile's spans, exactly. The units
    of a tile and head have each block once, and without its bound the iteration finds no more.
    """
    for hops in all_hops(case):
        for tiling in hops.backward(n, m, deterministic and not hops.clips):
            table = split_work(tiling, m, group, 1, num_ctas, 128, deterministic)
            spans, counts = address(tiling.spans), visited_blocks(tiling, m)
            found = defaultdict(list)
            for i in range(len(table)):
                unit = table[i : i + 1]
                (tile,) = np.nonzero(tiling.tiles["row0"] == unit["row0"][0])[0]
                num_spans = int(tiling.tiles[tile]["num_spans"])
                given = tiling.clips, m, address(unit), spans, num_spans
                visits = records(device.row_blocks, 3, *given)
                assert [left for *_, left in visits] == list(range(int(unit["blocks"][0]), 0, -1))
                key = int(unit["row0"][0]), int(unit["first_head"][0])
                found[key] += [(span, block) for span, block, _ in visits]
                assert device.visited_blocks(*given) == counts[tile]
            for tile in tiling.tiles:
                expected = []
                for number, rows, _, allowed in rectangles(tiling, tile, "backward"):
                    block = (tiling.spans[number]["padded_q0"] % m + np.arange(len(rows))) // m
                    expected += [(number, at) for at in np.unique(block[allowed.any(1)]).tolist()]
                heads = [key for key in found if key[0] == tile["row0"]]
                assert bool(heads) == bool(expected)
                assert all(found[key] == expected for key in heads)


@given(case=mask_cases, m=tiles, n=tiles)
def test_row_blocks_of_clipped_spans_have_each_pair_once(
    device: ctypes.CDLL, case: MaskCase, m: int, n: int
) -> None:
    """Reference: the mask, exactly, from the bounds of `BlockMask`. A block without a mask hides
    nothing; its rows end with the segment, and their number is that of the padded rows.
    """
    for plan in case.plans():
        hops = plan.hops.clipped
        padded, queries = hops.padded_rows(m), hops.queries
        for tiling in hops.backward(n, m) if hops.clips else []:
            table = split_work(tiling, m, 1, 1, 1, 128)
            for i in range(len(table)):
                unit = table[i : i + 1]
                row0, keys = int(unit["row0"][0]), int(unit["rows"][0])
                (tile,) = tiling.tiles[tiling.tiles["row0"] == row0]
                seen = {
                    number: (rows, columns, np.zeros(allowed.shape, int), allowed)
                    for number, rows, columns, allowed in rectangles(tiling, tile, "backward")
                }
                given = True, m, address(unit), address(tiling.spans), int(tile["num_spans"])
                for number, block, _ in records(device.row_blocks, 3, *given):
                    span = tiling.spans[number : number + 1]
                    out = np.empty(9, np.int32)
                    device.clipped_block(m, n, address(span), block, row0, keys, address(out))
                    token, rows, low, high, *clip, masked = out.tolist()
                    segment = int(np.searchsorted(queries.row, token, side="right")) - 1
                    inside = token - int(queries.row[segment])
                    target = int(span["padded_q0"][0]) // m + block
                    assert target == (int(padded[segment]) + inside) // m
                    assert inside % m == 0
                    assert rows == min(m, int(queries.length[segment]) - inside)
                    row, key = np.arange(m)[:, None], np.arange(n)[None]
                    sees = (key + low <= row) & (row <= key + high) & (clip[0] <= row)
                    sees &= (row < min(rows, clip[1])) & (clip[2] <= key) & (key < clip[3])
                    assert masked or sees.all()
                    of_rows, of_columns, count, _ = seen[number]
                    for r, c in np.argwhere(sees).tolist():
                        count[token + r - of_rows[0], row0 + c - of_columns[0]] += 1
                for _, _, count, allowed in seen.values():
                    np.testing.assert_array_equal(count, allowed)


@given(case=any_case, m=tiles, n=tiles)
def test_turns_are_those_of_the_tiling(
    device: ctypes.CDLL, case: Case | MaskCase, m: int, n: int
) -> None:
    """Reference: `Tiling.dq_order`, exactly, for every key tile and dQ block that it adds to."""
    for plan in case.plans():
        for tiling in plan.hops.backward(n, m, deterministic=True):
            table = split_work(tiling, m, 1, 1, 1, 128, deterministic=True)
            spans, earlier = address(tiling.spans), address(tiling.earlier)
            for i in range(len(table)):
                unit = table[i : i + 1]
                row0 = int(unit["row0"][0])
                last = len(tiling.spans) - int(unit["first_span"][0])
                visits = records(device.row_blocks, 3, False, m, address(unit), spans, last)
                for span, block, _ in visits:
                    key_tile = (row0 - int(tiling.spans[span]["k0"])) // n
                    token = int(tiling.spans[span]["q0"]) + block * m
                    found = device.dq_order(m, n, spans, earlier, span, token, row0)
                    assert found == tiling.dq_order(span, key_tile, block, m)


def check_run(blocks: list[list[int]], joined: list[list[int]], counts: list[int], n: int) -> None:
    """Those who load and those who compute see equal blocks, but for the run of whole spans. A
    narrow span, which comes first, replaces its only block in `blocks`.
    """
    number, _, in_run, narrow = counts
    if narrow:
        blocks[0] = joined[0]
        blocks, joined = blocks[1:], joined[1:]
    assert number == len(blocks) == len(joined)
    assert joined[in_run:] == blocks[in_run:]
    for at, (block, of_run) in enumerate(zip(blocks[:in_run], joined, strict=False)):
        assert block[5:7] == of_run[5:7] == [1, n]  # no mask, n rows of V
        assert of_run[:2] == [-1, n * (in_run - 1 - at)]


@given(case=any_case, m=tiles, n=tiles, on_grid=st.booleans())
@example(case=BLOCKS, m=8, n=8, on_grid=False)
@example(case=NARROW, m=8, n=8, on_grid=False)
def test_a_forward_tile_sees_each_pair_once(
    device: ctypes.CDLL, case: Case | MaskCase, m: int, n: int, on_grid: bool
) -> None:
    """Reference: the mask, exactly, from the blocks' columns and `apply_mask`'s bounds per row. A
    block without a mask hides nothing; the rows of V that it owns end with the segment. On the grid
    a block begins at a multiple of n. A narrow span has a block of `NARROW_KEYS` keys.
    """
    for hops in all_hops(case):
        for tiling in hops.forward(m):
            form = 2 if hops.clips else int(on_grid)
            table = tiling.span_visits() if hops.clips else tiling.spans
            ends = tiling.spans["k_end" if hops.clips else "k1"] - tiling.spans["k0"]
            for i in range(len(tiling.tiles)):
                tile = tiling.tiles[i : i + 1]
                row0, end_row = int(tile["row0"][0]), int(tile["row0"][0] + tile["rows"][0])
                seen: dict[int, np.ndarray] = {}
                allowed: dict[int, np.ndarray] = {}
                for number, rows, columns, pairs in rectangles(tiling, tile[0], "forward"):
                    allowed[number] = np.zeros((end_row - row0, len(columns)), int)
                    allowed[number][rows - row0] = pairs
                    seen[number] = np.zeros(allowed[number].shape, int)
                given = address(tile), address(table)
                blocks = records(device.key_blocks, 9, n, form, False, *given)
                counts, *joined = records(device.key_blocks, 9, n, form, True, *given)
                check_run(blocks, joined, counts[:4], n)
                for at, (span, start, end, low, high, unmasked, valid_rows, *clip) in enumerate(
                    blocks
                ):
                    width = NARROW_KEYS if counts[3] and at == 0 else n
                    assert form != 1 or start % n == 0
                    assert valid_rows == min(width, ends[span] - start)
                    for r in range(end_row - row0):
                        first, last = max(start, low + r), min(end, start + width, high + r + 1)
                        if not clip[0] <= r < clip[1]:
                            last = first
                        seen[span][r, first : max(first, last)] += 1
                        if unmasked:
                            assert (first, last) == (start, start + n)
                for number, pairs in allowed.items():
                    np.testing.assert_array_equal(seen[number], pairs)


@given(records_=st.integers(1, 20), heads=st.integers(1, 12), section=st.integers(1, 12))
def test_work_items_run_section_by_section(
    device: ctypes.CDLL, records_: int, heads: int, section: int
) -> None:
    """Inside a section of heads, record by record; every record and head once."""
    out = np.empty((records_ * heads, 2), np.int32)
    device.work_order(records_, heads, section, ctypes.c_void_p(out.ctypes.data))
    expected = [
        [record, head]
        for first in range(0, heads, section)
        for record in range(records_)
        for head in range(first, min(first + section, heads))
    ]
    assert out.tolist() == expected
