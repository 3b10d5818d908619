"""Agreements of ranks that share words in memory: without the store, unless a rank has to be named.

Each rank is a thread, and a process in the last test. The reference is what a group without words
gets: the entries of all ranks.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ringfa3.ring import agreement
from ringfa3.ring.agreement import NUMBERS, Agreements, AgreementWords, NoAgreementError
from ringfa3.ring.group import RingGroup
from ringfa3.ring.store_monitor import entry_key, join_request_key
from ringfa3.schedules.settings import Settings
from ringfa3.symmetric.signals import Signals
from tests.ring.test_agreement import CountingStore
from tests.support.ranks import Ranks, group_of

ENTRY = {"settings": Settings(scale="1.0"), "error": None, "mid_call": False, "call": 3, "void": 4}
OTHERS = {
    "settings": {**ENTRY, "settings": Settings(scale="2.0")},
    "an error": {**ENTRY, "error": ["ValueError", "no"]},
    "in a call": {**ENTRY, "mid_call": True},
    "a call less": {**ENTRY, "call": 2},
    "a line": {**ENTRY, "line": "/dev/shm/x"},
}
NEVER_S = 60.0


class Host:
    """The ranks of a host, with numbers 100, 101, ... in messages."""

    def __init__(self, world: int, timeout_s: float = 20.0) -> None:
        self.world, self.store = world, dist.HashStore()
        memory = memoryview(array("q", bytes(16 * world)))
        self.words = [AgreementWords(memory, rank, world) for rank in range(world)]
        self.lost: str | None = None
        self.ranks = []
        for rank, words in enumerate(self.words):
            store: Any = CountingStore(self.store)
            store.may_delete.set()
            given = store, lambda: timeout_s, lambda: self.lost, lambda words=words: words
            self.ranks.append(Agreements(range(100, 100 + world), rank, *given))
            self.ranks[-1]._own_store = True

    @property
    def operations(self) -> list[list[str]]:
        return [rank.store.operations for rank in self.ranks]  # type: ignore[attr-defined]

    def enter(self, rank: int, entry: Any = ENTRY) -> Any:
        """(entries that the rank got, or its message; seconds)."""
        start = time.monotonic()
        try:
            got: Any = self.ranks[rank].exchange(entry)
        except NoAgreementError as problem:
            got = str(problem)
        return got, time.monotonic() - start

    def all_enter(self, entries: list[Any]) -> list[Any]:
        with self.entering() as pool:
            return list(pool.map(self.enter, range(self.world), entries))

    @contextmanager
    def entering(self) -> Iterator[ThreadPoolExecutor]:
        """Threads for the ranks; at the end all have ended, and what they delete is deleted."""
        with ThreadPoolExecutor(self.world) as pool:
            yield pool
        for rank in self.ranks:
            rank.end()

    def enters_store(self, pool: ThreadPoolExecutor, rank: int) -> Future[Any]:
        """A rank that waits in the store, as no other has come."""
        key, entered = self.ranks[rank].agreement_id + 1, pool.submit(self.enter, rank)
        while not self.store.check([join_request_key(key)]) and not entered.done():
            time.sleep(0)
        return entered


@pytest.fixture
def patient() -> Iterator[None]:
    """No rank asks others to join: what is seen in time is seen in the words."""
    with mock.patch.object(agreement, "ASK_S", NEVER_S):
        yield


@pytest.fixture
def impatient() -> Iterator[None]:
    """A rank that waits goes to the store at once."""
    with mock.patch.object(agreement, "ASK_S", 0.0):
        yield


@pytest.mark.usefixtures("patient")
def test_equal_entries_need_no_store_and_no_thread() -> None:
    """For a hundred agreements at the speed of each rank."""
    host = Host(3)

    def calls(rank: int) -> None:
        for call in range(100):
            time.sleep(1e-4 * ((rank + call) % 3))
            entry = {**ENTRY, "call": call}
            assert host.enter(rank, entry)[0] == [entry] * 3

    with host.entering() as pool:
        list(pool.map(calls, range(3)))
    assert host.operations == [[]] * 3
    assert [rank._thread for rank in host.ranks] == [None] * 3
    assert [rank.agreement_id for rank in host.ranks] == [100] * 3


@pytest.mark.parametrize("agreement_id", [1, 2, NUMBERS - 1, NUMBERS, 2 * NUMBERS - 1])
def test_a_rank_may_be_one_agreement_ahead(agreement_id: int) -> None:
    """The other one still sees equal words of the agreement before; then none of the next one."""
    fast, slow = Host(2).words
    for words in (fast, slow):
        words.write(agreement_id, "x")
    assert fast.equal()
    fast.write(agreement_id + 1, "x")
    assert fast.equal() is None
    assert slow.equal()
    slow.write(agreement_id + 1, "y")
    assert (fast.equal(), slow.equal()) == (False, False)


def test_new_words_are_no_entries_of_any_number() -> None:
    own, _ = Host(2).words
    for agreement_id in (*range(4), *range(NUMBERS - 3, NUMBERS + 3)):
        own.write(agreement_id, "x")
        assert own.equal() is None
        assert (own.entered(0), own.entered(1)) == (True, False)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("rank", [0, 2])
def test_every_rank_gets_an_entry_that_differs(rank: int, other: str) -> None:
    """From the store, in well under a second. The next agreement needs none again."""
    host = Host(3)
    entries = [OTHERS[other] if r == rank else ENTRY for r in range(3)]
    for got, seconds in host.all_enter(entries):
        assert got == entries
        assert seconds < 2.0
    before = [len(operations) for operations in host.operations]
    assert [got for got, _ in host.all_enter([ENTRY] * 3)] == [[ENTRY] * 3] * 3
    assert [len(operations) for operations in host.operations] == before
    assert [rank.agreement_id for rank in host.ranks] == [2] * 3


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("other", ["an error", "in a call", "a line"])
def test_equal_entries_that_all_must_read_go_by_the_store(other: str) -> None:
    host, entries = Host(2), [OTHERS[other]] * 2
    assert [got for got, _ in host.all_enter(entries)] == [entries] * 2
    assert all("multi_get" in operations for operations in host.operations)


@pytest.mark.usefixtures("impatient")
def test_a_late_rank_needs_no_store_and_the_others_go_on() -> None:
    """They ask it to join, and wait in the store meanwhile. Of two agreements no key is left."""
    host = Host(3)
    for number in range(1, 5):
        with host.entering() as pool:
            waiting = [host.enters_store(pool, rank) for rank in (0, 1)]
            while not host.store.check([entry_key(number, 1)]):
                time.sleep(0)
            late = pool.submit(host.enter, 2)
            assert [x.result(10)[0] for x in (*waiting, late)] == [[ENTRY] * 3] * 3
    assert host.operations[2] == []
    kept = [
        number
        for number in range(1, 5)
        for key in (entry_key(number, 0), entry_key(number, 1), join_request_key(number))
        if host.store.check([key])
    ]
    assert kept == [3, 3, 3, 4, 4, 4]


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("other", OTHERS)
def test_a_late_rank_that_differs_enters_the_store(other: str) -> None:
    host, late = Host(2), OTHERS[other]
    with host.entering() as pool:
        waiting = host.enters_store(pool, 0)
        assert host.enter(1, late)[0] == [ENTRY, late]
        assert waiting.result(10)[0] == [ENTRY, late]


@pytest.mark.usefixtures("impatient")
def test_an_absent_rank_is_named_after_the_timeout() -> None:
    """It alone: a rank that is there, and not in the store yet, has entered too."""
    host = Host(3, timeout_s := 1.0)
    with host.entering() as pool:
        waiting = host.enters_store(pool, 0)
        host.words[1].write(1, "different")
        got, seconds = waiting.result(10)
    assert "rank 102 did not reach it within 1 s" in got
    assert timeout_s - agreement.PERIOD_S <= seconds < timeout_s + 2.0


@pytest.mark.usefixtures("patient")
def test_a_rank_that_has_given_up_ends_the_wait_for_words() -> None:
    host = Host(2)
    with host.entering() as pool:
        waiting = pool.submit(host.enter, 0)
        while not host.words[0].entered(0):
            time.sleep(0)
        host.lost = "rank 101: disk on fire"
        assert "disk on fire" in waiting.result(10)[0]


def _connected(_: dist.ProcessGroup) -> list[Any]:
    """Operations of the store in new agreements, the text of one that differs, and the numbers."""
    group = group_of(2)
    if dist.get_rank() >= 2:
        return []
    ring = RingGroup.of(group)
    ring.agree(Settings({"plan": "first"}))
    ring.begin(Settings({"plan": "first"}))

    def opened(*_: object) -> Any:
        with mock.patch("ringfa3.symmetric.signals.cuda_driver.register_host_memory", _same):
            signals = Signals(ring.rank, ring.world, ring.gather)
        return mock.Mock(signals=signals, spec=["signals", "abandon", "close"])

    with mock.patch("ringfa3.ring.connections.open_backend", opened):
        ring.connections.symmetric_backend(torch.device("cpu"))
    store = CountingStore(ring.store)
    store.may_delete.set()
    with (
        mock.patch.object(agreement, "ASK_S", NEVER_S),
        mock.patch.object(ring.agreements, "store", store),
    ):
        for number in range(5):
            ring.agree(Settings({"plan": f"new {number}"}))
        operations = list(store.operations)
        with pytest.raises(ValueError, match="plan differs between the ranks") as caught:
            ring.agree(Settings({"plan": f"that of {ring.rank}"}))
        entered = "multi_get" in store.operations
        ring.agree(Settings({"plan": "new again"}))
        ring.agreements.end()  # its thread deletes keys in this store
    ring.connections.abandon()
    assert ring.connections.words is None
    ring.agree(Settings({"plan": "by the store"}))
    return [operations, entered, str(caught.value), ring.agreement_id]


def _same(address: int, _: int) -> int:
    return address


def test_a_group_over_symmetric_agrees_by_words_until_it_abandons_them(ranks: Ranks) -> None:
    """Numbers go on over both ways: one agreement before, two to make the words, eight after."""
    text = "plan differs between the ranks of the CP group: rank 0: that of 0; rank 1: that of 1"
    assert ranks.run(4, _connected)[:2] == [[[], True, text, 11]] * 2
