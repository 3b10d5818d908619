"""If this fails, large groups hang or start slowly at a new plan. Agreements of a large group, in
which rank 0 reads for all; each rank is a thread here."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from ringfa3.ring import agreement
from ringfa3.ring.agreement import ALL_READ, Agreements, NoAgreementError, _report_key
from ringfa3.ring.store_monitor import entry_key, join_request_key
from tests.ring.test_agreement import CountingStore

WORLD = ALL_READ + 3
ENTRY = {"settings": {"scale": "1.0"}, "error": None, "mid_call": False, "call": 3}
OTHERS = {
    "settings": {**ENTRY, "settings": {"scale": "2.0"}},
    "an error": {**ENTRY, "error": ["ValueError", "no"]},
    "in a call": {**ENTRY, "mid_call": True},
    "a call less": {**ENTRY, "call": 2},
}
TIMEOUT_S = 1.0


def _group(timeout_s: float = 20.0, lost: str | None = None) -> list[Agreements]:
    """The ranks, with numbers 100, 101, ... in messages."""
    ranks, shared = range(100, 100 + WORLD), dist.HashStore()
    group = []
    for rank in range(WORLD):
        store: Any = CountingStore(shared)
        store.may_delete.set()
        group.append(Agreements(ranks, rank, store, lambda: timeout_s, lambda: lost))
        group[-1]._own_store = True
    return group


def _exchange(group: list[Agreements], entries: list[Any]) -> list[Any]:
    """(entries that the rank got, or its message; seconds); None stays away, rank 0 comes last."""

    def enter(rank: int) -> Any:
        start = time.monotonic()
        try:
            got: Any = group[rank].exchange(entries[rank])
        except NoAgreementError as problem:
            got = str(problem)
        return got, time.monotonic() - start

    with ThreadPoolExecutor(WORLD) as pool:
        present = [rank for rank in range(WORLD) if entries[rank] is not None]
        results = {rank: pool.submit(enter, rank) for rank in present if rank > 0}
        keys = [entry_key(group[0].agreement_id + 1, rank) for rank in results]
        while not group[0].store._store.check(keys):  # type: ignore[attr-defined]
            time.sleep(0)
        results.update({0: pool.submit(enter, 0)} if 0 in present else {})
        outcomes = [results[r].result(30) if r in results else None for r in range(WORLD)]
    for agreements in group:
        agreements.end()
    return outcomes


def test_a_rank_writes_looks_and_deletes_once() -> None:
    """As soon as rank 0 has read; it alone reads. No key of two agreements before is left."""
    group = _group()
    for _ in range(2):
        _exchange(group, [ENTRY] * WORLD)
    for member in group:
        member.store.operations.clear()  # type: ignore[attr-defined]
    with mock.patch.object(agreement, "POLL_S", 0.5 / WORLD):  # others look when rank 0 has read
        outcomes = _exchange(group, [ENTRY] * WORLD)
    assert [got for got, _ in outcomes] == [[ENTRY] * WORLD] * WORLD
    first, *others = [member.store.operations for member in group]  # type: ignore[attr-defined]
    assert others == [["set", "check", "delete_key"]] * (WORLD - 1)
    assert first == ["set", "check", "multi_get", "set"] + 2 * ["delete_key"]
    ended = [*(entry_key(1, rank) for rank in range(WORLD)), _report_key(1), join_request_key(1)]
    assert not any(group[0].store.check([key]) for key in ended)
    assert group[0].store.check([entry_key(2, 1), _report_key(2)])


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("rank", [0, 1, WORLD - 1])
def test_every_rank_gets_the_entry_that_differs(rank: int, other: str) -> None:
    """Exactly, in well under a second; the next agreement is right again."""
    group, entries = _group(), [ENTRY] * WORLD
    entries[rank] = OTHERS[other]  # type: ignore[call-overload]
    for got, seconds in _exchange(group, entries):
        assert got == entries
        assert seconds < 2.0
    assert [got for got, _ in _exchange(group, [ENTRY] * WORLD)] == [[ENTRY] * WORLD] * WORLD


def test_equal_errors_of_all_ranks_are_errors() -> None:
    entries = [OTHERS["an error"]] * WORLD
    assert [got for got, _ in _exchange(_group(), entries)] == [entries] * WORLD


@pytest.mark.parametrize("absent", [0, 1, WORLD - 1])
def test_an_absent_rank_is_named_after_the_timeout(absent: int) -> None:
    """By all others, and not earlier."""
    entries = [None if rank == absent else ENTRY for rank in range(WORLD)]
    outcomes = _exchange(_group(TIMEOUT_S), entries)
    for got, seconds in outcomes[:absent] + outcomes[absent + 1 :]:
        assert f"rank {100 + absent} did not reach it within 1 s" in got
        assert TIMEOUT_S - agreement.PERIOD_S <= seconds < TIMEOUT_S + 2.0


def test_ranks_agree_without_a_report() -> None:
    """The process of rank 0 ends after it has entered: the others read the entries themselves."""
    group = _group()
    store = group[0].store
    killed = mock.Mock(side_effect=SystemError("killed"))
    group[0].store = mock.Mock(wraps=store, _store=store._store, multi_get=killed)
    (first, _), *others = _exchange(group, [ENTRY] * WORLD)
    assert "SystemError: killed" in first
    assert [got for got, _ in others] == [[ENTRY] * WORLD] * (WORLD - 1)
    assert all(seconds < 2.0 for _, seconds in others)


def test_a_rank_that_has_given_up_ends_the_wait() -> None:
    """At once, with its reason, not after the timeout."""
    entries = [ENTRY] * (WORLD - 1) + [None]
    for got, seconds in _exchange(_group(20.0, "rank 110: disk on fire"), entries)[:-1]:
        assert "rank 110: disk on fire" in got
        assert seconds < 2.0
