"""Agreements of the ranks of a CP group, by words in host memory or over the group's store.

Each rank has an entry, its settings or its error; no rank goes on before it knows all entries.
Ranks that share host memory write a digest of their entries there: where all are equal, they ask
the store for nothing. Otherwise they write their entries to the store. In a large group rank 0
alone reads them, and reports if they are equal. Without a report in time, as where entries differ,
each rank reads them itself.

Ranks look for keys again and again. To wait in the store would take a connection of its own, as
PyTorch holds one for as long as a request waits. The store looks up the host name of each new
connection, and answers nobody meanwhile: for 5 to 10 s where a name server's reply is lost.
"""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from typing import Any, NamedTuple, TypeAlias

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from ringfa3.errors import first_line, gave_up, rank_numbers
from ringfa3.ring.process_group import AbsentError, rendezvous
from ringfa3.ring.store_monitor import PERIOD_S, entry_key, join_request_key
from ringfa3.schedules.settings import Settings
from ringfa3.threads import JOIN_S

MAX_AGREEMENTS = 4096  # settings that a group remembers as agreed on
# Pauses between two looks. All ranks ask one host, which takes 10 us to look for 8 keys and 80 us
# for 256.
POLL_S = 25e-6  # the first pause, for each rank of the group
LONGEST_POLL_S = 0.005  # the longest pause
REPORT_POLL_S = 150e-6  # the longest of a rank of a large group until `ASK_S`, for each rank
LATE_POLL_S = 500e-6  # the same after `ASK_S`
ALL_READ = 8  # ranks; in larger groups rank 0 reads for all: the others would read world**2 entries
ASK_S = 0.1  # that a rank without trouble waits before it asks others to join, and reads itself
# For words of other ranks a rank spins first: most new plans reach all ranks at the same time.
SPIN_S = 50e-6
LONGEST_WORD_PAUSE_S = 0.001
DIGEST_BITS, NUMBERS = 48, (1 << 15) - 1  # a word is positive in 64 bits
BEFORE = "settings check before a ring call"
NO_STORE = "no answer from the process group's store; has its host (MASTER_ADDR) stopped?"
ERRORS: dict[str, type[Exception]] = {"ValueError": ValueError, "TypeError": TypeError}
PER_RANK_FIELDS = {"line", "at"}  # of an entry: they differ between ranks
Look: TypeAlias = Callable[[], bool | None]


def _report_key(agreement_id: int) -> str:
    """Set by rank 0 of a large group: all entries are equal."""
    return f"ringfa3/equal/{agreement_id}"


class AgreementSnapshot(NamedTuple):
    """What ranks agreed on for a call; calls like it begin without a new agreement.

    settings       of that call
    cache_version  of the group's `Agreements` then
    """

    settings: Settings
    cache_version: int


class NoAgreementError(Exception):
    """A rank did not enter, or the store does not answer; the message says which."""


