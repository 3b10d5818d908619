"""If this fails, a group that is made again reads what an earlier one left. The rendezvous of a
group on a store that other groups have used."""

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


def _rendezvous(
    store: dist.Store, late: int = -1, absent: int = -1, timeout_s: float = 5.0
) -> list:
    """The store of each rank, or its error."""
    results: list = [None] * WORLD

    def enter(rank: int) -> None:
        if rank == late:
            time.sleep(0.1)
        try:
            results[rank] = rendezvous(store, rank, WORLD, timeout_s)
        except AbsentError as error:
            results[rank] = error

    threads = [
        threading.Thread(target=enter, args=(rank,)) for rank in range(WORLD) if rank != absent
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.parametrize("late", [0, 1, 2])
def test_all_ranks_get_the_same_unused_part_of_the_store(late: int) -> None:
    """Whichever rank is late, although earlier rendezvous left names, answers and lists there."""
    store = dist.HashStore()
    for number in range(5):
        stores = _rendezvous(store, late)
        for rank, part in enumerate(stores):
            assert not part.check(["key", "here/0", "here/1", "here/2"]), (number, rank)
        for rank, part in enumerate(stores):
            part.set(f"here/{rank}", b"")
        for part in stores:
            assert part.check([f"here/{rank}" for rank in range(WORLD)])
            part.set("key", str(number))


@pytest.mark.parametrize("before", [0, 1])
@pytest.mark.parametrize("absent", [0, 1, 2])
def test_an_absent_rank_is_named(absent: int, before: int) -> None:
    store = dist.HashStore()
    for _ in range(before):
        _rendezvous(store)
    results = _rendezvous(store, absent=absent, timeout_s=0.2)
    for rank in set(range(WORLD)) - {absent}:
        assert isinstance(results[rank], AbsentError)
        assert results[rank].ranks == [absent]
        assert str(results[rank]) == f"rank {absent} did not join within 0.2 s: see that rank's log"


def _again(group: dist.ProcessGroup) -> list[str]:
    """Ring calls of a group that is made four times on one store, which keeps its keys."""
    rank, outcomes = dist.get_rank(group), []
    for life in range(4):
        for lengths in ([40 + life, 1, 109], [7, 90 - life]):
            plan = plan_context(cumulative(lengths), group)
            x = torch.ones(plan.local_tokens, 2, 8, requires_grad=True)
            if life == 2 and rank == 1:
                time.sleep(0.3)  # the others read before this rank writes
            wrong = x[1:] if life == 1 and rank == 2 else x
            try:
                ring_attn_func(wrong, wrong, wrong, plan).sum().backward()
                outcomes.append("right")
            except ValueError as problem:
                outcomes.append(str(problem).split(":")[0])
        dist.barrier()
        RingGroup.of(group).close()
    return outcomes


def test_a_group_may_be_made_anew_on_the_same_store() -> None:
    """Each life has other settings, and in the second a rank is wrong. No life reads old keys."""
    expected = ["right"] * 2 + ["rank 2"] * 2 + ["right"] * 4
    assert sacrifice(3, 20.0, _again) == [expected] * 3
