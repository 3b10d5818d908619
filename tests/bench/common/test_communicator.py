"""Ranks that measure together, on processes that talk over gloo."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from ringfa3.bench.common import communicator
from ringfa3.bench.common.communicator import Communicator, RankFailedError, RankLostError
from ringfa3.bench.common.timing import WallClock, paired
from tests.support.ranks import sacrifice


def communicator_of(group: dist.ProcessGroup, timeout: float = 20.0) -> Communicator:
    store = dist.distributed_c10d._get_default_store().clone()
    cpu = torch.device("cpu")
    return Communicator(dist.get_rank(group), dist.get_world_size(group), store, cpu, timeout)


def meetings(group: dist.ProcessGroup) -> list[object]:
    comm = communicator_of(group)
    found: list[object] = [comm.all_gather(comm.rank), comm.maximum([comm.rank, -comm.rank])]
    for teller in range(comm.world):
        try:  # one rank is at the end of what it does, the others are still in the middle of it
            if comm.rank == teller:
                comm.all_gather(error=f"no from {teller}")
            comm.maximum([0.0])
            comm.all_gather()
        except RankFailedError as error:
            found.append(str(error))
    return [*found, comm.all_gather(comm.rank)]


def test_a_problem_of_any_rank_reaches_all_at_the_same_meeting() -> None:
    told = [f"no from {rank} (rank {rank})" for rank in range(3)]
    expected = [[0, 1, 2], [2, 0], *told, [0, 1, 2]]
    assert sacrifice(3, 60, meetings, limit=60.0) == [expected] * 3


def departures(group: dist.ProcessGroup, says: bool) -> str:
    comm = communicator_of(group)
    comm.all_gather()
    communicator.TIMEOUTS_PER_EXCHANGE, communicator.CHECK_SECONDS = 0, 1.0  # type: ignore[misc]
    if comm.rank == 1:
        if says:
            comm.report_loss("its GPU fell off")
        return "gone"
    with pytest.raises(RankLostError) as lost:
        comm.all_gather()
    return str(lost.value)


@pytest.mark.parametrize(
    ("says", "expected"),
    [(True, "rank 1: its GPU fell off"), (False, "no word from rank 1 within 1 s")],
)
def test_a_rank_that_leaves_is_named_and_one_that_vanishes_too(says: bool, expected: str) -> None:
    begin = time.monotonic()
    assert sacrifice(3, 60, departures, says, limit=60.0) == [expected, "gone", expected]
    assert time.monotonic() - begin < 30


Calls = list[tuple[float, float]]  # begin and end, on the clock of the host


def in_step(group: dist.ProcessGroup) -> tuple[Calls, list[float], list[float]]:
    comm, calls = communicator_of(group), []

    def call(seconds: float) -> None:
        begin = time.monotonic()
        time.sleep(seconds * (1 + comm.rank))
        calls.append((begin, time.monotonic()))

    times = paired(lambda: call(0.004), lambda: call(0.008), 10, WallClock(comm))
    return calls, times.a, times.b


def test_samples_start_together_and_the_slowest_rank_counts() -> None:
    (calls, a, b), (slower, *other) = sacrifice(2, 60, in_step, limit=60.0)
    assert [a, b] == other
    assert min(a) >= 0.008
    assert min(b) >= 0.016
    for (begin, _), (_, end) in list(zip(calls[1:], slower, strict=False))[-20:]:
        assert begin >= end  # of the slower rank's call before it


def test_one_process_is_a_team_that_waits_for_nobody() -> None:
    comm = Communicator()
    assert comm.all_gather("x") == ["x"]
    assert comm.maximum([3.0, 1.0]) == [3.0, 1.0]
    assert comm.process_group("any") is None
    comm.barrier()
    comm.check_wait(1e9)
    with pytest.raises(RankFailedError, match="wrong"):
        comm.all_gather(error="wrong")


def test_a_gpu_that_was_stuck_is_a_failure() -> None:
    comm = Communicator(0, 2, timeout=10.0)
    comm.check_wait(4.0)
    with pytest.raises(RuntimeError, match="stuck for 6 s"):
        comm.check_wait(6.0)
