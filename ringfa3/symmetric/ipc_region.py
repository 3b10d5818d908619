"""Device memory of one rank that the other processes of its host have mapped.

It is the driver's own allocation, known to the peers by a handle between processes: nothing of it
depends on what else a process shares with whom.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch

from ringfa3.symmetric import cuda_driver
from ringfa3.symmetric.cuda_driver import DriverError


class Region:
    """Bytes on the current device, uninitialised. Freed with the last tensor that views them."""

    def __init__(self, size: int, device: torch.device) -> None:
        """Raises DriverError: the device has no room, also after PyTorch has freed its cache."""
        self.size, self.device = size, device
        try:
            self.address = cuda_driver.allocate(size)
        except DriverError:
            torch.cuda.empty_cache()
            self.address = cuda_driver.allocate(size)
        self._mapped: list[int] = []
        end = weakref.finalize(
            self, _release, self.address, self._mapped, cuda_driver.free, cuda_driver.detach
        )
        end.atexit = False

    @property
    def handle(self) -> str:
        """What a peer needs to map it."""
        return cuda_driver.share(self.address)

    def map(self, handles: Sequence[str], rank: int) -> list[int]:
        """Maps the peers' regions, each handle once, and gives the addresses of all, by rank.

        Raises DriverError: one cannot be reached from here.
        """
        there: dict[str, int] = {}
        for peer, handle in enumerate(handles):
            if peer != rank and handle not in there:
                there[handle] = cuda_driver.attach(handle)
                self._mapped.append(there[handle])
        return [self.address if p == rank else there[h] for p, h in enumerate(handles)]

    def leave(self) -> None:
        """Unmaps the peers' regions, which they may free then. This device has done with them."""
        while self._mapped:
            cuda_driver.detach(self._mapped.pop())

    @property
    def tensor(self) -> torch.Tensor:
        """Its bytes, uint8."""
        return torch.as_tensor(self, device=self.device)

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        memory = {"data": (self.address, False), "shape": (self.size,), "typestr": "|u1"}
        return {**memory, "version": 2}


def _release(
    address: int,
    mapped: Sequence[int],
    free: Callable[[int], None],
    detach: Callable[[int], None],
) -> None:
    for end, place in (*((detach, peer) for peer in mapped), (free, address)):
        with suppress(DriverError):  # the device may be lost
            end(place)
