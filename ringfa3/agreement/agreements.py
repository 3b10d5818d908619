"""Agreements of the ranks of a CP group, over the group's store.

Where all ranks bring the same settings, a barrier of these settings is enough (`store.barriers`).
Otherwise each rank writes an entry, its settings or its error, and no rank goes on before it has
read all entries. So does a rank for which others do not come soon: it cannot know which it is.
"""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from ringfa3.agreement.barriers import Barriers
from ringfa3.agreement.entries import Settings, listed
from ringfa3.agreement.rendezvous import AbsentError, rendezvous
from ringfa3.agreement.store_monitor import PERIOD_S, entry_key, join_request_key
from ringfa3.errors import first_line, gave_up
from ringfa3.threads import JOIN_S

MAX_AGREEMENTS = 4096  # settings that a group remembers as agreed on
# Pauses between two looks for the entries of all ranks: the first one and the longest, for each
# rank (all ask one host, which takes 10 us for a key), and what the longest has at least.
POLL_S, RANK_POLL_S, LONGEST_POLL_S = 25e-6, 0.0003, 0.005
ASK_S = 0.1  # that a rank without trouble waits at a barrier, and before it asks others to join
BEFORE = "settings check before a ring call"
NO_STORE = "no answer from the process group's store; has its host (MASTER_ADDR) stopped?"


class NoAgreementError(Exception):
    """A rank did not enter, or the store does not answer; the message says which."""


