"""The memory of one forward and backward, as the device itself counts it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ringfa3.bench.common.comparison import release


@dataclass(frozen=True)
class Held:
    """Bytes beyond the inputs: at the peak of a call, and of them what stays after it."""

    peak: int
    kept: int


def used(device: torch.device) -> int:
    """Bytes of a GPU in use, by whatever: the caching allocator, arenas, NCCL."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free


class Scales:
    """Weighs the calls of several implementations on one device.

    What one of them keeps (an arena that only grows) counts in all its later calls too. The
    caching allocator gives nothing back during a call, so what it holds at the end is its peak.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._kept: dict[str, int] = {}

    def weigh(self, name: str, call: Callable[[], object]) -> Held:
        """Of a call whose inputs are there, and whose like has run; what it returns is let go."""
        release(self.device)
        first = used(self.device)
        call()
        release(self.device)
        kept = self._kept.get(name, 0) + max(0, used(self.device) - first)
        before = used(self.device)
        call()
        torch.cuda.synchronize(self.device)
        peak = used(self.device) - before
        release(self.device)
        self._kept[name] = kept + max(0, used(self.device) - before)
        return Held(kept + peak, self._kept[name])

    def tare(self, name: str) -> None:
        """Counts what `name` keeps until now as nothing."""
        self._kept[name] = 0
