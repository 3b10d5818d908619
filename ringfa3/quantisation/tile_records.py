"""Tiles of quantised K/V, each one record: what ranks exchange."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TileRecords:
    """K, V and scales of tiles of `KEY_TILE` keys.

    k        (tiles, KEY_TILE, hk, d) in the format of Q and K
    v        (tiles, ...), as many numbers in the format of V, in the order of what attends
    k_scale  (tiles, hk) float32
    """

    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor

    def pack(self) -> torch.Tensor:
        """(tiles, words) int32: K, V and scales of a tile behind each other."""
        parts = (self.k, self.v, self.k_scale)
        return torch.cat([x.flatten(1).view(torch.int32) for x in parts], 1)

    def unpack(self, records: torch.Tensor) -> TileRecords:
        """The tiles of records (n, words), whose shapes and dtypes are those of this object."""
        like = (self.k, self.v, self.k_scale)
        words = [math.prod(x.shape[1:]) * x.itemsize // 4 for x in like]
        parts = zip(torch.split(records, words, 1), like, strict=True)
        return TileRecords(
            *(part.contiguous().view(x.dtype).view(-1, *x.shape[1:]) for part, x in parts)
        )