class AgreementWords:
    """Words of 64 bits in host memory that all ranks have mapped: one for each parity and rank.

    A word has an agreement's number, which is never 0, and a digest of the rank's entry. Processors
    read and write an aligned word at once, so number and digest belong together, in whatever order
    memory becomes visible.

    Two words a rank suffice. A rank writes its word of agreement n after agreement n - 1. So all
    ranks have entered n - 1, which they do after n - 2. Nobody reads words of n - 2 any more, which
    have the parity of n. With one word a fast rank would overwrite what a slow one has not read,
    and one rank would see equal words where another does not.
    """

    def __init__(self, words: memoryview, rank: int, world: int) -> None:
        """words: (2 * world,) int64, zeros before the first agreement."""
        self._words, self._rank, self._world = words, rank, world
        self._first = self._own = 0  # of the latest agreement: its first word, this rank's value

    def write(self, agreement_id: int, entry: str) -> None:
        """Enters an agreement."""
        digest = blake2b(entry.encode(), digest_size=DIGEST_BITS // 8).digest()
        number = (agreement_id % NUMBERS + 1) << DIGEST_BITS
        self._own = number | int.from_bytes(digest, "big")
        self._first = agreement_id % 2 * self._world
        self._words[self._first + self._rank] = self._own

    def equal(self) -> bool | None:
        """Whether all entries of the agreement equal this rank's; None: some are not there yet.

        All ranks that see all words see the same.
        """
        words = self._words[self._first : self._first + self._world].tolist()
        if words.count(self._own) == self._world:
            return True
        number = self._own >> DIGEST_BITS
        differs = any(x >> DIGEST_BITS == number and x != self._own for x in words)
        return False if differs else None

    def entered(self, rank: int) -> bool:
        """Whether that rank has entered the agreement."""
        return self._words[self._first + rank] >> DIGEST_BITS == self._own >> DIGEST_BITS

    def wait(self, seconds: float, lost: Callable[[], str | None]) -> bool | None:
        """As `equal`, after at most so long for other ranks. lost: as for `Agreements`."""
        begin = time.monotonic()
        while (equal := self.equal()) is None and not lost():
            waited = time.monotonic() - begin
            if waited > seconds:
                break
            if waited > SPIN_S:
                time.sleep(min(waited / 4, LONGEST_WORD_PAUSE_S))
        return equal


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
        words: Callable[[], AgreementWords | None] = lambda: None,
    ) -> None:
        """ranks: global ones, for messages; lost(): why a rank has given up, None if none has;
        words(): those of the ranks' memory, None if they share none."""
        self._ranks, self._rank, self.store = ranks, rank, store
        self._timeout_s, self._lost, self._words = timeout_s, lost, words
        self._written: dict[int, list[str]] = {}  # keys in the store, by number of the agreement
        self._own_store = False
        self._thread: threading.Thread | None = None
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
        """Waits for the latest agreement, whose thread may still delete keys. A thread that is in
        C++ when Python ends would abort the process."""
        if self._thread is not None:
            self._thread.join(JOIN_S)
        self.clear()

    def clear(self) -> None:
        self._agreed.clear()
        self.cache_version += 1

    def exchange(self, entry: Mapping[str, object]) -> list[dict[str, Any]]:
        """Passes this rank's entry and returns those of all ranks.

        Raises NoAgreementError after the timeout, or as soon as another rank has given up.
        """
        self.agreement_id += 1
        words = self._words()
        trouble = entry["error"] is not None or bool(entry["mid_call"])
        reads = trouble or not entry.keys().isdisjoint(PER_RANK_FIELDS)
        if words is not None:
            words.write(self.agreement_id, json.dumps(entry) if reads else _digest_of(entry))
            equal = False if reads else words.wait(ASK_S, self._lost)
            if equal:
                return [dict(entry)] * len(self._ranks)
            if equal is False:
                words = None
        return self._by_store(json.dumps(entry), trouble, reads, words)

    def _by_store(
        self, own: str, trouble: bool, reads: bool, words: AgreementWords | None
    ) -> list[dict[str, Any]]:
        """The entries of all ranks; `own` is this rank's.

        trouble: this rank does not wait before it asks others to join. reads: all entries itself.
        words: for which it has waited. A rank that finds all of them comes late, and goes on.
        """
        agreement_id, world = self.agreement_id, len(self._ranks)
        keys = [entry_key(agreement_id, r) for r in range(world)]
        report = _report_key(agreement_id)
        polls_often = world <= ALL_READ or self._rank == 0
        reads = reads or polls_often
        entries: list[dict[str, Any]] = []
        problem = [f"{BEFORE}: {NO_STORE}"]
        done = threading.Event()
        limit = self._timeout_s() - PERIOD_S
        deadline = time.monotonic() + limit

        def write(key: str, value: str) -> None:
            self._written.setdefault(agreement_id, []).append(key)
            self.store.set(key, value)

        def enter() -> None:
            try:
                if not self._own_store:  # a group of the same name may have left its keys
                    shared = PrefixStore("ringfa3", self.store)
                    self.store = rendezvous(shared, self._rank, world, limit)
                    self._own_store = True
                write(keys[self._rank], own)
                longest = [LONGEST_POLL_S] * 2
                if not polls_often:
                    longest = [max(LONGEST_POLL_S, s * world) for s in (REPORT_POLL_S, LATE_POLL_S)]
                all_set: Look = partial(self.store.check, keys)
                looks, found = [all_set], None
                if not reads:
                    looks.insert(0, partial(self.store.check, [report]))
                if words is not None:
                    looks.insert(0, words.equal)
                elif not trouble:
                    if not reads:
                        time.sleep(POLL_S * world)  # rank 0 has to read first
                    found = self._first_true(looks[:1], ASK_S, longest[0])
                if found is None:
                    write(join_request_key(agreement_id), "")
                    found = self._first_true(looks, deadline - time.monotonic(), longest[1])
                if found is None:
                    cause = self._lost()
                    problem[0] = gave_up(BEFORE, cause) if cause else self._absent(keys, words)
                else:
                    mine = [own.encode()] * world
                    values = self.store.multi_get(keys) if found is all_set else mine
                    different = set(values)
                    reports = world > ALL_READ and self._rank == 0 and found is all_set
                    if reports and len(different) == 1:
                        write(report, "")
                    parsed = {value: json.loads(value) for value in different}
                    entries.extend(parsed[value] for value in values)
                    done.set()  # the caller goes on
                    self._delete_keys(agreement_id - 2)
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
        try:
            self.store.set(keys[self._rank], "")
            met = self._first_true([partial(self.store.check, keys)], self._timeout_s())
        except RuntimeError:  # the store's host has gone
            return False
        return met is not None

    def _delete_keys(self, last: int) -> None:
        """Deletes this rank's keys up to agreement `last`: all ranks have entered a later one."""
        for agreement_id in [i for i in list(self._written) if i <= last]:
            for key in self._written.pop(agreement_id):
                self.store.delete_key(key)

    def _first_true(
        self, looks: Sequence[Look], seconds: float, longest: float = LONGEST_POLL_S
    ) -> Look | None:
        """The first of these looks that returns true; None: none in time.

        `Store.wait` would log its timeout as a warning.
        """
        deadline = time.monotonic() + seconds
        pause = min(POLL_S * len(self._ranks), longest)
        while True:
            for look in looks:
                if look():
                    return look
            if time.monotonic() > deadline or self._lost():
                return None
            time.sleep(pause)
            pause = min(2 * pause, longest)

    def _absent(self, keys: list[str], words: AgreementWords | None) -> str:
        absent = [
            self._ranks[r]
            for r, key in enumerate(keys)
            if not (self.store.check([key]) or (words is not None and words.entered(r)))
        ]
        return self._no_word(absent)

    def _no_word(self, ranks: Sequence[int]) -> str:
        return (
            f"{BEFORE}: rank {rank_numbers(ranks)} did not reach it within {self._timeout_s():g} s"
            ": see that rank's log"
        )