class Agreements:
    """One rank's view of the agreements of its group.

    store          the group's, from the first agreement on a part of it that is this group's alone
    agreement_id   number of the latest agreement
    cache_version  changes whenever settings leave the cache of agreed ones
    """

    def __init__(
        self,
        ranks: Sequence[int],
        rank: int,
        store: Store,
        timeout_s: Callable[[], float],
        lost: Callable[[], str | None],
        ended: Callable[[], int | None] = lambda: None,
    ) -> None:
        """ranks: global ones, for messages; lost(): why a rank has given up, None if none has;
        ended(): a rank of the group whose process has ended."""
        self._ranks, self._rank, self.store = ranks, rank, store
        self._timeout_s, self._lost, self._ended = timeout_s, lost, ended
        self._own_store = False
        self._thread: threading.Thread | None = None
        self._barriers = Barriers(lambda: self.store, rank, len(ranks))
        self._agreed_anew = 0  # how often, in the same round of barriers
        self._agreed: OrderedDict[str, None] = OrderedDict()
        self.agreement_id = 0
        self.cache_version = 0

    def __contains__(self, settings: Settings) -> bool:
        """Whether the ranks have agreed on these settings before."""
        return settings.key in self._agreed

    def add(self, settings: Settings) -> None:
        self._agreed[settings.key] = None
        if len(self._agreed) > MAX_AGREEMENTS:
            self._agreed.popitem(last=False)
            self.cache_version += 1

    def end(self) -> None:
        """Waits for the latest agreement, whose threads may still delete keys. A thread that is in
        C++ when Python ends would abort the process."""
        self._barriers.end()
        if self._thread is not None:
            self._thread.join(JOIN_S)
        self.clear()

    def clear(self) -> None:
        self._agreed.clear()
        self.cache_version += 1

    def expect(self, settings: Settings) -> None:
        """Begins to agree on settings of a later call. Ranks may do so at any time, in any order.

        The first agreement of a group is that of a call.
        """
        if self._own_store and settings not in self:
            self._barriers.arrive_early(settings.key)

    def agree(
        self, settings: Settings, anew: bool, by_entries: bool, exchange: Callable[[], object]
    ) -> None:
        """All ranks call it at the same point, each with its settings.

        Args:
            anew: whether or not they have agreed on them before.
            by_entries: by an exchange of entries alone, which is the same on all ranks, or this
                rank has an error.
            exchange: exchanges entries, if need be, and raises if they differ.

        Raises NoAgreementError: the store does not answer.
        """
        self._agreed_anew += anew
        content = f"{self._agreed_anew} {settings.key}" if anew else settings.key
        if by_entries or not self._own_store or not self._pass_barrier(content):
            exchange()
        self._barriers.leave(content)
        self.add(settings)

    def _pass_barrier(self, content: str) -> bool:
        arrival = self._barriers.wait(content, ASK_S, self._timeout_s() - PERIOD_S)
        if arrival.problem is not None or not arrival.decided.is_set():
            because = "" if arrival.problem is None else f" ({arrival.problem})"
            raise NoAgreementError(f"{BEFORE}: {NO_STORE}{because}")
        return arrival.passed

    def restart_barriers(self) -> None:
        """After entries with an error or a difference, which all ranks have read."""
        self._agreed_anew = 0
        self._barriers.restart()

    def exchange(self, entry: Mapping[str, object]) -> list[dict[str, Any]]:
        """Writes this rank's entry and reads those of all ranks.

        Raises NoAgreementError after the timeout, or as soon as another rank has given up.
        """
        self.agreement_id += 1
        agreement_id = self.agreement_id
        keys = [entry_key(agreement_id, r) for r in range(len(self._ranks))]
        entries: list[dict[str, Any]] = []
        problem = [f"{BEFORE}: {NO_STORE}"]

        def hopeless() -> bool:
            return self._lost() is not None or self._is_ended(keys)

        done = threading.Event()
        limit = self._timeout_s() - PERIOD_S
        deadline = time.monotonic() + limit

        def enter() -> None:
            try:
                if not self._own_store:  # a group of the same name may have left its keys
                    shared = PrefixStore("ringfa3", self.store)
                    self.store = rendezvous(shared, self._rank, len(self._ranks), limit)
                    self._own_store = True
                self.store.set(keys[self._rank], json.dumps(entry))
                trouble = entry["error"] is not None or entry["mid_call"]
                all_set = not trouble and self._all_set(keys, ASK_S, hopeless)
                if not all_set:
                    self.store.set(join_request_key(agreement_id), "")
                    all_set = self._all_set(keys, deadline - time.monotonic(), hopeless)
                if all_set:
                    entries.extend(json.loads(e) for e in self.store.multi_get(keys))
                    done.set()  # the caller goes on
                    self._delete_keys(agreement_id - 2)
                else:
                    problem[0] = self._why_not(keys)
            except AbsentError as error:
                problem[0] = self._no_word([self._ranks[r] for r in error.ranks])
            except dist.DistError as error:
                problem[0] = f"{BEFORE}: {NO_STORE} ({error})"
            except Exception as error:  # raised below: nobody sees this thread's own
                problem[0] = f"{BEFORE}: {type(error).__name__}: {first_line(error)}"
            finally:
                done.set()

        # on a thread of its own: a call of a store whose host is stopped has no timeout
        self._thread = threading.Thread(target=enter, daemon=True, name="ringfa3-agreement")
        self._thread.start()
        if not done.wait(limit + 3 * PERIOD_S) or not entries:
            raise NoAgreementError(problem[0])
        return entries

    def meet(self, where: str) -> bool:
        """Whether all ranks meet at a point that each of them passes once, before the timeout."""
        keys = [f"ringfa3/{where}/{r}" for r in range(len(self._ranks))]
        with suppress(RuntimeError):  # the store's host has gone
            self.store.set(keys[self._rank], "")
            return self._all_set(keys, self._timeout_s(), lambda: self._lost() is not None)
        return False

    def _delete_keys(self, agreement_id: int) -> None:
        """Deletes this rank's keys of an agreement: all ranks have entered a later one."""
        if agreement_id > 0:
            self.store.delete_key(entry_key(agreement_id, self._rank))
            if self._rank == 0:
                self.store.delete_key(join_request_key(agreement_id))

    def _all_set(self, keys: list[str], seconds: float, hopeless: Callable[[], bool]) -> bool:
        """Whether the keys are set in time. `Store.wait` would log its timeout as a warning."""
        deadline = time.monotonic() + seconds
        if self.store.check(keys):
            return True
        world = len(self._ranks)
        pause, longest = POLL_S * world, max(RANK_POLL_S * world, LONGEST_POLL_S)
        for key in keys:  # one at a time: a rank that all others wait for may be late by minutes
            while not self.store.check([key]):
                if time.monotonic() > deadline or hopeless():
                    return False
                time.sleep(pause)
                pause = min(2 * pause, longest)
        return True

    def _is_ended(self, keys: list[str]) -> bool:
        """Whether the process of a rank has ended before it has set its key."""
        ended = self._ended()
        return ended is not None and not self.store.check([keys[ended]])

    def _why_not(self, keys: list[str]) -> str:
        """Why not all keys are set."""
        if cause := self._lost():
            return gave_up(BEFORE, cause)
        if self._is_ended(keys):
            rank = self._ranks[self._ended() or 0]
            return (
                f"{BEFORE}: rank {rank} did not reach it: its process has ended, or has destroyed "
                "this process group: see that rank's log"
            )
        absent = [r for r, k in zip(self._ranks, keys, strict=True) if not self.store.check([k])]
        return self._no_word(absent)

    def _no_word(self, ranks: Sequence[int]) -> str:
        return (
            f"{BEFORE}: rank {listed(ranks)} did not reach it within {self._timeout_s():g} s: see "
            "that rank's log"
        )
