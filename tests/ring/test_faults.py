"""If this fails, a dead rank hangs a job, or the job blames another rank. A rank dies, stops or
fails in mid-hop: the others raise in time and name the cause."""

from __future__ import annotations

import os
import re
import signal
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ringfa3 import RingError, plan_context, ring_attn_func
from ringfa3.kernels import reference
from ringfa3.ring.group import RingGroup
from ringfa3.schedules.settings import Settings
from tests.support.ranks import sacrifice

Group = dist.ProcessGroup
TIMEOUT_S = 3.0
SLACK_S = 2.0
SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}


def _fail(how: str) -> None:
    if how in SIGNALS:
        os.kill(os.getpid(), SIGNALS[how])
        time.sleep(60)  # a stopped process runs on for a moment
    raise {"RuntimeError": RuntimeError, "ValueError": ValueError}[how]("disk on fire")


def _ring(group: Group, victim: int, how: str, direction: str, hop: int):  # type: ignore[no-untyped-def]
    """(kind, message, seconds) of the call in which the victim fails, and of the next one."""
    name = "attend" if direction == "forward" else "attend_backward"
    inner, calls = getattr(reference, name), 0

    def failing(*args: object, **options: object) -> None:
        nonlocal calls
        calls += 1
        if calls == hop + 1:
            _fail(how)
        inner(*args, **options)

    plan = plan_context(240, group)
    x = torch.randn(plan.local_tokens, 2, 8, requires_grad=True)
    ring_attn_func(x, x, x, plan).sum().backward()  # connections and agreements exist
    dist.barrier(group)
    outcomes = []
    with mock.patch.object(reference, name, failing if dist.get_rank() == victim else inner):
        for _ in range(2):
            start = time.monotonic()
            kind, message = "", ""
            try:
                ring_attn_func(x, x, x, plan).sum().backward()
            except (RingError, RuntimeError, ValueError) as error:
                kind, message = type(error).__name__, str(error)
            outcomes.append((kind, message, time.monotonic() - start))
    return outcomes


def check(results: list[object], world: int, victim: int, direction: str, within: float) -> None:
    """All ranks but the victim raised RingError in time, naming direction, hop and peer."""
    survivors = [r for r in range(world) if r != victim]
    for rank in survivors:
        assert results[rank] is not None, f"rank {rank} gave no answer"
        (kind, message, seconds), (later, again, soon) = results[rank]  # type: ignore[misc]
        assert kind == "RingError", (rank, kind, message)
        assert seconds < within, (rank, message)
        seen = (
            "(forward|backward)" if direction == "forward" else direction
        )  # too late for this call: in the next
        assert re.search(rf"{seen} hop \d: (K/V|dK/dV)", message), message
        assert re.search(r"(sending to|receiving from) rank \d", message), message
        assert message.startswith(f"rank {rank}: ")
        assert later == "RingError", (later, again)
        assert soon < 0.5
    # at least one of them names the victim
    assert any(re.search(rf"(to|from) rank {victim}\b", results[r][0][1]) for r in survivors)  # type: ignore[index]


@pytest.mark.parametrize(
    ("world", "victim", "how", "direction", "hop"),
    [
        (3, 1, "killed", "forward", 1),
        (3, 2, "stopped", "backward", 1),
        (4, 2, "killed", "backward", 2),
        (4, 1, "stopped", "forward", 1),
        (4, 3, "stopped", "backward", 0),
        (2, 0, "killed", "forward", 0),
    ],
)
def test_others_raise_within_the_timeout(
    world: int, victim: int, how: str, direction: str, hop: int
) -> None:
    """kill -9 and SIGSTOP in mid-hop: RingError within the timeout + 2 s, then at once."""
    results = sacrifice(world, TIMEOUT_S, _ring, victim, how, direction, hop, lost=victim)
    check(results, world, victim, direction, TIMEOUT_S + SLACK_S)


@pytest.mark.parametrize(
    ("how", "world", "direction"), [("killed", 3, "forward"), ("stopped", 4, "backward")]
)
def test_the_rank_that_hosts_the_store_may_fail_too(how: str, world: int, direction: str) -> None:
    """Rank 0, without torchrun: the store is lost with it, and the timeout still holds."""
    results = sacrifice(world, TIMEOUT_S, _ring, 0, how, direction, 1, lost=0, hosts=True)
    check(results, world, 0, direction, TIMEOUT_S + SLACK_S)


