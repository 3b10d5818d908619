"""Tiles of quantised K/V, each one record: what ranks exchange."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

CONTIGUOUS = torch.contiguous_format


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

    @property
    def words(self) -> list[int]:
        """Words of 4 bytes of a tile's K, V and scales, which follow each other in a record."""
        parts = (self.k, self.v, self.k_scale)
        return [math.prod(x.shape[1:]) * x.itemsize // 4 for x in parts]

    def pack(self, records: torch.Tensor) -> None:
        """Writes the tiles to records (tiles, words) int32."""
        parts = (self.k, self.v, self.k_scale)
        torch.cat([x.flatten(1).view(torch.int32) for x in parts], 1, out=records)

    def unpack(self, records: torch.Tensor) -> TileRecords:
        """A copy of the tiles of records (n, words), in shapes and dtypes of this object."""
        like = (self.k, self.v, self.k_scale)
        parts = zip(torch.split(records, self.words, 1), like, strict=True)
        return TileRecords(
            *(
                part.clone(memory_format=CONTIGUOUS).view(x.dtype).view(-1, *x.shape[1:])
                for part, x in parts
            )
        )
