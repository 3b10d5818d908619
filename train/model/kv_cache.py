"""The KV cache of one attention layer, for generation."""

from __future__ import annotations

import torch
from torch import Tensor


class KVCache:
    """Keys and values of up to ``capacity`` tokens, in the dtype of the first call."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.length = capacity, 0
        self._stored: tuple[Tensor, Tensor] | None = None

    def append(self, k_TKC: Tensor, v_TKC: Tensor) -> tuple[Tensor, Tensor]:
        """Store the keys and values of the next T tokens, (T, heads, channels) each.

        Returns views of all stored keys and values. Raises ``ValueError`` if they exceed
        ``capacity``.
        """
        start, stop = self.length, self.length + len(k_TKC)
        if stop > self.capacity:
            raise ValueError(f"a cache of {self.capacity} tokens cannot hold {stop}")
        if self._stored is None:
            shape = (self.capacity, *k_TKC.shape[1:])
            self._stored = (k_TKC.new_empty(shape), v_TKC.new_empty(shape))
        with torch.no_grad():
            for stored, new in zip(self._stored, (k_TKC, v_TKC), strict=True):
                stored[start:stop] = new
        self.length = stop
        k, v = self._stored
        return k[:stop], v[:stop]
