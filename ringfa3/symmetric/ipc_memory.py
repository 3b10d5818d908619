"""Device memory of a CP group that every rank of one host can address by CUDA IPC.

This module allocates and maps it. PyTorch's symmetric memory hangs when subgroups rendezvous
(pytorch#196082, repaired by #196350), and its signal pads collide across groups (#192581). Replace
this module by it when the oldest PyTorch that we support has both repairs.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import torch

from ringfa3.errors import StepError
from ringfa3.planning.context_plan import ContextPlan
from ringfa3.symmetric import cuda_driver
from ringfa3.symmetric.cuda_driver import DriverError
from ringfa3.symmetric.signals import Gather, step_on_all_ranks
from ringfa3.symmetric.stream_ops import Buffer, BufferSpec

SHARED = (Buffer.KV_SHARED, Buffer.DKV_OUT)
PRIVATE = (Buffer.KV_RECV, Buffer.DKV_SUM, Buffer.DKV_RECV)
ALIGNMENT = 1 << 21  # bytes, of slots: pages of the device


class IpcAllocation:
    """Bytes on the current device, uninitialised. Freed with the last tensor that views them."""

    def __init__(self, size: int, device: torch.device) -> None:
        """Raises DriverError: no room on the device, even after PyTorch has freed its cache."""
        self.size, self.device = size, device
        try:
            self.address = cuda_driver.allocate(size)
        except DriverError:
            torch.cuda.empty_cache()
            self.address = cuda_driver.allocate(size)
        self._mapped: list[int] = []
        self.free = weakref.finalize(  # now; its tensors are void then
            self, _release, self.address, self._mapped, cuda_driver.free, cuda_driver.ipc_close
        )
        self.free.atexit = False

    @property
    def handle(self) -> str:
        """The IPC handle by which a peer maps it."""
        return cuda_driver.ipc_handle(self.address)

    def map(self, handles: Sequence[str], rank: int) -> list[int]:
        """Maps the peers' allocations, each handle once, and returns all addresses, by rank.

        Raises DriverError: a peer's memory cannot be mapped.
        """
        addresses: dict[str, int] = {}
        for peer, handle in enumerate(handles):
            if peer != rank and handle not in addresses:
                addresses[handle] = cuda_driver.ipc_open(handle)
                self._mapped.append(addresses[handle])
        return [self.address if p == rank else addresses[h] for p, h in enumerate(handles)]

    def unmap(self) -> None:
        """Unmaps the peers' allocations, which may then be freed. This device has finished."""
        while self._mapped:
            cuda_driver.ipc_close(self._mapped.pop())

    @property
    def tensor(self) -> torch.Tensor:
        """Its bytes, uint8."""
        return torch.as_tensor(self, dtype=torch.uint8, device=self.device)

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
    for release, at in (*((detach, peer) for peer in mapped), (free, address)):
        with suppress(DriverError):  # the device may be lost
            release(at)


def _slots(world: int) -> dict[Buffer, int]:
    """The slots of each buffer: two of K/V that the rank publishes, two for blocks of peers."""
    blocks = min(2, world - 1)
    of_blocks = {Buffer.KV_RECV: blocks, Buffer.DKV_OUT: blocks}
    return dict.fromkeys(Buffer, 1) | {Buffer.KV_SHARED: 2} | of_blocks


def _sizes(slots: Mapping[Buffer, int], slot_bytes: Mapping[Buffer, int]) -> tuple[int, int]:
    """Bytes of the shared and of the private allocation."""
    size = {buffer: slots[buffer] * slot_bytes[buffer] for buffer in Buffer}
    private = max(size[Buffer.KV_GATHERED], sum(size[buffer] for buffer in PRIVATE))
    return sum(size[buffer] for buffer in SHARED), private


def ring_bytes(plan: ContextPlan, k: torch.Tensor) -> int:
    """Bytes of both allocations of a rank, for backwards and gathered forwards of a plan, or for
    forwards in hops if gathered rows exceed its kv_budget.

    k: (tokens, hk, d), or a "meta" tensor.
    """
    slot = dict.fromkeys(Buffer, 0)
    gathers = plan.kv_budget is None or plan.kv_exchange.max_rows.gathered <= plan.kv_budget
    for pass_type in ("backward", "gathered" if gathers else "forward"):
        for buffer, size in BufferSpec(plan, pass_type, k).slot_bytes.items():
            slot[buffer] = max(slot[buffer], _rounded(size, ALIGNMENT))
    return sum(_sizes(_slots(plan.world), slot))


