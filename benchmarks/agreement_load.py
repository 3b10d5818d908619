"""How long the ranks of a large group take to agree on a new plan, on one host without a GPU.

    python -m benchmarks.agreement_load [--ranks 64] [--processes 4] [--plans 50]

Each rank is a thread with connections of its own to one store, so all requests of a group of this
size meet at one store. All ranks begin at the same time. Rows: median and largest time, over the
plans, from that time until the last rank has agreed; requests of a rank and plan, the most and the
mean.

    requests  those of a barrier alone: what the store's host does, without the ranks' threads
    barrier   what a new plan costs a call that has to wait for its agreement
    early     the same call, where the agreement began when the plan was made, 50 ms before
    entries   each rank reads the entries of all: after an error, or where ranks differ
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from ringfa3.agreement.agreements import Agreements
from ringfa3.agreement.entries import Settings

PAUSE_S = 0.05  # between two plans
EARLY_S = 0.05
ROWS = ("requests", "barrier", "early", "entries")


class CountingStore:
    """Counts the requests of one rank, those of its clones included."""

    def __init__(self, store: dist.Store, counts: list[str]) -> None:
        self._store, self.counts = store, counts

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            if name == "clone":
                return CountingStore(self._store.clone(), self.counts)
            self.counts.append(name)
            return getattr(self._store, name)(*arguments)

        return call


def _agree(agreements: Agreements, row: str, plan: int, begin: float) -> float:
    """Seconds from the time at which all ranks begin."""
    settings = Settings({"plan.cu_seqlens": f"{row} {plan}", "q": "32 heads, head_dim 128"})
    if row == "early":
        agreements.expect(settings)
    time.sleep(max(begin - time.time(), 0))
    entry = {"settings": settings, "error": None, "mid_call": False}
    agreements.agree(settings, False, row == "entries", lambda: agreements.exchange(entry))
    return time.time() - begin


def _request(
    stores: list[dist.Store], ranks: list[int], world: int, plan: int, begin: float
) -> float:
    """The requests of a barrier, without the threads of `Barriers`."""
    last = -1
    time.sleep(max(begin - time.time(), 0))
    for rank, store in zip(ranks, stores, strict=True):
        if store.add(f"arrived/{plan}", 1) == world:
            others = [f"passed/{plan}/{r}" for r in range(world) if r != rank]
            store.multi_set(others, [""] * len(others))  # type: ignore[attr-defined]
            store.delete_key(f"arrived/{plan}")
            last = rank
    for rank, store in zip(ranks, stores, strict=True):
        if rank != last:
            store.wait([f"passed/{plan}/{rank}"], timedelta(seconds=30))
    seconds = time.time() - begin
    for rank, store in zip(ranks, stores, strict=True):
        if rank != last:
            store.delete_key(f"passed/{plan}/{rank}")
    return seconds


def _process(
    port: int, row: str, ranks: list[int], world: int, plans: int, pipe: Connection
) -> None:
    torch.set_num_threads(1)
    counts: dict[int, list[str]] = {rank: [] for rank in ranks}
    all_agreements = []
    for rank in ranks:
        own = dist.PrefixStore(row, dist.TCPStore("127.0.0.1", port, None, False))
        store: Any = CountingStore(own, counts[rank])
        agreements = Agreements(range(world), rank, store, lambda: 30.0, lambda: None)
        agreements._own_store = True
        all_agreements.append(agreements)
    pipe.send("ready")
    if row == "requests":
        stores = [agreements.store for agreements in all_agreements]
        for plan in range(plans):
            pipe.send(_request(stores, ranks, world, plan, pipe.recv()))
        pipe.send([len(operations) / plans for operations in counts.values()])
        pipe.recv()
        os._exit(0)
    with ThreadPoolExecutor(len(ranks)) as pool:
        for plan in range(plans):
            begin = pipe.recv()
            pipe.send(max(pool.map(lambda a: _agree(a, row, plan, begin), all_agreements)))  # noqa: B023
    time.sleep(0.5)  # deletions
    pipe.send([len(operations) / plans for operations in counts.values()])
    pipe.recv()
    os._exit(0)


def _measure(store: dist.TCPStore, row: str, options: argparse.Namespace) -> None:
    before, pipes, workers = store.num_keys(), [], []
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["ringfa3.agreement.agreements"])
    for i in range(options.processes):
        ours, theirs = context.Pipe()
        ranks = list(range(options.ranks))[i :: options.processes]
        job = store.port, row, ranks, options.ranks, options.plans, theirs
        workers.append(context.Process(target=_process, args=job))
        workers[-1].start()
        pipes.append(ours)
    for pipe in pipes:
        pipe.recv()
    lasts = []
    for _ in range(options.plans):
        time.sleep(PAUSE_S)
        begin = time.time() + EARLY_S
        for pipe in pipes:
            pipe.send(begin)
        lasts.append(max(pipe.recv() for pipe in pipes))
    requests = [count for pipe in pipes for count in pipe.recv()]
    print(
        f"{row:10}{statistics.median(lasts) * 1e3:10.2f}{max(lasts) * 1e3:10.2f}"
        f"{max(requests):16.2f}{statistics.mean(requests):8.2f}{store.num_keys() - before:11}",
        flush=True,
    )
    for pipe in pipes:
        pipe.send("end")
    for worker in workers:
        worker.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--plans", type=int, default=50)
    options = parser.parse_args()
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    print(f"{options.ranks} ranks in {options.processes} processes, {os.cpu_count()} cores")
    print(
        f"{'':10}{'median ms':>10}{'max ms':>10}{'requests, most':>16}{'mean':>8}{'keys left':>11}"
    )
    for row in ROWS:
        _measure(store, row, options)


if __name__ == "__main__":
    main()
