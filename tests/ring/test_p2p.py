"""If this fails, rings over NCCL stall the attention kernel, or a lost peer hangs a rank. What
`NcclTransport` issues, in which order, and what its thread watches, without a GPU."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from ringfa3.errors import timed_out
from ringfa3.ring import p2p
from ringfa3.ring.p2p import HEAD_START, LONGER, Message, NcclTransport

TIMEOUT_S = 0.5


class Job:
    """Stands in for NCCL and CUDA.

    order     what the transport issued: how many messages, and pauses
    captured  whether the current stream is captured
    query     `is_completed` of the messages that are posted while it is set
    failure   of a peer
    limits    of NCCL's own watchdog
    """

    def __init__(self) -> None:
        self.order: list[Any] = []
        self.captured = False
        self.query: Callable[[], bool] = lambda: True
        self.failure: str | None = None
        self.limits: list[timedelta] = []
        self.mode = threading.local()  # has `relaxed` in threads that may query during a capture

    def _start_coalescing(self, device: torch.device) -> None:
        self.order.append(0)

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> None:
        self.order[-1] += len(tensors)

    recv = send

    def shutdown(self) -> None:
        """Ends the process group."""

    def _end_coalescing(self, device: torch.device) -> Any:
        return SimpleNamespace(is_completed=self.query, wait=lambda: None)

    def abort(self) -> None:
        self.order.append("abort")

    def _get_backend(self, device: torch.device) -> Any:
        return SimpleNamespace(_set_default_timeout=self.limits.append)

    @contextmanager
    def relaxed_capture(self) -> Iterator[None]:
        self.mode.relaxed = True
        yield
        del self.mode.relaxed


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Job:
    job = Job()
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: job.order.append(("pause", cycles)))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: job.captured)
    monkeypatch.setattr(p2p, "relaxed_capture", job.relaxed_capture)
    monkeypatch.setattr(p2p, "POLL_S", 0.01)
    return job


@pytest.fixture
def transport(job: Job) -> Iterator[NcclTransport]:
    limit = timedelta(seconds=TIMEOUT_S)
    group: Any = SimpleNamespace(rank=0, ranks=[0, 1], timeout=limit, failure=None, call=1)
    group.peer_failure, group.lose = lambda: job.failure, lambda m: job.order.append(("lost", m))
    made = NcclTransport(group, p2p=cast(Any, job))
    yield made
    made.close(lost=False)
    assert not made._thread.is_alive()


def exchange(transport: NcclTransport) -> None:
    message = Message(torch.zeros(1), 1, "forward hop 1: K/V", 0)
    transport.exchange([message], [message]).wait()


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_nccl_has_a_head_start_on_later_kernels(job: Job, transport: NcclTransport) -> None:
    """The stream pauses after messages, and only if there are any."""
    exchange(transport)
    assert job.order == [2, ("pause", HEAD_START)]
    transport.exchange([], []).wait()
    assert len(job.order) == 2


def test_the_thread_queries_in_relaxed_capture_mode(job: Job, transport: NcclTransport) -> None:
    """In CUDA's default mode a query ends a capture of another thread."""
    modes: list[bool] = []

    def query() -> bool:
        modes.append(hasattr(job.mode, "relaxed"))
        return True

    job.query = query
    exchange(transport)
    until(lambda: modes)
    assert all(modes)


WHAT = "forward hop 1: K/V, sending to rank 1; forward hop 1: K/V, receiving from rank 1"


def test_the_thread_survives_an_error_of_a_query(job: Job, transport: NcclTransport) -> None:
    """It watches later messages. Those that are overdue lose the group, then it aborts them."""
    queries: list[None] = []

    def fail() -> bool:
        queries.append(None)
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    job.query = fail
    exchange(transport)
    until(lambda: queries)
    job.query = lambda: False
    exchange(transport)
    until(lambda: job.order[-1] == "abort")
    lost = timed_out(WHAT, TIMEOUT_S)
    assert job.order[-2:] == [("lost", lost), "abort"]


def test_the_thread_survives_an_abort_that_fails(
    job: Job, transport: NcclTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for the messages any longer."""

    def fail() -> None:
        raise RuntimeError("NCCL error: unhandled system error")

    monkeypatch.setattr(job, "abort", fail)
    transport.group.timeout = timedelta(0)  # type: ignore[misc]
    job.query = lambda: False
    exchange(transport)
    until(lambda: transport.completed_before(2))
    assert transport._thread.is_alive()


def test_messages_of_a_peer_that_has_given_up_are_aborted(
    job: Job, transport: NcclTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Well before the timeout, with the cause; the caller knows first."""
    monkeypatch.setattr(p2p, "GRACE_S", 0.05)
    transport.group.timeout = timedelta(seconds=60)  # type: ignore[misc]
    job.query = lambda: False
    job.failure = "rank 1: disk on fire"
    exchange(transport)
    until(lambda: job.order[-1] == "abort")
    assert job.order[-2:] == [("lost", f"{WHAT}: aborted: rank 1: disk on fire"), "abort"]


def test_earlier_messages_pass_before_an_abort(job: Job, transport: NcclTransport) -> None:
    """`completed_before(n)`: of all calls before number n. Nobody looks at aborted works."""
    first = threading.Event()
    job.query = first.is_set
    exchange(transport)
    transport.group.call = 2  # type: ignore[misc]
    job.query = lambda: False
    exchange(transport)
    assert (transport.completed_before(1), transport.completed_before(2)) == (True, False)
    first.set()
    until(lambda: transport.completed_before(2))
    assert not transport.completed_before(3)
    transport.abort()
    transport.abort()
    assert job.order.count("abort") == 1
    until(lambda: not transport._thread.is_alive())


def test_nccl_has_a_longer_limit_than_the_group(job: Job, transport: NcclTransport) -> None:
    """Also after a change: its watchdog would end the process."""
    transport.group.timeout = timedelta(hours=1)  # type: ignore[misc]
    job.query = lambda: len(job.limits) > 1
    exchange(transport)
    until(lambda: len(job.limits) > 1)
    assert job.limits == [timedelta(seconds=TIMEOUT_S) + LONGER, timedelta(hours=1) + LONGER]


def test_nobody_queries_captured_messages(job: Job, transport: NcclTransport) -> None:
    """CUDA refuses queries of events in a graph. The messages are sent."""
    queries: list[None] = []
    job.query = lambda: queries.append(None) is None
    job.captured = True
    exchange(transport)
    assert job.order == [2, ("pause", HEAD_START)]
    job.captured = False
    exchange(transport)
    until(lambda: len(queries) == 1)
    until(lambda: not transport._posted)


def test_the_thread_leaves_the_gil_to_the_caller(
    job: Job, transport: NcclTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No exchange wakes it, and it looks at few of many messages."""
    monkeypatch.setattr(p2p, "POLL_S", 60)
    time.sleep(0.1)  # its poll of before ends
    queries: list[None] = []
    job.query = lambda: queries.append(None) is None
    for _ in range(100):
        exchange(transport)
    assert not queries
    until(lambda: transport.completed_before(2))
    assert len(queries) < 8
