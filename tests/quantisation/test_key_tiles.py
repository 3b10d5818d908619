"""If this fails, 8-bit attention reads keys of another document. Keys spread over tiles of 128
rows, against copies row by row: equal bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ringfa3.planning.sharding import Segments
from ringfa3.quantisation.key_tiles import KEY_TILE, KeyTiles, view_16_bytes

TOKENS = 700
SEGMENTS = {  # (first rows, lengths)
    "a row of full tiles": ([128], [2 * KEY_TILE]),
    "rows that no tile covers": ([3, 200], [130, 300]),
    "out of order": ([400, 0], [128, 128]),
}


@pytest.mark.parametrize("segments", SEGMENTS.values(), ids=SEGMENTS)
@pytest.mark.parametrize("begin", [0, 1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int8])
def test_keys_are_spread_over_tiles(
    segments: tuple[list[int], list[int]], begin: int, dtype: torch.dtype
) -> None:
    first, lengths = (np.array(part, np.int64) for part in segments)
    tiles = KeyTiles(Segments(first, lengths, np.arange(len(first)), np.zeros_like(first)))
    room = torch.randn(TOKENS * 2 * 16 + 1).mul(40).to(dtype)
    x = room[begin : begin + TOKENS * 2 * 16].view(TOKENS, 2, 16)
    expected = torch.zeros((len(tiles), KEY_TILE, 2, 16), dtype=dtype)
    for tile, (row0, rows) in enumerate(tiles.table.tolist()):
        expected[tile, :rows] = x[row0 : row0 + rows]
    got = tiles.spread(x)
    assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))


def test_rows_of_whole_16_bytes_are_viewed_in_them() -> None:
    room = torch.zeros(5 * 2 * 2 * 8 + 1).bfloat16()
    assert view_16_bytes(room[:160].view(5, 2, 2, 8)[:, 0]).dtype == torch.complex128
    assert view_16_bytes(room[1:81].view(5, 2, 8)).dtype == torch.bfloat16
