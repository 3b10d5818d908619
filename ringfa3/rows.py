"""Rows of a rank's tokens that leave it for other ranks, and come home as gradients."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from ringfa3.layout import Ints


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
    rows of `out` do not follow on each other."""
    if _wide(x) and _wide(out):
        x, out = x.view(torch.complex128), out.view(torch.complex128)
    out.copy_(x)


def _wide(x: torch.Tensor) -> bool:
    """Whether it is made of elements of 16 bytes."""
    *strides, last = x.stride()
    many = 16 // x.element_size()
    whole = not any(n % many for n in (*strides, x.shape[-1], x.storage_offset()))
    return last == 1 and whole and x.data_ptr() % 16 == 0
