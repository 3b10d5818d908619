"""Rows of a rank's tokens that leave it for other ranks, and come home as gradients."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from ringfa3.planning.sharding import Ints

WIDE = torch.complex128


class OwnRows(NamedTuple):
    """In the order in which they lie in buffers: a run of rows is a slice, others an index."""

    rows: slice | torch.Tensor

    @classmethod
    def of(cls, own: Ints, device: torch.device) -> OwnRows:
        """own: (n,) numbers of rows."""
        if len(own) and (np.diff(own) == 1).all():
            return cls(slice(int(own[0]), int(own[-1]) + 1))
        return cls(torch.from_numpy(own).to(device))

    def part(self, begin: int, end: int) -> OwnRows:
        """Those that are rows [begin, end) of a buffer."""
        if isinstance(self.rows, slice):
            return OwnRows(slice(self.rows.start + begin, self.rows.start + end))
        return OwnRows(self.rows[begin:end])

    def target(self, out: torch.Tensor) -> torch.Tensor:
        """`out` for many calls of `read`."""
        return widest(out) if isinstance(self.rows, slice) else out

    def read(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Copies them from x (tokens, h, d) to out (n, h, d)."""
        if isinstance(self.rows, slice):
            copy_rows(x[self.rows], out)
        else:
            torch.index_select(x, 0, self.rows, out=out)

    def add(self, gradients: torch.Tensor, to: torch.Tensor) -> None:
        """Adds (n, ...) to the rows of (tokens, ...)."""
        if isinstance(self.rows, slice):
            to[self.rows].add_(gradients)
        else:
            to.index_add_(0, self.rows, gradients)


def copy_rows(x: torch.Tensor, out: torch.Tensor) -> None:
    """Copies (t, h, d), 16 bytes at a time where it can: a GPU moves 2 bytes at a time else, for
    rows of `out`, which may be `widest` already, do not follow on each other."""
    if out.dtype is not WIDE:
        out = widest(out)
    if out.dtype is WIDE:
        x = widest(x)
        if x.dtype is not WIDE:
            out = out.view(x.dtype)
    out.copy_(x)


def widest(x: torch.Tensor) -> torch.Tensor:
    """Its memory in elements of 16 bytes, where it is made of such; else `x` itself."""
    token_stride, head_stride, last = x.stride()
    whole = (token_stride | head_stride | x.shape[2]) * x.element_size() % 16 == 0
    begins = x.data_ptr() % 16 == 0 and x.storage_offset() * x.element_size() % 16 == 0
    return x.view(WIDE) if last == 1 and whole and begins else x
