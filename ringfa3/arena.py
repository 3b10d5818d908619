"""The memory of a context group on one host: a region that every rank can address, and more.

Of PyTorch's symmetric memory only `empty`, `rendezvous` and `buffer_ptrs` are used. One region
serves all calls and layers; it grows where a call needs more, on all ranks in the same call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from ringfa3.schedule import Buffer, Purpose, Word

SHARED = (Buffer.SRC, Buffer.D)
ALIGNMENT = 1 << 21  # bytes, of slots: pages of the device
SLOTS = 2

Gather = Callable[[str], Sequence[str]]  # a line of every rank; returns when all have said theirs


class Arena:
    """Buffers and words of one rank, and where those of its peers are.

    The region: a header with the words, behind them one that is always 1; then SRC and D, two
    slots each. IN and EARLY are this rank's alone.
    """

    def __init__(
        self, group_name: str, rank: int, world: int, device: torch.device, gather: Gather
    ) -> None:
        self.group_name, self.rank, self.world, self.device = group_name, rank, world, device
        self.gather = gather
        self.num_words = world * len(Purpose) * 2
        self._header = _rounded(4 * (self.num_words + 1), ALIGNMENT)
        self._capacity = dict.fromkeys(Buffer, 0)  # bytes of a slot
        self._own: dict[Buffer, torch.Tensor] = {}
        self._handle: object = None  # keeps the peers' memory mapped

    def reserve(self, needed: Mapping[Buffer, int]) -> None:
        """Makes slots at least so large, in bytes. All ranks ask for the same in the same call.

        Growing waits for this device, and loses what the buffers held.

        Raises:
            RuntimeError: on all ranks, if one has no room.
        """
        if all(size <= self._capacity[buffer] for buffer, size in needed.items()):
            return
        torch.cuda.synchronize(self.device)
        problem = ""
        try:
            capacity = {
                b: max(size, _rounded(needed.get(b, 0), ALIGNMENT))
                for b, size in self._capacity.items()
            }
            region = self._allocate(capacity)
        except RuntimeError as error:
            problem = str(error).strip().split("\n")[0]
        for rank, said in enumerate(self.gather(problem)):
            if said:
                raise RuntimeError(f"rank {rank} of the group has no room for the arena: {said}")
        self._meet(region)  # nobody uses the old one any more
        self._capacity = capacity

    def _allocate(self, capacity: Mapping[Buffer, int]) -> torch.Tensor:
        import torch.distributed._symmetric_memory as symm_mem

        sizes = [SLOTS * capacity[buffer] for buffer in SHARED]
        region = symm_mem.empty(self._header + sum(sizes), dtype=torch.uint8, device=self.device)
        region[: self._header].zero_()
        region[4 * self.num_words] = 1  # little-endian, as the device
        for buffer in set(Buffer) - set(SHARED):
            self._own[buffer] = torch.empty(
                SLOTS * capacity[buffer], dtype=torch.uint8, device=self.device
            )
        torch.cuda.synchronize(self.device)
        return region

    def _meet(self, region: torch.Tensor) -> None:
        import torch.distributed._symmetric_memory as symm_mem

        handle = symm_mem.rendezvous(region, self.group_name)  # type: ignore[arg-type]
        pointers = list(handle.buffer_ptrs)
        # a tensor may lie behind the start of what is mapped
        offsets = self.gather(str(region.data_ptr() - pointers[self.rank]))
        self._base = [p + int(offset) for p, offset in zip(pointers, offsets, strict=True)]
        self._region, self._handle = region, handle

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
        before = SLOTS * self._capacity[Buffer.SRC] if buffer is Buffer.D else 0
        return self._header + before + slot * self._capacity[buffer]

    def word(self, word: Word) -> int:
        """Address of a word, in its receiver's memory."""
        index = (word.sender * len(Purpose) + word.purpose) * 2 + word.parity
        return self._base[word.receiver] + 4 * index

    @property
    def words(self) -> int:
        """Address of this rank's words, `num_words` of them."""
        return self._base[self.rank]

    @property
    def one(self) -> int:
        """Address of a word of this rank that is always 1."""
        return self.words + 4 * self.num_words


def _rounded(size: int, to: int) -> int:
    return -(-size // to) * to
