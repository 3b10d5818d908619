"""Ranks agree on a new plan by three requests each; no rank goes on while another one gave up.

If this failed, a rank would wait for peers that have refused the call, or large groups would stall.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from ringfa3.agreement.agreements import Agreements
from ringfa3.agreement.barriers import Barriers
from ringfa3.agreement.entries import Settings, check_entries

SOON_S = 5.0


class CountingStore:
    """Lists the requests of one rank, those of its clones included."""

    def __init__(self, store: dist.Store, requests: list[str]) -> None:
        self._store, self.requests = store, requests

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            if name == "clone":
                return CountingStore(self._store.clone(), self.requests)  # type: ignore[attr-defined]
            self.requests.append(name)
            return getattr(self._store, name)(*arguments)

        return call


class Group:
    """The barriers of `world` ranks, each a thread with connections of its own."""

    def __init__(self, world: int) -> None:
        self.host = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        self.requests: list[list[str]] = [[] for _ in range(world)]
        self.stores = [CountingStore(self.host.clone(), r) for r in self.requests]  # type: ignore[attr-defined]
        self.ranks = [
            Barriers(lambda store=store: store, rank, world)  # type: ignore[misc]
            for rank, store in enumerate(self.stores)
        ]
        self.pool = ThreadPoolExecutor(world)

    def wait(self, content: str, late: dict[int, float], seconds: float = SOON_S) -> list[bool]:
        """Whether each rank passes; late: seconds after which a rank comes."""

        def one(rank: int) -> bool:
            time.sleep(late.get(rank, 0.0))
            arrival = self.ranks[rank].wait(content, seconds, 4 * SOON_S)
            assert arrival.decided.is_set()
            assert arrival.problem is None
            return arrival.passed

        return list(self.pool.map(one, range(len(self.ranks))))

    def leave(self, content: str) -> None:
        for rank in self.ranks:
            rank.leave(content)

    def end(self) -> int:
        """Keys that are left in the store."""
        list(self.pool.map(Barriers.end, self.ranks))
        self.pool.shutdown()
        return self.host.num_keys()


def _idle() -> None:
    time.sleep(0.2)  # deletions follow the passage


@pytest.mark.parametrize("world", [1, 2, 5, pytest.param(64, marks=pytest.mark.soak)])
def test_a_rank_makes_three_requests_and_leaves_no_key(world: int) -> None:
    """However late a rank comes."""
    group, late = Group(world), {0: 0.05}
    for plan in range(6):
        assert group.wait(str(plan), late if plan % 2 else {}) == [True] * world
        group.leave(str(plan))
    _idle()
    looks = [[r for r in requests if r != "check"] for requests in group.requests]
    assert max(map(len, looks)) <= 3 * 6
    assert group.end() == 0


def test_who_arrives_early_asks_the_store_no_more() -> None:
    """In any order, and for contents that this rank or others never wait for."""
    group = Group(3)
    for rank, barriers in enumerate(group.ranks):
        order = ["a", "b", "c"]
        random.Random(rank).shuffle(order)
        for content in order:
            barriers.arrive_early(content)
    _idle()
    for requests in group.requests:
        assert len(requests) <= 3 * 3
        requests.clear()
    assert group.wait("c", {}) == [True] * 3
    assert group.wait("a", {}) == [True] * 3
    assert group.requests == [[]] * 3
    assert group.end() == 0


def test_a_content_of_one_rank_alone_delays_no_other() -> None:
    group = Group(2)
    group.ranks[0].arrive_early("of rank 0 alone")
    _idle()
    for content in "abc":
        start = time.monotonic()
        assert group.wait(content, {}, 2.0) == [True, True]
        assert time.monotonic() - start < 1.0  # it does not give up
        group.leave(content)
    _idle()
    assert group.end() == 0


def test_a_rank_that_comes_after_another_gave_up_does_not_pass() -> None:
    """At once. After that the same content passes in the next round, on all ranks."""
    group = Group(3)
    start = time.monotonic()
    assert group.wait("a", {2: 0.5}, 0.1) == [False] * 3
    assert time.monotonic() - start < 0.5 + SOON_S
    for barriers in group.ranks:
        barriers.restart()
    _idle()
    assert group.host.num_keys() == 0
    assert group.wait("a", {}) == [True] * 3
    assert group.end() == 0


def test_all_ranks_pass_or_none() -> None:
    """Where the last rank arrives as others give up: 60 times, at the edge of both."""
    group, seen = Group(4), set()
    rng = random.Random(0)
    for number in range(60):
        late = {rank: rng.uniform(0.0, 0.012) for rank in range(4)}
        verdicts = group.wait(str(number), late, 0.006)
        assert len(set(verdicts)) == 1, (number, verdicts)
        seen.add(verdicts[0])
        group.leave(str(number))
    assert seen == {False, True}
    _idle()
    assert group.end() == 0


def test_an_error_of_the_store_ends_the_wait() -> None:
    class Broken:
        def __getattr__(self, name: str) -> Any:
            raise dist.DistNetworkError("broken pipe")

    barriers = Barriers(lambda: Broken(), 0, 2)  # type: ignore[arg-type, return-value]
    arrival = barriers.wait("a", SOON_S, SOON_S)
    assert not arrival.passed
    assert arrival.problem == "DistNetworkError: broken pipe"
    barriers.end()


@pytest.mark.parametrize("world", [3, pytest.param(64, marks=pytest.mark.soak)])
def test_a_difference_is_named_on_all_ranks(world: int) -> None:
    """One rank has another scale, between plans on which all agree. Two groups share the store."""
    host = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    outcomes: dict[tuple[str, int], list[str]] = {}

    def run(name: str, rank: int) -> None:
        store = dist.PrefixStore(name, host.clone())  # type: ignore[attr-defined]
        agreements = Agreements(range(world), rank, store, lambda: 60.0, lambda: None)
        agreements._own_store = True
        said = outcomes[name, rank] = []
        for plan in range(4):
            scale = "0.5" if (name, rank, plan) == ("one", 1, 1) else "1.0"
            settings = Settings({"plan": str(plan), "softmax_scale": scale})
            entry = {"settings": settings, "error": None, "mid_call": False}

            def exchange(entry: dict[str, Any] = entry) -> None:
                check_entries(range(world), agreements.exchange(entry))

            try:
                agreements.agree(settings, False, False, exchange)
                said.append("agreed")
            except ValueError as error:
                agreements.restart_barriers()
                said.append(str(error))
        agreements.end()

    threads = [
        threading.Thread(target=run, args=(name, rank))
        for name in ("one", "two")
        for rank in range(world)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for (name, _), said in outcomes.items():
        assert said[0] == said[2] == said[3] == "agreed"
        if name == "two":
            assert said[1] == "agreed"
        else:
            assert "softmax_scale differs between the ranks of the CP group: rank 1: 0.5" in said[1]
    left = 2 * world + 2  # entries of the latest two exchanges, of at most two groups
    assert host.num_keys() <= 2 * left
