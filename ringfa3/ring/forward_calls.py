"""Which forward call a backward call belongs to."""

from __future__ import annotations

import torch
from torch.multiprocessing.reductions import StorageWeakRef


class ForwardCalls:
    """Numbers of forward calls, by the memory of the LSE that they returned.

    The LSE passes through checkpoints and compiled graphs, where a number among the arguments would
    become a constant. Its number is lost where hooks move saved tensors to other memory.
    """

    def __init__(self) -> None:
        self._numbers: dict[int, tuple[StorageWeakRef, int]] = {}
        self._limit = 64  # entries, after which those of freed memory are dropped

    def add(self, lse: torch.Tensor, number: int) -> None:
        if len(self._numbers) >= self._limit:
            for key in [k for k, (memory, _) in self._numbers.items() if _freed(memory)]:
                del self._numbers[key]
            self._limit = 64 + 2 * len(self._numbers)
        memory = StorageWeakRef(lse.untyped_storage())  # type: ignore[no-untyped-call]
        self._numbers[memory.cdata] = memory, number  # no other memory has its `cdata` meanwhile

    def number(self, lse: torch.Tensor) -> int:
        """The number of the call that returned this LSE; 0 if it is unknown."""
        found = self._numbers.get(lse.untyped_storage()._cdata)
        return 0 if found is None or _freed(found[0]) else found[1]


def _freed(memory: StorageWeakRef) -> bool:
    return bool(memory.expired())  # type: ignore[no-untyped-call]