def _digest_of(entry: Mapping[str, Any]) -> str:
    """Text for a digest of an entry without an error: no such entry with other values has it."""
    return f"{entry['settings'].fingerprint} {entry['void']} {entry['call']}"


def described(error: Exception | None) -> list[str] | None:
    """(key of `ERRORS`, text) of a rank's error, as a list; None for no error."""
    if error is None:
        return None
    name = type(error).__name__
    if name in ERRORS:
        return [name, str(error)]
    builtin = "TypeError" if isinstance(error, TypeError) else "ValueError"
    return [builtin, f"{name}: {first_line(error)}"]


def check_entries(ranks: Sequence[int], entries: Sequence[Mapping[str, Any]]) -> None:
    """Raises the first error of an entry, or ValueError for the first setting that differs."""
    _raise_on_error(ranks, entries)
    _raise_on_difference(ranks, entries)


def _raise_on_error(ranks: Sequence[int], entries: Sequence[Mapping[str, Any]]) -> None:
    """Raises the error of the first of `ranks` whose entry has one, under that rank's number."""
    wrong = [(r, e["error"]) for r, e in zip(ranks, entries, strict=True) if e["error"]]
    if wrong:
        rank, (name, text) = wrong[0]
        others = f" (and {len(wrong) - 1} more ranks)" if len(wrong) > 1 else ""
        raise ERRORS[name](f"rank {rank}: {text}{others}")


def _raise_on_difference(ranks: Sequence[int], entries: Sequence[Mapping[str, Any]]) -> None:
    """Raises ValueError for the first setting that differs over `ranks`, with all its values.

    Settings that only some ranks have come last.
    """
    maps: list[Mapping[str, object]] = [entry["settings"] for entry in entries]
    if all(m is maps[0] for m in maps):  # as ranks mostly agree
        return
    everywhere = [name for name in maps[0] if all(name in m for m in maps)]
    for name in [*everywhere, *sorted(set().union(*maps) - set(everywhere))]:
        values: dict[str, list[int]] = {}
        for rank, settings in zip(ranks, maps, strict=True):
            values.setdefault(str(settings.get(name, "missing")), []).append(rank)
        if len(values) > 1:
            groups = sorted(values.items(), key=lambda item: len(item[1]))
            text = "; ".join(f"rank {rank_numbers(ranks)}: {value}" for value, ranks in groups)
            raise ValueError(f"{name} differs between the ranks of the CP group: {text}")
