"""If this fails, the published tile counts of masks are wrong. Counts of `benchmarks.masks.tiles`
against the dense mask."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.masks.tiles import block_counts
from ringfa3 import Mask


@pytest.mark.parametrize(
    ("mask", "computed"),
    [
        (Mask.documents(64), 36),
        (Mask.documents(64).with_bidirectional([11], [29]), 42),
        (Mask.pack([Mask.tree([16, 8, 8], [-1, 0, 0])] * 2), None),
        (Mask.documents(64, window_size=(9, 0), first_keys=2), None),
        (Mask.blocks([0, 1, 5], [2, 1, 0], 8, 64), 3),
    ],
)
def test_blocks_that_hold_a_pair(mask: Mask, computed: int | None) -> None:
    """Reference: blocks of 8 x 8 of the dense mask, whose components are multiples of 8."""
    refined, found, needed = block_counts(mask, 8, 8)
    blocks = mask.dense().reshape(8, 8, 8, 8).any((1, 3))
    assert needed == np.count_nonzero(blocks)
    assert refined >= found >= needed
    assert computed in (None, found)
