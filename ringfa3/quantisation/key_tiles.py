"""Tiles of keys that share a scale of K."""

from __future__ import annotations

import weakref

import numpy as np
import torch

from ringfa3.planning.row_exchange import RowIndex
from ringfa3.planning.sharding import Segments
from ringfa3.planning.tile_schedule import concat_ranges

BYTES_16 = torch.complex128  # the dtype with elements of 16 bytes
KEY_TILE = 128  # keys that share a scale, counted from the start of their segment
KEY_TILE_RECORD = np.dtype([("row0", np.int32), ("rows", np.int32)])


class KeyTiles:
    """Key segments in tiles of `KEY_TILE` rows, counted from the start of each segment.

    keys   the segments
    table  (tiles,) records of the first row and the number of rows, in the order of the segments
    """

    def __init__(self, keys: Segments) -> None:
        self.keys = keys
        count = -(-keys.length // KEY_TILE)
        segment = np.repeat(np.arange(len(keys)), count)
        start = concat_ranges(np.zeros(len(keys), np.int64), count) * KEY_TILE
        self.table = np.zeros(len(segment), KEY_TILE_RECORD)
        self.table["row0"] = keys.row[segment] + start
        self.table["rows"] = np.minimum(KEY_TILE, keys.length[segment] - start)
        self._rows: dict[torch.device, tuple[RowIndex, torch.Tensor]] = {}

    @classmethod
    def of(cls, plan: object, keys: Segments) -> KeyTiles:
        """The same object for every call with a plan, whose keys they are."""
        tiles = _of_plans.get(plan)
        if tiles is None:
            tiles = _of_plans.setdefault(plan, cls(keys))
        return tiles

    def __len__(self) -> int:
        return len(self.table)

    def rows(self, device: torch.device) -> tuple[RowIndex, torch.Tensor]:
        """(row, padded row) of every key, where padded tiles lie `KEY_TILE` rows apart."""
        if device not in self._rows:
            used = self.table["rows"].astype(np.int64)
            row = concat_ranges(self.table["row0"].astype(np.int64), used)
            padded = concat_ranges(np.arange(len(self), dtype=np.int64) * KEY_TILE, used)
            self._rows[device] = RowIndex.of(row, device), torch.from_numpy(padded).to(device)
        return self._rows[device]

    def spread(self, x: torch.Tensor) -> torch.Tensor:
        """x (n, hk, d) as (tiles, KEY_TILE, hk, d), zeros past a tile's rows.

        A view of x where all tiles are full and lie in a row.
        """
        row, padded = self.rows(x.device)
        whole = len(padded) == len(self) * KEY_TILE
        if whole and isinstance(row.rows, slice):
            return x[row.rows].view(len(self), KEY_TILE, *x.shape[1:])
        given = view_16_bytes(x.view(torch.uint8))
        spread = torch.zeros(
            (len(self) * KEY_TILE, *given.shape[1:]), dtype=given.dtype, device=x.device
        )
        spread[padded] = given[row.rows]
        return spread.view(x.dtype).view(len(self), KEY_TILE, *x.shape[1:])


_of_plans: weakref.WeakKeyDictionary[object, KeyTiles] = weakref.WeakKeyDictionary()


def view_16_bytes(x: torch.Tensor) -> torch.Tensor:
    """`x` (t, h, d) viewed in elements of 16 bytes; `x` itself where its strides forbid it.

    PyTorch's indexing on a GPU copies one element a thread.
    """
    token_stride, head_stride, last = x.stride()
    whole = (token_stride | head_stride | x.shape[2]) * x.element_size() % 16 == 0
    begins = x.data_ptr() % 16 == 0 and x.storage_offset() * x.element_size() % 16 == 0
    return x.view(BYTES_16) if last == 1 and whole and begins else x
