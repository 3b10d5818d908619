"""Rows of a tensor by number: read into a buffer, and gradients added back to them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from ringfa3.planning.sharding import Ints

BYTES_16 = torch.complex128  # the dtype with elements of 16 bytes


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
            copy_rows(x[self.rows], out)
        else:
            torch.index_select(x, 0, self.rows, out=out)

    def add(self, gradients: torch.Tensor, to: torch.Tensor) -> None:
        """Adds (n, ...) to the rows of `to` (tokens, ...)."""
        if isinstance(self.rows, slice):
            to[self.rows].add_(gradients)
        else:
            to.index_add_(0, self.rows, gradients)


def copy_rows(x: torch.Tensor, out: torch.Tensor) -> None:
    """Copies (t, h, d), where possible in elements of 16 bytes.

    Rows of a buffer with K and V side by side are not contiguous, and a GPU copies those one
    element at a time: 2 bytes of bfloat16.
    """
    wide, wide_out = view_16_bytes(x), view_16_bytes(out)
    if wide.dtype is wide_out.dtype:
        x, out = wide, wide_out
    out.copy_(x)


def view_16_bytes(x: torch.Tensor) -> torch.Tensor:
    """`x` (t, h, d) viewed in elements of 16 bytes; `x` itself where its strides forbid it."""
    token_stride, head_stride, last = x.stride()
    whole = (token_stride | head_stride | x.shape[2]) * x.element_size() % 16 == 0
    begins = x.data_ptr() % 16 == 0 and x.storage_offset() * x.element_size() % 16 == 0
    return x.view(BYTES_16) if last == 1 and whole and begins else x
