"""Rows of a tensor by number: read into a buffer, and gradients added back to them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from ringfa3.planning.sharding import Ints

# PyTorch indexes rows of signed integers alone.
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def select(x: torch.Tensor, index: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """`torch.index_select` of any dtype, of an index on any device."""
    index = index.to(x.device)
    if x.dtype not in _SIGNED:  # a view as another dtype would end the gradient
        return x.index_select(dim, index)
    return x.view(_SIGNED[x.dtype]).index_select(dim, index).view(x.dtype)


class RowIndex(NamedTuple):
    """Rows in a given order: a slice where they are consecutive, else an int64 index."""

    rows: slice | torch.Tensor

    @classmethod
    def of(cls, rows: Ints, device: torch.device) -> RowIndex:
        """rows: (n,) row numbers; the index is for tensors on `device`."""
        if len(rows) and (np.diff(rows) == 1).all():
            return cls(slice(int(rows[0]), int(rows[-1]) + 1))
        return cls(torch.from_numpy(rows).to(device))

    def part(self, begin: int, end: int) -> RowIndex:
        """Rows [begin, end) of the index."""
        if isinstance(self.rows, slice):
            return RowIndex(slice(self.rows.start + begin, self.rows.start + end))
        return RowIndex(self.rows[begin:end])

    def gather(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Copies the rows from x (tokens, h, d) to out (n, h, d)."""
        if isinstance(self.rows, slice):
            out.copy_(x[self.rows])
        else:
            torch.index_select(x, 0, self.rows, out=out)

    def add(self, gradients: torch.Tensor, to: torch.Tensor) -> None:
        """Adds (n, ...) to the rows of `to` (tokens, ...)."""
        if isinstance(self.rows, slice):
            to[self.rows].add_(gradients)
        else:
            to.index_add_(0, self.rows, gradients)
