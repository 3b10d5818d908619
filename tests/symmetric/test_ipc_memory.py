"""If this fails, a ring maps memory of another group, or frees memory in use. A group's shared
memory on stand-ins: growth, mappings of peers, and what is never freed."""

from __future__ import annotations

import gc
import threading
from unittest import mock

import pytest
import torch

from ringfa3.errors import StepError
from ringfa3.symmetric.cuda_driver import DriverError
from ringfa3.symmetric.ipc_memory import SHARED, IpcMemory
from ringfa3.symmetric.stream_ops import Buffer
from tests.support.fake_cuda import Ranks
from tests.support.fake_group import FakeGroup

CPU = torch.device("cpu")


def _fill(memory: IpcMemory, value: int, world: int) -> None:
    for buffer in SHARED:
        for slot in range(2 if buffer is Buffer.KV_SHARED else min(2, world - 1)):
            memory.local(buffer, slot).fill_(value)


def _peer(memory: IpcMemory, ranks: Ranks, rank: int, buffer: Buffer, slot: int) -> int:
    """The first byte of another rank's slot, by the address that this rank uses."""
    address = memory.address(rank, buffer, slot)
    base, memory = next((b, m) for b, m in ranks.cuda.memory.items() if b <= address < b + len(m))
    return int(memory[address - base])


def test_peers_are_mapped_as_it_grows_and_nothing_is_left_mapped() -> None:
    """Each rank has one allocation, before and after; its peers read there what it has written."""
    ranks = Ranks(3)

    def grow(group: FakeGroup) -> IpcMemory:
        memory = IpcMemory(group.rank, group.world, CPU, group.gather)
        for size in (100, 1 << 22, 5):
            memory.reserve(dict.fromkeys(Buffer, size))
            assert memory.holds(dict.fromkeys(Buffer, size))
            _fill(memory, group.rank, group.world)
            group.gather("")
            assert len(ranks.cuda.memory) == 3
            assert len(ranks.cuda.attached) == 6
            for peer in range(3):
                for buffer in SHARED:
                    assert _peer(memory, ranks, peer, buffer, 1) == peer
            group.gather("")
        return memory

    memories = ranks.run(grow)
    assert not ranks.cuda.torn
    memories.clear()
    gc.collect()
    assert not ranks.cuda.memory
    assert not ranks.cuda.attached


def test_all_ranks_raise_if_one_has_no_room_and_a_later_try_may_succeed() -> None:
    """PyTorch's cache counts as room: after a failure it is freed, and the second try succeeds."""
    ranks = Ranks(2)
    real, failures = ranks.cuda.allocate, {"left": 0}

    def allocate(size: int) -> int:
        if threading.current_thread().name == "1" and failures["left"]:
            failures["left"] -= 1
            raise DriverError("cuMemAlloc_v2: CUDA error 2, out of memory")
        return real(size)

    def grow(group: FakeGroup) -> None:
        memory = IpcMemory(group.rank, group.world, CPU, group.gather)
        memory.reserve({Buffer.KV_SHARED: 5})
        group.gather("")
        failures["left"] = 2
        group.gather("")
        with pytest.raises(
            StepError, match="allocating the shared memory failed on rank 1 of the group: cuMem"
        ):
            memory.reserve({Buffer.KV_SHARED: 1 << 24})
        assert not memory.holds({Buffer.KV_SHARED: 1})
        group.gather("")
        assert not ranks.cuda.memory
        failures["left"] = 1
        group.gather("")
        memory.reserve({Buffer.KV_SHARED: 1 << 24})
        _fill(memory, group.rank, group.world)
        group.gather("")
        assert _peer(memory, ranks, 1 - group.rank, Buffer.KV_SHARED, 0) == 1 - group.rank
        group.gather("")

    with (
        mock.patch.object(ranks.cuda, "allocate", allocate),
        mock.patch.object(torch.cuda, "empty_cache"),
    ):
        ranks.run(grow)


def test_pinned_memory_stays_mapped_when_it_grows() -> None:
    ranks = Ranks(2)
    pinned: list[object] = []

    def grow(group: FakeGroup) -> None:
        memory = IpcMemory(group.rank, group.world, CPU, group.gather)
        memory.reserve({Buffer.KV_SHARED: 5, Buffer.KV_RECV: 5})
        memory.pin()
        _fill(memory, group.rank, group.world)
        before = memory.address(1 - group.rank, Buffer.KV_SHARED, 0)
        memory.reserve({Buffer.KV_SHARED: 1 << 24})
        group.gather("")
        assert len(ranks.cuda.memory) == len(ranks.cuda.attached) == 4
        assert ranks.cuda.memory[before][0] == 1 - group.rank
        assert memory.address(1 - group.rank, Buffer.KV_SHARED, 0) != before
        group.gather("")

    with mock.patch("ringfa3.symmetric.ipc_memory._pinned", pinned):
        ranks.run(grow)
    assert len(pinned) == 2
    gc.collect()
    assert len(ranks.cuda.memory) == 2


def test_slots_lie_apart() -> None:
    """Slots that a call uses together, for 2 and 3 ranks; KV_GATHERED covers private buffers."""
    for world in (2, 3):

        def fill(group: FakeGroup) -> None:
            memory = IpcMemory(group.rank, group.world, CPU, group.gather)
            memory.reserve({b: 100 * (b + 1) for b in Buffer})
            blocks = min(2, group.world - 1)
            slots = {
                Buffer.KV_SHARED: 2,
                Buffer.KV_RECV: blocks,
                Buffer.DKV_OUT: blocks,
                Buffer.DKV_SUM: 1,
            }
            used = [(b, i) for b, n in (slots | {Buffer.DKV_RECV: 1}).items() for i in range(n)]
            for value, (buffer, slot) in enumerate(used):
                memory.local(buffer, slot).fill_(value)
            for value, (buffer, slot) in enumerate(used):
                assert (memory.local(buffer, slot) == value).all(), (buffer, slot)
                assert len(memory.local(buffer, slot)) >= 100 * (buffer + 1)
            assert len(memory.local(Buffer.KV_GATHERED, 0)) >= 600
            begins = [memory.local(b, 0).data_ptr() for b in (Buffer.KV_GATHERED, Buffer.KV_RECV)]
            assert begins[0] == begins[1] == memory.address(group.rank, Buffer.KV_GATHERED, 0)
            group.gather("")

        Ranks(world).run(fill)
