"""How long the ranks of a large group take to agree on a new plan, on one host without a GPU.

    python -m benchmarks.agreement_load [--ranks 64] [--processes 2] [--plans 50]

Each rank has a connection of its own to one store, so the requests of a group of this size meet at
one store. All ranks begin a plan at the same time. Columns: median and largest time over the plans,
from that time until the last rank goes on; CPU time of the store's host for a plan; requests of a
rank and plan, the mean and the most; requests of rank 0, which reads for the others in a large
group.

    all read   the requests alone of an agreement in which each rank reads all entries, one after
               the other in each process: the cost of the store, without the ranks' threads
    requests   the same where rank 0 reads for all
    agreement  each rank is a thread in `Agreements.exchange`: on few cores most of the time is
               spent on switches between these threads

A connection takes 5 s where a reply of the name server is lost: PyTorch asks for its host's name.
`RES_OPTIONS="timeout:1 attempts:1"` makes it one second.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from ringfa3.ring.agreement import Agreements
from ringfa3.schedules.settings import Settings

LEAD_S = 0.1  # between the order to begin and the begin
ROWS = ("all read", "requests", "agreement")


class CountingStore:
    """Counts the requests of one rank."""

    def __init__(self, store: dist.Store) -> None:
        self._store, self.count = store, 0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self.count += 1
            return getattr(self._store, name)(*arguments)

        return call


def _entry(plan: int) -> dict[str, object]:
    settings = Settings({f"setting {i}": f"value {i} of plan {plan}" for i in range(14)})
    return {"settings": settings, "error": None, "mid_call": False, "call": plan, "void": plan + 1}


def _agree(agreements: Agreements, plan: int, begin: float) -> float:
    """Seconds from the time at which all ranks begin."""
    time.sleep(max(begin - time.time(), 0))
    assert len(agreements.exchange(_entry(plan))) == len(agreements._ranks)
    return time.time() - begin


def _request(stores: dict[int, Any], world: int, all_read: bool, plan: int, begin: float) -> float:
    """The requests of an agreement, without `Agreements` and its threads."""
    entry, keys = json.dumps(_entry(plan)), [f"{plan}/{rank}" for rank in range(world)]
    time.sleep(max(begin - time.time(), 0))
    for rank, store in stores.items():
        store.set(keys[rank], entry)
    readers = [store for rank, store in stores.items() if all_read or rank == 0]
    for store in readers:
        while not store.check(keys):
            time.sleep(0.0005)
        assert {value.decode() for value in store.multi_get(keys)} == {entry}
    if not all_read and 0 in stores:
        stores[0].set(f"{plan}/equal", "")
    for rank, store in stores.items():
        while not (all_read or rank == 0 or store.check([f"{plan}/equal"])):
            time.sleep(0.0005)
    seconds = time.time() - begin
    for rank, store in stores.items():  # all ranks have entered a later one
        store.delete_key(f"{plan - 1}/{rank}")
    return seconds


def _process(port: int, row: str, ranks: list[int], world: int, pipe: Connection) -> None:
    """Runs one plan for each time that it receives."""
    torch.set_num_threads(1)
    stores: dict[int, Any] = {}
    all_agreements = []
    for rank in ranks:
        own = dist.PrefixStore(row, dist.TCPStore("127.0.0.1", port, None, False))
        stores[rank] = CountingStore(own)
        agreements = Agreements(range(world), rank, stores[rank], lambda: 30.0, lambda: None)
        agreements._own_store = True
        all_agreements.append(agreements)
    pipe.send("ready")
    with ThreadPoolExecutor(len(ranks)) as pool:
        plan = 0
        while (begin := pipe.recv()) is not None:
            plan += 1
            if row != "agreement":
                pipe.send(_request(stores, world, row == "all read", plan, begin))
            else:
                pipe.send(max(pool.map(lambda a: _agree(a, plan, begin), all_agreements)))  # noqa: B023
    time.sleep(0.5)  # deletions
    pipe.send({rank: store.count / plan for rank, store in stores.items()})
    pipe.recv()
    os._exit(0)


def _measure(store: dist.TCPStore, row: str, options: argparse.Namespace) -> None:
    pipes, workers = [], []
    context = multiprocessing.get_context("spawn")
    for i in range(options.processes):
        ours, theirs = context.Pipe()
        job = store.port, row, list(range(i, options.ranks, options.processes)), options.ranks
        workers.append(context.Process(target=_process, args=(*job, theirs)))
        workers[-1].start()
        theirs.close()
        pipes.append(ours)
    for pipe in pipes:
        pipe.recv()
    lasts, before = [], time.process_time()
    for _ in range(options.plans):
        begin = time.time() + LEAD_S
        for pipe in pipes:
            pipe.send(begin)
        lasts.append(max(pipe.recv() for pipe in pipes))
    cpu = (time.process_time() - before) / options.plans
    counts: dict[int, float] = {}
    for pipe in pipes:
        pipe.send(None)
        counts.update(pipe.recv())
        pipe.send("end")
    for worker in workers:
        worker.join()
    of_zero = counts.pop(0)
    print(
        f"{row:10}{statistics.median(lasts) * 1e3:10.2f}{max(lasts) * 1e3:10.2f}{cpu * 1e3:10.2f}"
        f"{statistics.mean(counts.values()):10.2f}{max(counts.values()):8.2f}{of_zero:8.2f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--plans", type=int, default=50)
    options = parser.parse_args()
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    print(f"{options.ranks} ranks in {options.processes} processes, {os.cpu_count()} cores")
    columns = "median ms", "max ms", "CPU ms", "requests"
    print(" " * 10 + "".join(f"{c:>10}" for c in columns) + f"{'most':>8}{'rank 0':>8}")
    for row in ROWS:
        _measure(store, row, options)


if __name__ == "__main__":
    main()
