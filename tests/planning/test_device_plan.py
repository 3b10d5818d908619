"""The plan arithmetic of the kernels, csrc/plan, against Python's and against a brute-force mask.

g++ compiles the same headers as nvcc. The backward kernel ends its loop over row blocks after
`blocks` of a work unit. Python computes that number: it must be what the iteration finds.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfa3.build.compile import source_folder
from ringfa3.planning.tile_schedule import Table
from ringfa3.planning.work_split import split_work, visited_blocks
from tests.planning.test_tiling import rectangles
from tests.support.masks import MaskCase, mask_cases
from tests.support.strategies import Case, cases, tiles

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

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


@given(
    case=any_case,
    m=tiles,
    n=tiles,
    group=st.sampled_from([1, 2, 6]),
    num_ctas=st.integers(1, 40),
    deterministic=st.booleans(),
)
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
    for plan in case.plans():
        for tiling in plan.hops.backward(n, m, deterministic):
            table = split_work(tiling, m, group, 1, num_ctas, 128, deterministic)
            spans, counts = address(tiling.spans), visited_blocks(tiling, m)
            found = defaultdict(list)
            for i in range(len(table)):
                unit = table[i : i + 1]
                (tile,) = np.nonzero(tiling.tiles["row0"] == unit["row0"][0])[0]
                num_spans = int(tiling.tiles[tile]["num_spans"])
                visits = records(device.row_blocks, 3, m, address(unit), spans, num_spans)
                assert [left for *_, left in visits] == list(range(int(unit["blocks"][0]), 0, -1))
                key = int(unit["row0"][0]), int(unit["first_head"][0])
                found[key] += [(span, block) for span, block, _ in visits]
                whole = device.visited_blocks(m, address(unit), spans, num_spans)
                assert whole == counts[tile]
            for tile in tiling.tiles:
                expected = [
                    (number, start // m)
                    for number, rows, _, allowed in rectangles(tiling, tile, "backward")
                    for start in range(0, len(rows), m)
                    if allowed[start : start + m].any()
                ]
                heads = [key for key in found if key[0] == tile["row0"]]
                assert bool(heads) == bool(expected)
                assert all(found[key] == expected for key in heads)


@given(case=any_case, m=tiles, n=tiles)
def test_turns_are_those_of_the_tiling(
    device: ctypes.CDLL, case: Case | MaskCase, m: int, n: int
) -> None:
    """Reference: `Tiling.dq_order`, exactly, for every key tile and dQ block that it adds to."""
    for plan in case.plans():
        for tiling in plan.hops.backward(n, m, deterministic=True):
            table = split_work(tiling, m, 1, 1, 1, 128, whole=True)
            spans, earlier = address(tiling.spans), address(tiling.earlier)
            for i in range(len(table)):
                unit = table[i : i + 1]
                row0 = int(unit["row0"][0])
                last = len(tiling.spans) - int(unit["first_span"][0])
                visits = records(device.row_blocks, 3, m, address(unit), spans, last)
                for span, block, _ in visits:
                    key_tile = (row0 - int(tiling.spans[span]["k0"])) // n
                    token = int(tiling.spans[span]["q0"]) + block * m
                    found = device.dq_order(m, n, spans, earlier, span, token, row0)
                    assert found == tiling.dq_order(span, key_tile, block, m)


@given(case=any_case, m=tiles, n=tiles, on_grid=st.booleans())
def test_a_forward_tile_sees_each_pair_once(
    device: ctypes.CDLL, case: Case | MaskCase, m: int, n: int, on_grid: bool
) -> None:
    """Reference: the mask, exactly, from the blocks' columns and `apply_mask`'s bounds per row. A
    block without a mask hides nothing; the rows of V that it owns end with the span. On the grid a
    block begins at a multiple of n.
    """
    for plan in case.plans():
        for tiling in plan.hops.forward(m):
            for i in range(len(tiling.tiles)):
                tile = tiling.tiles[i : i + 1]
                seen: dict[int, np.ndarray] = {}
                allowed: dict[int, np.ndarray] = {}
                for number, rows, columns, pairs in rectangles(tiling, tile[0], "forward"):
                    allowed[number] = pairs
                    seen[number] = np.zeros((len(rows), len(columns)), int)
                blocks = records(
                    device.key_blocks, 7, n, on_grid, address(tile), address(tiling.spans)
                )
                for span, start, end, low, high, unmasked, valid_rows in blocks:
                    assert not on_grid or start % n == 0
                    assert valid_rows == min(n, seen[span].shape[1] - start)
                    for r in range(int(tile["rows"][0])):
                        first, last = max(start, low + r), min(end, start + n, high + r + 1)
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
