"""How the members of a group meet, on a store that others have used before."""

from __future__ import annotations

import threading
import time

import pytest
import torch
import torch.distributed as dist

from ringfa3 import plan_context, ring_attn_func
from ringfa3.ring.group import RingGroup
from ringfa3.ring.process_group import AbsentError, rendezvous
from tests.support.dense import cumulative
from tests.support.ranks import sacrifice

WORLD = 3


def _meet(store: dist.Store, late: int = -1, absent: int = -1, timeout_s: float = 5.0) -> list:
    """What each rank has found, or its error."""
    found: list = [None] * WORLD

    def enter(rank: int) -> None:
        if rank == late:
            time.sleep(0.1)
        try:
            found[rank] = rendezvous(store, rank, WORLD, timeout_s)
        except AbsentError as error:
            found[rank] = error

    threads = [
        threading.Thread(target=enter, args=(rank,)) for rank in range(WORLD) if rank != absent
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize("late", [0, 1, 2])
def test_all_ranks_get_one_part_of_the_store_that_nobody_had_before(late: int) -> None:
    """Whoever comes late, though the meetings before have left their names, answers and lists."""
    store = dist.HashStore()
    for meeting in range(5):
        stores = _meet(store, late)
        for rank, its in enumerate(stores):
            assert not its.check(["key", "here/0", "here/1", "here/2"]), (meeting, rank)
        for rank, its in enumerate(stores):
            its.set(f"here/{rank}", b"")
        for its in stores:
            assert its.check([f"here/{rank}" for rank in range(WORLD)])
            its.set("key", str(meeting))


@pytest.mark.parametrize("before", [0, 1])
@pytest.mark.parametrize("absent", [0, 1, 2])
def test_who_does_not_come_is_named(absent: int, before: int) -> None:
    store = dist.HashStore()
    for _ in range(before):
        _meet(store)
    found = _meet(store, absent=absent, timeout_s=0.2)
    for rank in set(range(WORLD)) - {absent}:
        assert isinstance(found[rank], AbsentError)
        assert found[rank].ranks == [absent]
        assert str(found[rank]) == f"rank {absent} did not join within 0.2 s"


def _again(group: dist.ProcessGroup) -> list[str]:
    """Ring calls in four lives of a group: what it has left in its store is all that stays."""
    rank, said = dist.get_rank(group), []
    for life in range(4):
        for lengths in ([40 + life, 1, 109], [7, 90 - life]):
            plan = plan_context(cumulative(lengths), group)
            x = torch.ones(plan.local_tokens, 2, 8, requires_grad=True)
            if life == 2 and rank == 1:
                time.sleep(0.3)  # the others read before this one writes
            wrong = x[1:] if life == 1 and rank == 2 else x
            try:
                ring_attn_func(wrong, wrong, wrong, plan).sum().backward()
                said.append("right")
            except ValueError as problem:
                said.append(str(problem).split(":")[0])
        dist.barrier()
        ended = RingGroup._known.pop(group)
        for transport in ended._transports.values():
            dist.destroy_process_group(transport.p2p)  # type: ignore[attr-defined]
        ended.close()
    return said


def test_a_group_may_be_made_anew_on_the_same_store() -> None:
    """Each life has settings of its own; in the second one a rank is wrong. None reads old keys."""
    expected = ["right"] * 2 + ["rank 2"] * 2 + ["right"] * 4
    assert sacrifice(3, 20.0, _again) == [expected] * 3