@pytest.mark.parametrize(
    ("how", "world", "direction"),
    [("RuntimeError", 3, "forward"), ("ValueError", 4, "backward")],
)
def test_an_error_on_one_rank_reaches_the_others_with_its_cause(
    how: str, world: int, direction: str
) -> None:
    """Within 2 s, not after the timeout; the rank itself raises its own error."""
    results = sacrifice(world, 10.0, _ring, 1, how, direction, 1)
    kind, message, _ = results[1][0]
    assert (kind, message) == (how, "disk on fire")
    check(results, world, 1, direction, 2.0)
    for rank in set(range(world)) - {1}:
        assert f"rank 1: {how}: disk on fire" in results[rank][0][1]


def _stop_before_agreement(group: Group, victim: int) -> tuple[str, str, float]:
    """The victim stops between two calls, of which the second needs an agreement."""
    x = torch.randn(240 // dist.get_world_size(), 2, 8)
    ring_attn_func(x, x, x, plan_context(240, group))
    dist.barrier(group)
    if dist.get_rank() == victim:
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(60)
    time.sleep(0.2)
    start = time.monotonic()
    try:
        ring_attn_func(x, x, x, plan_context(240, group, "contiguous"))
    except RingError as error:
        return "RingError", str(error), time.monotonic() - start
    return "", "", time.monotonic() - start


@pytest.mark.parametrize(("victim", "hosts"), [(1, False), (0, True)])
def test_a_rank_that_stops_before_an_agreement(victim: int, hosts: bool) -> None:
    """RingError within the timeout + 2 s, which names the rank unless it hosts the store."""
    results = sacrifice(
        3, TIMEOUT_S, _stop_before_agreement, victim, lost=victim, hosts=hosts, limit=12.0
    )
    for rank in {0, 1, 2} - {victim}:
        assert results[rank] is not None, f"rank {rank} gave no answer"
        kind, message, seconds = results[rank]
        assert kind == "RingError"
        assert seconds < TIMEOUT_S + SLACK_S
        assert f"rank {victim} did not reach it" in message or hosts


def _fail_alone(group: Group, victim: int) -> tuple[str, str, float]:
    """The victim's kernel fails in a call that exchanges nothing; the next call of the others
    needs an agreement."""
    rank, world = dist.get_rank(), dist.get_world_size()

    def call(tokens: int) -> None:
        plan = plan_context([tokens * r for r in range(world + 1)], group, "contiguous")
        x = torch.randn(plan.local_tokens, 2, 8)
        ring_attn_func(x, x, x, plan)

    ring_attn_func(*[torch.randn(240 // world, 2, 8)] * 3, plan_context(240, group))
    call(20)
    dist.barrier(group)
    start = time.monotonic()
    try:
        if rank == victim:
            with mock.patch.object(reference, "attend", side_effect=RuntimeError("disk on fire")):
                call(20)
        call(21)
    except (RingError, RuntimeError) as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "", "", time.monotonic() - start


@pytest.mark.parametrize("world", [2, 3])
def test_an_agreement_ends_with_the_failure_of_a_peer(world: int) -> None:
    """Within 2 s, not after the timeout, with the cause."""
    results = sacrifice(world, 10.0, _fail_alone, 1)
    for rank, (kind, message, seconds) in enumerate(results):
        assert kind == ("RuntimeError" if rank == 1 else "RingError"), (rank, message)
        assert "disk on fire" in message
        assert seconds < 2.0


def _fail_in_the_store(group: Group, victim: int) -> tuple[str, float]:
    """The message of an agreement in which the victim's store fails, and its seconds."""
    ring = RingGroup.of(group)
    ring.agree(Settings({"call": "1"}))
    dist.barrier(group)
    if dist.get_rank() == victim:
        problem = dist.DistNetworkError("broken pipe")
        ring.agreements.store = mock.Mock(wraps=ring.store, set=mock.Mock(side_effect=problem))
    start = time.monotonic()
    with pytest.raises(RingError) as raised:
        ring.agree(Settings({"call": "2"}))
    return str(raised.value), time.monotonic() - start


def test_an_error_of_the_store_ends_an_agreement_at_once() -> None:
    """On the rank that has it, well within the timeout, and with its text."""
    results = sacrifice(2, 10.0, _fail_in_the_store, 1)
    message, seconds = results[1]  # type: ignore[misc]
    assert "broken pipe" in message
    assert seconds < 2 * SLACK_S