class IpcMemory:
    """Buffers of one rank, and the addresses of its peers' shared buffers.

    KV_SHARED and DKV_OUT are in one IPC allocation, slot after slot; the others are private. A
    call uses either KV_GATHERED, or KV_RECV, DKV_SUM and DKV_RECV: these share their memory.

    All calls and layers of a group use the same memory. Where a call needs more, it grows on all
    ranks in that call.
    """

    def __init__(self, rank: int, world: int, device: torch.device, gather: Gather) -> None:
        self.rank, self.device, self.gather = rank, device, gather
        self._slots = _slots(world)
        self._capacity = dict.fromkeys(Buffer, 0)  # bytes of a slot
        self._shared: IpcAllocation | None = None
        self._private: torch.Tensor | None = None
        self._pinned = False  # the present allocations are never freed

    def holds(self, slot_bytes: Mapping[Buffer, int]) -> bool:
        """Whether slots have at least so many bytes."""
        capacity = map(self._capacity.__getitem__, slot_bytes)  # without frames of Python
        return all(map(operator.le, slot_bytes.values(), capacity))

    def reserve(self, slot_bytes: Mapping[Buffer, int]) -> None:
        """Makes slots of at least so many bytes. All ranks pass the same in the same call.

        Where slots are too small, all buffers move and lose their contents. The old memory is freed
        first, so no tensor of `local` may exist.

        Raises:
            StepError: on all ranks, if one has no room. No buffer has any memory then.
        """
        if self.holds(slot_bytes):
            return
        capacity = {
            b: max(size, _rounded(slot_bytes.get(b, 0), ALIGNMENT))
            for b, size in self._capacity.items()
        }
        self._capacity = dict.fromkeys(Buffer, 0)
        torch.cuda.synchronize(self.device)
        step_on_all_ranks(self.gather, "unmapping the shared memory", self._unmap)
        # the peers have copied all they need from the old memory, and unmapped it
        try:
            handles = step_on_all_ranks(
                self.gather, "allocating the shared memory", lambda: self._allocate(capacity)
            )
            step_on_all_ranks(self.gather, "mapping the shared memory", lambda: self._map(handles))
        except StepError:
            step_on_all_ranks(self.gather, "unmapping the shared memory", self._unmap)
            self._shared = self._private = None
            raise
        self._capacity = capacity

    def unmap(self) -> None:
        """Unmaps the peers' memory, after the last call. This device has finished."""
        self._capacity = dict.fromkeys(Buffer, 0)
        self._unmap()

    def free(self) -> None:
        """Frees this rank's memory, once all ranks have unmapped it; pinned memory stays."""
        if self._shared is not None and not self._pinned:
            self._shared.free()
        self._shared = self._private = None

    def pin(self) -> None:
        """Keeps the present allocations mapped and allocated for ever, even when the buffers move:
        a CUDA graph, an abandoned stream or a peer that still runs may use their addresses."""
        if not self._pinned:
            _pinned.append((self._shared, self._private))
        self._pinned = True

    def _unmap(self) -> None:
        if self._shared is not None and not self._pinned:
            self._shared.unmap()

    def _allocate(self, capacity: Mapping[Buffer, int]) -> str:
        """Returns the handle of this rank's shared allocation."""
        self._shared = self._private = None
        self._pinned = False
        shared, private = _sizes(self._slots, capacity)
        self._shared = IpcAllocation(shared, self.device)
        self._private = torch.empty(private, dtype=torch.uint8, device=self.device)
        return self._shared.handle

    def _map(self, handles: Sequence[str]) -> None:
        assert self._shared is not None
        self._base = self._shared.map(handles, self.rank)

    def local(self, buffer: Buffer, slot: int) -> torch.Tensor:
        """A slot of this rank, uint8."""
        assert self._shared is not None
        assert self._private is not None
        memory = self._shared.tensor if buffer in SHARED else self._private
        begin = self._offset(buffer, slot)
        return memory[begin : begin + self._capacity[buffer]]

    def address(self, rank: int, buffer: Buffer, slot: int) -> int:
        if buffer in SHARED:
            return self._base[rank] + self._offset(buffer, slot)
        assert rank == self.rank
        assert self._private is not None
        return self._private.data_ptr() + self._offset(buffer, slot)

    def _offset(self, buffer: Buffer, slot: int) -> int:
        """Bytes from the start of the allocation to a slot."""
        before = 0
        for other in SHARED if buffer in SHARED else PRIVATE:
            if buffer in (other, Buffer.KV_GATHERED):
                break
            before += self._slots[other] * self._capacity[other]
        return before + slot * self._capacity[buffer]


_pinned: list[tuple[IpcAllocation | torch.Tensor | None, ...]] = []


def _rounded(size: int, to: int) -> int:
    return -(-size // to) * to
