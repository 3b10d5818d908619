"""How processes meet on a store that others have used."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence

from torch._C._distributed_c10d import PrefixStore, Store

from ringfa3.agreement.entries import listed

POLL_S = 0.005


class AbsentError(TimeoutError):
    """Ranks did not join a rendezvous: `ranks`, as far as this rank can tell."""

    def __init__(self, ranks: Sequence[int], timeout_s: float) -> None:
        self.ranks = list(ranks)
        super().__init__(
            f"rank {listed(ranks)} did not join within {timeout_s:g} s: see that rank's log"
        )


def rendezvous(store: Store, rank: int, world: int, timeout_s: float) -> Store:
    """A part of `store` that belongs to exactly the processes that meet in this call.

    It has no keys of earlier processes: torchrun restarts a job on the store of the attempt before
    (agents of several hosts may count attempts differently), and a process may make a group anew.
    Rank 0 writes a fresh name; every other rank answers to it with a name of its own; rank 0 lists
    the answers. A rank that is not on the list has read the name of an earlier rendezvous, and
    reads again.

    Raises AbsentError after `timeout_s` seconds.
    """
    own, deadline = uuid.uuid4().hex, time.monotonic() + timeout_s
    if rank == 0:
        answers = [_answer_key(own, peer) for peer in range(1, world)]
        store.set(_NAME_KEY, own)
        while not store.check(answers):
            if time.monotonic() > deadline:
                raise AbsentError(_absent(store, own, rank, world), timeout_s)
            time.sleep(POLL_S)
        store.set(_list_key(own), " ".join(store.get(key).decode() for key in answers))
        return PrefixStore(own, store)
    name = ""
    while time.monotonic() < deadline:
        if store.check([_NAME_KEY]):
            name = store.get(_NAME_KEY).decode()
            store.set(_answer_key(name, rank), own)
            key = _list_key(name)
            if store.check([key]) and own in store.get(key).decode().split():
                return PrefixStore(name, store)
        time.sleep(POLL_S)
    raise AbsentError(_absent(store, name, rank, world), timeout_s)


_NAME_KEY = "rendezvous"


def _answer_key(name: str, rank: int) -> str:
    return f"{name}/{rank}"


def _list_key(name: str) -> str:
    return f"{name}/list"


def _absent(store: Store, name: str, rank: int, world: int) -> list[int]:
    """Ranks that have not answered; rank 0, if it has written no name or its list is complete."""
    if rank and (not name or store.check([_list_key(name)])):
        return [0]
    return [p for p in range(1, world) if not store.check([_answer_key(name, p)])] or [0]
