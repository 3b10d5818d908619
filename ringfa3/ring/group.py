"""A context group's means of talking: agreement before a call, point-to-point during it.

Agreement runs on a side channel, the group's store: every rank leaves its verdict and what it is
about to do, nobody raises before all have, and then all raise or none. Tensors travel on a
process group of our own, so that they never mix with the user's collectives.

A rank that waits for a peer keeps an eye on that side channel as well. So the message that names
the cause reaches every rank, also where only one rank enters an agreement at all.
"""

from __future__ import annotations

import atexit
import json
import threading
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from ringfa3.errors import RingError, StepError, first_line
from ringfa3.ring.p2p import TRANSPORTS, Transport
from ringfa3.ring.process_group import AbsentError, alive, meet, new_group, timeout_of
from ringfa3.ring.store_monitor import GLANCE_S, Lookout, entry_key, summons_key
from ringfa3.symmetric.backend import CudaMachine, open_machine

AGREEMENTS_KEPT = 4096  # keys of (plan, shapes) already agreed on
POLL_S = (0.001, 0.005)  # between looks at the store for entries, at first and in the end
ERRORS: dict[str, type[Exception]] = {"ValueError": ValueError, "TypeError": TypeError}


class Settings(dict[str, str]):
    """What must be equal on all ranks of a call: arguments' names and values. Never changed."""

    @cached_property
    def key(self) -> str:
        return json.dumps(self, sort_keys=True)


