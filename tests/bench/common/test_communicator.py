"""If this fails, benchmarks of several ranks hang, or take the time of one rank. The communicator
of the benchmarks, on processes that talk over gloo."""

from __future__ import annotations

import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from ringfa3.bench.common import communicator
from ringfa3.bench.common.communicator import Communicator, RankFailedError, RankLostError
from ringfa3.bench.common.timing import WallClock, paired
from tests.support.ranks import Ranks


def communicator_of(
    group: dist.ProcessGroup, timeout: float = 20.0, name: str = ""
) -> Communicator:
    """name: unique on a store, which several tests may share."""
    store = PrefixStore(name, dist.distributed_c10d._get_default_store().clone())
    cpu = torch.device("cpu")
    return Communicator(dist.get_rank(group), dist.get_world_size(group), store, cpu, timeout)


def exchanges(group: dist.ProcessGroup) -> list[object]:
    comm = communicator_of(group, name="exchanges")
    found: list[object] = [comm.all_gather_object(comm.rank), comm.maximum([comm.rank, -comm.rank])]
    for failing in range(comm.world):
        try:  # one rank is at its last exchange, the others are two behind
            if comm.rank == failing:
                comm.all_gather_object(error=f"no from {failing}")
            comm.maximum([0.0])
            comm.all_gather_object()
        except RankFailedError as error:
            found.append(str(error))
    return [*found, comm.all_gather_object(comm.rank)]


def test_an_error_of_any_rank_is_raised_by_all_at_the_same_exchange(ranks: Ranks) -> None:
    errors = [f"no from {rank} (rank {rank})" for rank in range(3)]
    expected = [[0, 1, 2], [2, 0], *errors, [0, 1, 2]]
    assert ranks.run(3, exchanges) == [expected] * 3


def losses(group: dist.ProcessGroup, reports: bool) -> tuple[str, float]:
    """What a rank raises, and after how many seconds, when rank 1 does not come any more."""
    comm = communicator_of(group, name=f"losses {reports}")
    comm.all_gather_object()
    if comm.rank == 1:
        if reports:
            comm.report_loss("its GPU fell off")
        return "gone", 0.0
    begin = time.monotonic()
    limits = {"TIMEOUTS_PER_EXCHANGE": 0, "CHECK_SECONDS": 1.0}
    with mock.patch.multiple(communicator, **limits), pytest.raises(RankLostError) as lost:
        comm.all_gather_object()
    return str(lost.value), time.monotonic() - begin


@pytest.mark.parametrize(
    ("reports", "expected"),
    [(True, "rank 1: its GPU fell off"), (False, "no answer from rank 1 within 1 s")],
)
def test_a_lost_rank_is_named_whether_it_reports_or_vanishes(
    ranks: Ranks, reports: bool, expected: str
) -> None:
    errors, seconds = zip(*ranks.run(3, losses, reports), strict=True)
    assert errors == (expected, "gone", expected)
    assert max(seconds) < 15


Calls = list[tuple[float, float]]  # begin and end, on the clock of the host


def in_step(group: dist.ProcessGroup) -> tuple[Calls, list[float], list[float]]:
    comm, calls = communicator_of(group, name="in step"), []

    def call(seconds: float) -> None:
        begin = time.monotonic()
        time.sleep(seconds * (1 + comm.rank))
        calls.append((begin, time.monotonic()))

    times = paired(lambda: call(0.004), lambda: call(0.008), 10, WallClock(comm))
    return calls, times.a, times.b


def test_samples_start_together_and_the_slowest_rank_counts(ranks: Ranks) -> None:
    (calls, a, b), (slower, *other) = ranks.run(2, in_step)
    assert [a, b] == other
    assert min(a) >= 0.008
    assert min(b) >= 0.016
    for (begin, _), (_, end) in list(zip(calls[1:], slower, strict=False))[-20:]:
        assert begin >= end  # of the slower rank's call before it


def test_one_process_is_a_communicator_that_waits_for_nobody() -> None:
    comm = Communicator()
    assert comm.all_gather_object("x") == ["x"]
    assert comm.maximum([3.0, 1.0]) == [3.0, 1.0]
    assert comm.process_group("any") is None
    comm.barrier()
    comm.check_wait(1e9)
    with pytest.raises(RankFailedError, match="wrong"):
        comm.all_gather_object(error="wrong")


def test_a_gpu_that_was_stuck_is_a_failure() -> None:
    comm = Communicator(0, 2, timeout=10.0)
    comm.check_wait(4.0)
    with pytest.raises(RuntimeError, match="stuck for 6 s"):
        comm.check_wait(6.0)
