"""The memory of one forward and backward, as the GPU itself counts it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ringfa3.bench.common.comparison import release_memory


@dataclass(frozen=True)
class MemoryUse:
    """Bytes beyond the inputs: at the peak of a call, and of these what remains after it."""

    peak: int
    retained: int


def used(device: torch.device) -> int:
    """Bytes of a GPU in use: by the caching allocator, IPC memory, NCCL and all others."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free


class MemoryMeter:
    """Measures the calls of several implementations on one device.

    What an implementation retains between calls (IPC memory that only grows) counts in all its
    later calls. The caching allocator returns nothing to the driver during a call, so its size at
    the end is its peak.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._retained: dict[str, int] = {}

    def measure(self, name: str, call: Callable[[], object]) -> MemoryUse:
        """Measures a call whose inputs are allocated. Runs it twice, and measures the second
        run."""
        release_memory(self.device)
        first = used(self.device)
        call()
        release_memory(self.device)
        retained = self._retained.get(name, 0) + max(0, used(self.device) - first)
        before = used(self.device)
        call()
        torch.cuda.synchronize(self.device)
        peak = used(self.device) - before
        release_memory(self.device)
        self._retained[name] = retained + max(0, used(self.device) - before)
        return MemoryUse(retained + peak, self._retained[name])

    def reset(self, name: str) -> None:
        """Do not count what `name` retains at this point."""
        self._retained[name] = 0