class RingGroup:
    """One rank's view of a context group. `RingGroup.of(group)` makes it once per group."""

    _known: dict[dist.ProcessGroup, RingGroup] = {}  # noqa: RUF012

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.ranks = dist.get_process_group_ranks(group)  # global ranks, for messages
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self.timeout = timeout_of(group)
        self.store, self.name = group.get_group_store(), group.group_name
        self._met = False  # whether `store` is this group's alone, as from the first agreement on
        self.failure: str | None = None
        self.call = 0  # ring calls begun, forward and backward
        self.settings = Settings()  # of the call under way
        self.epoch = 0
        self._generation = 0  # of the transports: a refusal in mid-call leaves messages on them
        self._refused = False  # the call under way was refused on all ranks
        self._agreed: OrderedDict[str, None] = OrderedDict()
        self._transports: dict[str, Transport] = {}
        self._abandoned: list[Transport | CudaMachine] = []  # kept: peers may still write or read
        self._machine: CudaMachine | str | None = None  # or why there is none
        self._alive = partial(alive, group)
        self._lookout: Lookout | None = None
        self.moved_by: str | None = None  # the transport of the latest call

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> RingGroup:
        if group not in cls._known:
            cls.close_ended()
            cls._known[group] = cls(group)
        return cls._known[group]

    @classmethod
    def close_ended(cls) -> None:
        """Those whose group has been destroyed."""
        for old in [g for g in cls._known if not alive(g)]:
            cls._known.pop(old).close()

    @classmethod
    def close_all(cls) -> None:
        """At the end of the process."""
        while cls._known:
            cls._known.popitem()[1].close()

    def close(self) -> None:
        """Ends the threads. Process groups end with the default group, or with the process."""
        if self._lookout is not None:
            self._lookout.end()
        for transport in (*self._abandoned, *self._transports.values()):
            transport.close()
        if isinstance(self._machine, CudaMachine):
            self._machine.close()

    def transport(self, name: str, device: torch.device) -> Transport:
        """The transport `nccl` or `gloo`; its process group is made at the first call.

        All ranks make it together: a first call may leave some of them without messages.
        """
        if name not in self._transports:
            self._look_out()
            try:
                own = f"{self.name}/ringfa3/{name}/{self._generation}"
                p2p = new_group(self.ranks, self.rank, name, self.store, own, self.timeout)
                dist.all_reduce(torch.zeros(1, device=device), group=p2p)  # connects all ranks
                self._transports[name] = TRANSPORTS[name](self, p2p)
            except RuntimeError as problem:
                raise self.fail(f"connecting over {name}: {first_line(problem)}") from None
        self.moved_by = name
        return self._transports[name]

    def machine(self, device: torch.device) -> CudaMachine | str:
        """The machine of the `symmetric` transport, or why this group cannot have one.

        Tried at the first call, by all ranks together, who find the same.
        """
        if self._machine is None:
            self._look_out()
            self._machine = open_machine(self, device)
        if isinstance(self._machine, CudaMachine):
            self.moved_by = "symmetric"
        return self._machine

    @property
    def opened(self) -> CudaMachine | None:
        """The machine, if it has been tried and works."""
        return self._machine if isinstance(self._machine, CudaMachine) else None

    def may_pull(self, transport: str) -> bool:
        """Whether a call of CUDA tensors takes the machine, or has to try it first."""
        return transport in ("auto", "symmetric") and not isinstance(self._machine, str)

    def _look_out(self) -> None:
        if self._lookout is None:  # made now: once it is needed, the store may not answer
            self._lookout = Lookout(self, self.store, self._alive)

    @property
    def timeout_s(self) -> float:
        return self.timeout.total_seconds()

    def alarm(self) -> str | None:
        """What another rank said that gave up."""
        return self._lookout.alarm if self._lookout is not None else None

    def gather(self, line: str) -> list[str]:
        """A line of every rank; all enter at the same point of a call."""
        settings = {**self.settings, "place": f"call {self.call}, its memory"}
        entry: dict[str, object] = {
            "settings": settings,
            "error": None,
            "inside": False,
            "line": line,
        }
        return [str(e["line"]) for e in self._enter(entry)]

    @property
    def identity(self) -> int:
        """Of the call under way: 28 bits that all ranks in it have in common."""
        return zlib.crc32(f"{self.call} {self.settings.key}".encode()) >> 4

    def begin(self, settings: Settings) -> None:
        """Marks the start of a ring call with settings that were agreed on.

        Raises:
            RingError: an earlier call failed; the group's connections are in no known state.
            ValueError, TypeError: another rank refuses this call or the one before.
        """
        if self.failure is not None:
            raise RingError(f"the context group is lost since: {self.failure}")
        self.call += 1
        self.settings, self._refused = settings, False
        if self._lookout is not None and self._lookout.summons == self.epoch + 1:
            self._answer("before its first hop")

    def _answer(self, place: str) -> None:
        """Joins an agreement that only ranks in trouble have entered; it raises on all of them."""
        settings = {**self.settings, "place": f"call {self.call}, {place}"}
        self._enter({"settings": settings, "error": None, "inside": True})

    def agree(self, settings: Settings, error: Exception | None = None) -> None:
        """Returns if every rank enters with equal settings and no error, else raises on all.

        Costs nothing when these settings were agreed on before. Every rank must call it at the
        same point.

        Raises:
            ValueError, TypeError: naming the rank, the argument and its value.
            RingError: a rank did not come within the timeout.
        """
        if error is None and settings.key in self._agreed:
            return
        if self.failure is not None:
            raise RingError(f"the context group is lost since: {self.failure}")
        self._enter({"settings": settings, "error": _described(error), "inside": False})
        self._agreed[settings.key] = None
        if len(self._agreed) > AGREEMENTS_KEPT:
            self._agreed.popitem(last=False)

    def _enter(self, entry: dict[str, object]) -> list[dict[str, object]]:
        """Meets the other ranks, and raises on all of them unless all can go on; their entries."""
        entries = self._meet({**entry, "call": self.call})
        try:
            self._raise_on_error(entries)
            self._raise_on_difference([e["settings"] for e in entries])
            return entries
        except (TypeError, ValueError):
            self._refused = True
            self.call = max(cast(int, e["call"]) for e in entries)
            if any(e["inside"] for e in entries):  # their messages will never be answered
                self._abandoned += self._transports.values()
                self._transports = {}
                self._agreed.clear()
                self._generation += 1
                if isinstance(self._machine, CudaMachine):
                    self._machine.abandon()
                    self._abandoned.append(self._machine)
                    self._machine = None
            raise

    def _meet(self, entry: Mapping[str, object]) -> list[dict[str, object]]:
        """Leaves this rank's entry and reads those of all."""
        self.epoch += 1
        keys = [entry_key(self.epoch, r) for r in range(self.world)]
        found: list[dict[str, object]] = []
        problem = ["the store does not answer; is its host stopped?"]
        done = threading.Event()
        deadline = time.monotonic() + self.timeout_s - GLANCE_S

        def enter() -> None:
            try:
                if not self._met:  # a group of the same name may have left its keys
                    shared = PrefixStore("ringfa3", self.store)
                    self.store = meet(shared, self.rank, self.world, self.timeout_s - GLANCE_S)
                    self._met = True
                self.store.set(keys[self.rank], json.dumps(entry))
                trouble = entry["error"] is not None or entry["inside"]
                if trouble or not self._all_there(keys, GLANCE_S):
                    self.store.set(summons_key(self.epoch), "")
                if self._all_there(keys, deadline - time.monotonic()):
                    found.extend(json.loads(e) for e in self.store.multi_get(keys))
                    self._clear(self.epoch - 2)
                else:
                    problem[0] = self._absent(keys)
            except AbsentError as error:
                problem[0] = self._no_word([self.ranks[r] for r in error.ranks])
            except dist.DistError as error:
                problem[0] = f"the store does not answer ({error})"
            done.set()

        # on a thread of its own: a store whose host is stopped answers to no timeout
        threading.Thread(target=enter, daemon=True, name="ringfa3-meeting").start()
        if not done.wait(self.timeout.total_seconds() + 2 * GLANCE_S) or not found:
            raise self.fail(f"agreement before a ring call: {problem[0]}")
        return found

    def _clear(self, epoch: int) -> None:
        """Everyone has read its entries: all have entered the agreement after it."""
        if epoch > 0:
            self.store.delete_key(entry_key(epoch, self.rank))
            if self.rank == 0:
                self.store.delete_key(summons_key(epoch))

    def _all_there(self, keys: list[str], seconds: float) -> bool:
        """Whether the keys are set in time. `Store.wait` would log its timeout as a warning."""
        deadline = time.monotonic() + seconds
        pause, longest = POLL_S
        while not self.store.check(keys):
            if time.monotonic() > deadline or self.failure is not None:
                return False
            time.sleep(pause)
            pause = min(2 * pause, longest)
        return True

    def _absent(self, keys: list[str]) -> str:
        absent = [r for r, k in zip(self.ranks, keys, strict=True) if not self.store.check([k])]
        return self._no_word(absent)

    def _no_word(self, ranks: Sequence[int]) -> str:
        return f"no word from rank {_listed(ranks)} within {self.timeout_s:g} s"

    def _raise_on_error(self, entries: Sequence[Mapping[str, Any]]) -> None:
        wrong = [(r, e["error"]) for r, e in zip(self.ranks, entries, strict=True) if e["error"]]
        if wrong:
            rank, (kind, text) = wrong[0]
            others = f" (and {len(wrong) - 1} more ranks)" if len(wrong) > 1 else ""
            raise ERRORS[kind](f"rank {rank}: {text}{others}")

    def _raise_on_difference(self, settings: Sequence[object]) -> None:
        maps = [s if isinstance(s, dict) else {} for s in settings]
        everywhere = [name for name in maps[0] if all(name in m for m in maps)]
        for name in [*everywhere, *sorted(set().union(*maps) - set(everywhere))]:
            values: dict[str, list[int]] = {}
            for rank, s in zip(self.ranks, maps, strict=True):
                values.setdefault(str(s.get(name, "missing")), []).append(rank)
            if len(values) > 1:
                groups = sorted(values.items(), key=lambda item: len(item[1]))
                said = "; ".join(f"rank {_listed(ranks)}: {value}" for value, ranks in groups)
                raise ValueError(f"{name} differs over the ranks of the context group: {said}")

    def fail(self, message: str) -> RingError:
        """Marks the group lost, tells the other ranks, and returns the error to raise.

        Streams that wait for peers go on.
        """
        full = f"rank {self.ranks[self.rank]}: {message}"
        self.failure = full
        if isinstance(self._machine, CudaMachine):
            self._machine.abandon()

        def tell() -> None:
            with suppress(dist.DistError):  # a store that is gone has nobody to tell
                self.store.set("ringfa3/failure", full)

        teller = threading.Thread(target=tell, daemon=True, name="ringfa3-teller")
        teller.start()
        teller.join(2 * GLANCE_S)  # a store whose host is stopped must not hold us
        return RingError(full)

    def __enter__(self) -> None:
        """Around this rank's part of a ring call: tells the other ranks if an error ends it."""

    def __exit__(self, _: object, problem: BaseException | None, __: object) -> None:
        known = self._refused or isinstance(problem, StepError)
        if isinstance(problem, Exception) and self.failure is None and not known:
            self.fail(f"{type(problem).__name__}: {first_line(problem)}")

    def await_event(self, done: threading.Event, what: Callable[[], str]) -> None:
        """Waits for `done`, watching for other ranks' trouble; `what` says what for.

        Raises:
            RingError: after the timeout, or as soon as another rank has given up.
            ValueError, TypeError: another rank has refused this call, or is in another one.
        """
        if done.wait(GLANCE_S):
            return
        assert self._lookout is not None
        with self._lookout as lookout:
            deadline = time.monotonic() + self.timeout.total_seconds() - GLANCE_S
            while not done.wait(GLANCE_S / 5):
                if lookout.summons == self.epoch + 1:
                    self._answer(what())
                if lookout.alarm is not None:
                    raise self.fail(f"{what()}: gave up because {lookout.alarm}")
                if time.monotonic() > deadline:
                    seconds = self.timeout.total_seconds()
                    raise self.fail(
                        f"{what()}: nothing within {seconds:g} s; is that rank stopped?"
                    )


def _described(error: Exception | None) -> list[str] | None:
    if error is None:
        return None
    return ["TypeError" if isinstance(error, TypeError) else "ValueError", str(error)]


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


atexit.register(RingGroup.close_all)  # a thread that is in C++ when Python ends would abort it
