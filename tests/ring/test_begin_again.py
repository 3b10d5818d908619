"""If this fails, a repeated ring call runs with outdated settings. Calls that begin like an earlier
one: when they may, and what they leave behind."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ringfa3 import host
from ringfa3.build.host_library import ensure_host_library
from ringfa3.ring import agreement
from ringfa3.ring.agreement import AgreementSnapshot
from ringfa3.ring.group import RingGroup
from ringfa3.ring.store_monitor import StoreMonitor
from ringfa3.schedules.settings import Settings
from ringfa3.symmetric.ring_program import ReplayableCall
from tests.support.ranks import Ranks, group_of


def _begin(ring: RingGroup, agreed: AgreementSnapshot) -> bool:
    """Whether the C++ launcher begins a call."""
    library = host.load(ensure_host_library())
    return library.begin_call(ring, agreed, None) is not None


def _agreed(ring: RingGroup, name: str) -> None:
    settings = Settings({"call": name})
    ring.agree(settings)
    ring.begin(settings)


def _begins(_: dist.ProcessGroup) -> list[Any]:
    group = group_of(2)
    if dist.get_rank() >= 2:
        return []
    ring = RingGroup.of(group)
    _agreed(ring, "first")
    agreed, before = ring.agreement_snapshot(), ring.calls.latest.number
    _agreed(ring, "second")
    assert _begin(ring, agreed)
    return [
        ring.calls.latest.number - before,
        dict(ring.calls.latest.settings),
        ring.connections.last_transport,
    ]


def test_a_call_has_the_next_number_and_the_settings_of_the_earlier_one(ranks: Ranks) -> None:
    assert ranks.run(4, _begins)[:2] == [[2, {"call": "first"}, "symmetric"]] * 2


def _refused(_: dist.ProcessGroup, trouble: str) -> tuple[bool, bool]:
    """Whether a call begins again before the trouble and in it; nothing may begin then."""
    group = group_of(2)
    if dist.get_rank() >= 2:
        return True, False
    ring = RingGroup.of(group)
    _agreed(ring, "first")
    agreed = ring.agreement_snapshot()
    before = _begin(ring, agreed)
    if trouble == "agreements cleared":
        with mock.patch.object(agreement, "MAX_AGREEMENTS", 1):
            ring.agree(Settings({"call": "second"}))
    elif trouble == "this rank's failure":
        ring.failure = "a failure"
    elif trouble == "closed":
        ring.close()
    else:
        monitor = StoreMonitor.__new__(StoreMonitor)  # without its thread
        monitor.peer_failure, monitor.join_request = None, 0
        with mock.patch.object(ring, "monitor", monitor):
            assert _begin(ring, agreed)
            if trouble == "a peer's failure":
                monitor.peer_failure = "a failure"
            else:
                monitor.join_request = ring.agreement_id + 1
            latest = ring.calls.latest
            return before, _begin(ring, agreed) or ring.calls.latest != latest
    latest = ring.calls.latest
    return before, _begin(ring, agreed) or ring.calls.latest != latest


@pytest.mark.parametrize(
    "trouble",
    [
        "agreements cleared",
        "this rank's failure",
        "a peer's failure",
        "a request to join",
        "closed",
    ],
)
def test_a_call_does_not_begin_in_trouble(ranks: Ranks, trouble: str) -> None:
    """Ranks have to agree first, one has given up, or one waits for the others in an agreement."""
    assert ranks.run(4, _refused, trouble) == [(True, False)] * 4


@pytest.mark.parametrize("memory", [False, True])
def test_a_failed_program_is_told_to_the_peers(memory: bool) -> None:
    backend = mock.Mock()
    ReplayableCall(backend, None, mock.Mock(), mock.Mock()).failed(memory, "a reason")
    (error,) = backend.group.report_failure.call_args.args
    assert (type(error), str(error)) == (
        torch.OutOfMemoryError if memory else RuntimeError,
        "a reason",
    )
