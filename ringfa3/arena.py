"""The memory of a context group on one host: a region that every rank can address, and more.

Of PyTorch's symmetric memory only `empty`, `rendezvous` and `buffer_ptrs` are used. One region
serves all calls and layers; it grows where a call needs more, on all ranks in the same call.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from ringfa3.operations import Buffer
from ringfa3.words import Gather, together

SHARED = (Buffer.SRC, Buffer.D)
# Multicast is for collectives, and some machines refuse to set it up. Who wants it for symmetric
# memory of their own sets the variable to 0.
NO_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
ALIGNMENT = 1 << 21  # bytes, of slots: pages of the device
SLOTS = {Buffer.SRC: 2, Buffer.IN: 2, Buffer.D: 2, Buffer.EARLY: 1, Buffer.ALL: 1}


class Arena:
    """Buffers of one rank, and where those of its peers are.

    SRC and D lie in the region, slot behind slot. The others are this rank's alone; a call uses
    either IN or ALL, and they have one memory.
    """

    def __init__(self, group_name: str, rank: int, device: torch.device, gather: Gather) -> None:
        self.group_name, self.rank, self.device, self.gather = group_name, rank, device, gather
        self._capacity = dict.fromkeys(Buffer, 0)  # bytes of a slot
        self._own: dict[Buffer, torch.Tensor] = {}
        self._kept: list[object] = []

    def reserve(self, needed: Mapping[Buffer, int]) -> bool:
        """Makes slots at least so large, in bytes. All ranks ask for the same in the same call.

        Whether they have grown, and lie elsewhere. Growing waits for this device, and loses what
        the buffers held.

        Raises:
            RuntimeError: on all ranks, if one has no room.
        """
        if self.holds(needed):
            return False
        torch.cuda.synchronize(self.device)
        capacity = {
            b: max(size, _rounded(needed.get(b, 0), ALIGNMENT))
            for b, size in self._capacity.items()
        }
        # the device is idle, so the peers have taken what they wanted of the old one
        together(self.gather, "room for the arena", lambda: self._allocate(capacity))
        offsets = together(self.gather, "mapping the arena", self._meet)
        self._base = [p + int(offset) for p, offset in zip(self._mapped, offsets, strict=True)]
        self._capacity = capacity
        return True

    def holds(self, needed: Mapping[Buffer, int]) -> bool:
        """Whether slots are so large, in bytes."""
        return all(size <= self._capacity[buffer] for buffer, size in needed.items())

    def keep(self) -> None:
        """What has been handed out is never freed, even if it grows: graphs have its addresses."""
        self._kept.append((self._region, self._handle, *self._own.values()))

    def _allocate(self, capacity: Mapping[Buffer, int]) -> None:
        import torch.distributed._symmetric_memory as symm_mem

        os.environ.setdefault(NO_MULTICAST, "1")  # PyTorch reads it whenever it makes or maps one
        size = {buffer: SLOTS[buffer] * capacity[buffer] for buffer in Buffer}
        shared = sum(size[buffer] for buffer in SHARED)
        self._region = symm_mem.empty(shared, dtype=torch.uint8, device=self.device)
        for buffers in ((Buffer.IN, Buffer.ALL), (Buffer.EARLY,)):
            most = max(size[buffer] for buffer in buffers)
            memory = torch.empty(most, dtype=torch.uint8, device=self.device)
            self._own |= dict.fromkeys(buffers, memory)

    def _meet(self) -> int:
        """Maps the peers' regions; gives how far this rank's lies behind the start of its map."""
        import torch.distributed._symmetric_memory as symm_mem

        self._handle = symm_mem.rendezvous(self._region, self.group_name)  # type: ignore[arg-type]
        self._mapped = list(self._handle.buffer_ptrs)
        return self._region.data_ptr() - self._mapped[self.rank]

    def local(self, buffer: Buffer, slot: int) -> torch.Tensor:
        """A slot of this rank, uint8."""
        size = self._capacity[buffer]
        if buffer in self._own:
            return self._own[buffer][slot * size : (slot + 1) * size]
        begin = self._offset(buffer, slot)
        return self._region[begin : begin + size]

    def address(self, rank: int, buffer: Buffer, slot: int) -> int:
        if buffer in self._own:
            assert rank == self.rank
            return self._own[buffer].data_ptr() + slot * self._capacity[buffer]
        return self._base[rank] + self._offset(buffer, slot)

    def _offset(self, buffer: Buffer, slot: int) -> int:
        before = SLOTS[Buffer.SRC] * self._capacity[Buffer.SRC] if buffer is Buffer.D else 0
        return before + slot * self._capacity[buffer]


def _rounded(size: int, to: int) -> int:
    return -(-size // to) * to
