"""The memory of a context group on one host: a region that every rank can address, and more.

One region serves all calls and layers; it grows where a call needs more, on all ranks in the same
call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ringfa3.errors import StepError
from ringfa3.symmetric.ipc_region import Region
from ringfa3.symmetric.signals import Gather, together
from ringfa3.symmetric.stream_ops import Buffer

SHARED = (Buffer.SRC, Buffer.D)
APART = (Buffer.IN, Buffer.SUM, Buffer.COME)
ALIGNMENT = 1 << 21  # bytes, of slots: pages of the device


class Arena:
    """Buffers of one rank, and where those of its peers are.

    SRC and D lie in the region, slot behind slot. The others are this rank's alone; a call uses
    either ALL, or IN, SUM and COME, and they have one memory.
    """

    def __init__(self, rank: int, world: int, device: torch.device, gather: Gather) -> None:
        self.rank, self.device, self.gather = rank, device, gather
        blocks = min(2, world - 1)  # of peers at a time
        self._slots = dict.fromkeys(Buffer, 1) | {
            Buffer.SRC: 2,
            Buffer.IN: blocks,
            Buffer.D: blocks,
        }
        self._capacity = dict.fromkeys(Buffer, 0)  # bytes of a slot
        self._region: Region | None = None
        self._keeps = False  # what there is now
        self._own: torch.Tensor | None = None

    def holds(self, needed: Mapping[Buffer, int]) -> bool:
        """Whether slots are so large, in bytes."""
        return all(size <= self._capacity[buffer] for buffer, size in needed.items())

    def reserve(self, needed: Mapping[Buffer, int]) -> None:
        """Makes slots at least so large, in bytes. All ranks ask for the same in the same call.

        Where they do not hold so much they lie elsewhere from then on, and what they held is lost.
        No tensor of `local` may be left then: the memory from before is freed first.

        Raises:
            StepError: on all ranks, if one has no room. The arena is empty then.
        """
        if self.holds(needed):
            return
        capacity = {
            b: max(size, _rounded(needed.get(b, 0), ALIGNMENT))
            for b, size in self._capacity.items()
        }
        self._capacity = dict.fromkeys(Buffer, 0)
        torch.cuda.synchronize(self.device)
        together(self.gather, "leaving the arena", self._leave)
        # the peers have taken what they wanted of the memory from before, and unmapped it
        try:
            handles = together(self.gather, "room for the arena", lambda: self._allocate(capacity))
            together(self.gather, "mapping the arena", lambda: self._map(handles))
        except StepError:
            together(self.gather, "leaving the arena", self._leave)
            self._region = None
            self._own = None
            raise
        self._capacity = capacity

    def keep(self) -> None:
        """What there is now is never freed, nor unmapped, even if the arena grows or ends: a graph,
        a stream that is left to itself, or a peer that has not ended has its addresses."""
        if not self._keeps:
            _kept.append((self._region, self._own))
        self._keeps = True

    def _leave(self) -> None:
        if self._region is not None and not self._keeps:
            self._region.leave()

    def _allocate(self, capacity: Mapping[Buffer, int]) -> str:
        """Gives the handle of this rank's region."""
        self._region, self._keeps = None, False
        self._own = None
        size = {buffer: self._slots[buffer] * capacity[buffer] for buffer in Buffer}
        self._region = Region(sum(size[buffer] for buffer in SHARED), self.device)
        own = max(size[Buffer.ALL], sum(size[buffer] for buffer in APART))
        self._own = torch.empty(own, dtype=torch.uint8, device=self.device)
        return self._region.handle

    def _map(self, handles: Sequence[str]) -> None:
        assert self._region is not None
        self._base = self._region.map(handles, self.rank)

    def local(self, buffer: Buffer, slot: int) -> torch.Tensor:
        """A slot of this rank, uint8."""
        assert self._region is not None
        assert self._own is not None
        memory = self._region.tensor if buffer in SHARED else self._own
        begin = self._offset(buffer, slot)
        return memory[begin : begin + self._capacity[buffer]]

    def address(self, rank: int, buffer: Buffer, slot: int) -> int:
        if buffer in SHARED:
            return self._base[rank] + self._offset(buffer, slot)
        assert rank == self.rank
        assert self._own is not None
        return self._own.data_ptr() + self._offset(buffer, slot)

    def _offset(self, buffer: Buffer, slot: int) -> int:
        """Of a slot in its memory."""
        before = 0
        for behind in SHARED if buffer in SHARED else APART:
            if buffer in (behind, Buffer.ALL):
                break
            before += self._slots[behind] * self._capacity[behind]
        return before + slot * self._capacity[buffer]


_kept: list[tuple[Region | torch.Tensor | None, ...]] = []


def _rounded(size: int, to: int) -> int:
    return -(-size // to) * to
