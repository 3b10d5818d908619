"""If this fails, new plans take longer to start. An agreement asks the store for as little as it
can before its caller goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch.distributed as dist

from ringfa3.ring.agreement import Agreements

ENTRY = {"settings": {}, "error": None, "mid_call": False}


class CountingStore:
    """A store that both ranks share. It lists the operations of one rank."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self.operations: list[str] = []
        self.may_delete = threading.Event()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            if name == "delete_key":
                assert self.may_delete.wait(10)
            self.operations.append(name)
            return getattr(self._store, name)(*arguments)

        return call


def test_a_rank_that_comes_last_writes_looks_and_reads_once() -> None:
    """Keys of an earlier agreement are deleted after the caller has gone on."""
    shared = dist.HashStore()
    stores = [CountingStore(shared) for _ in range(2)]
    both = [
        Agreements(range(2), rank, store, lambda: 10.0, lambda: None)  # type: ignore[arg-type]
        for rank, store in enumerate(stores)
    ]
    for agreements in both:
        agreements._own_store = True
    with ThreadPoolExecutor() as pool:
        for _ in range(2):
            list(pool.map(lambda agreements: agreements.exchange(ENTRY), both))
        first = pool.submit(both[0].exchange, ENTRY)
        while not shared.check(["ringfa3/agree/3/0"]) and not first.done():
            time.sleep(0)
        stores[1].operations.clear()
        assert both[1].exchange(ENTRY) == first.result(10)
    assert stores[1].operations == ["set", "check", "multi_get"]
    assert shared.check(["ringfa3/agree/1/1"])
    for store, agreements in zip(stores, both, strict=True):
        store.may_delete.set()
        agreements.end()
    assert not shared.check(["ringfa3/agree/1/0"])
    assert not shared.check(["ringfa3/agree/1/1"])
    assert shared.check(["ringfa3/agree/2/1"])
