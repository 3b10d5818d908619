"""If this fails, code of the page on masks does not run. docs/masks.md: its code runs as printed,
its picture is what its last block draws."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ringfa3 import Mask, plan_context
from ringfa3.masks.plot import polygons
from tests.support.markdown import ROOT, blocks, links

PAGE = ROOT / "docs" / "masks.md"


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    """The names that the page's Python blocks leave, run one after the other."""
    namespace: dict[str, Any] = {}
    for language, code in blocks(PAGE):
        assert language == "python"
        exec(compile(code, "masks.md", "exec"), namespace)
    return namespace


def test_the_picture_is_that_of_the_page(page: dict[str, Any]) -> None:
    """As many polygons a rank, in its colour, as spans of its queries; the file is small."""
    (axes,) = page["figure"].axes
    counts = [len(collection.get_paths()) for collection in axes.collections]
    assert len(counts) == 3
    assert min(counts) > 2
    assert [text.get_text() for text in page["figure"].legends[0].get_texts()] == ["0", "1", "2"]
    (picture,) = [link for link in links(PAGE) if link.endswith(".png")]
    assert (PAGE.parent / picture).stat().st_size < 20_000


def _area(polygon: list[tuple[int, int]]) -> float:
    x, y = np.array(polygon, float).T
    return abs(float(x @ np.roll(y, -1) - y @ np.roll(x, -1))) / 2


@pytest.mark.parametrize(
    "mask",
    [
        Mask.documents(40),
        Mask.documents([0, 30, 40], window_size=(7, 3), causal=False),
        Mask([[0, 20, 5, 40, -10, -4]], 20, 40),
        Mask([[0, 20, 5, 40, 9, 30]], 20, 40),
        Mask.tree([10, 5, 5], [-1, 0, 0]),
    ],
)
def test_polygons_have_the_area_of_the_pairs(mask: Mask) -> None:
    """Steps of a diagonal become straight: half a cell a row and side."""
    found = sum(_area(polygon) for polygon in polygons(mask.diagonal_spans))
    rows = sum(q1 - q0 for q0, q1, *_ in mask.spans.tolist())
    assert abs(found - mask.pairs) <= rows


def test_a_plan_gives_each_pair_the_colour_of_one_rank() -> None:
    """Areas of the ranks' colours are their work, to within a cell a row."""
    mask = Mask.pack([Mask.tree([64, 30, 20], [-1, 0, 0])] * 3)
    plan = plan_context(mask, (0, 2))
    (axes,) = mask.plot(plan).axes
    for collection, work in zip(axes.collections, plan.work_per_rank, strict=True):
        area = sum(_area(path.vertices[:-1].tolist()) for path in collection.get_paths())
        assert abs(area - work) <= 2 * mask.q_tokens
