"""One rank's view of a context group: agreement before a call, connections during it.

Ranks agree over the group's store: each writes an entry, its settings or its error; no rank raises
before it has read all entries, and then all raise or none. Tensors use a process group of our own,
apart from the user's collectives.

A rank that waits for a peer also polls the store. So an error reaches every rank with its cause,
even if only one rank has entered an agreement.
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
from functools import partial
from typing import cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from ringfa3.errors import RingError, StepError, first_line, gave_up, timed_out
from ringfa3.ring.entries import (
    CallMark,
    Settings,
    described,
    listed,
    raise_on_difference,
    raise_on_error,
)
from ringfa3.ring.p2p import P2P_TRANSPORTS, Transport
from ringfa3.ring.process_group import (
    AbsentError,
    alive,
    new_group,
    on_one_host,
    rendezvous,
    timeout_of,
)
from ringfa3.ring.store_monitor import (
    FAILURE_KEY,
    PERIOD_S,
    LatestCall,
    StoreMonitor,
    entry_key,
    join_request_key,
)
from ringfa3.symmetric.backend import SymmetricBackend
from ringfa3.symmetric.ipc_memory import IpcMemory
from ringfa3.symmetric.self_test import open_backend

MAX_AGREEMENTS = 4096  # settings that a group remembers as agreed on
POLL_S = (0.001, 0.005)  # between two looks for the entries of all ranks, first and longest
BEFORE = "agreement before a ring call"


class RingGroup:
    """One rank's view of a context group. `RingGroup.of(group)` makes it once per group."""

    _known: dict[dist.ProcessGroup, RingGroup] = {}  # noqa: RUF012

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.ranks = dist.get_process_group_ranks(group)  # global ranks, for messages
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self.timeout = timeout_of(group)
        self.store, self.name = group.get_group_store(), group.group_name
        self._own_store = False  # whether `store` is this group's alone: from the first agreement
        self.failure: str | None = None
        self.latest = LatestCall(0, Settings())  # one object: the monitor's thread reads it
        self.epoch = 0  # number of the latest agreement
        self._generation = 0  # of the transports: an error in mid-call leaves messages on them
        self._refused = False  # the latest call was refused on all ranks
        self._agreed: OrderedDict[str, None] = OrderedDict()
        self._forgotten = 0  # times that settings were no longer agreed on
        self._transports: dict[str, Transport] = {}
        self._abandoned: list[Transport | SymmetricBackend] = []  # peers may use their memory
        self._backend: SymmetricBackend | None = None
        self.unsupported: str | None = None  # why this group cannot use `symmetric`
        self._alive = partial(alive, group)
        self._monitor: StoreMonitor | None = None
        self.last_transport: str | None = None  # the transport of the latest call

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> RingGroup:
        if group not in cls._known:
            cls.close_ended()
            cls._known[group] = cls(group)
        return cls._known[group]

    @classmethod
    def close_ended(cls) -> None:
        """Closes those whose process group has been destroyed."""
        for old in [g for g in cls._known if not alive(g)]:
            cls._known.pop(old).close()

    @classmethod
    def close_all(cls) -> None:
        """At the end of the process."""
        while cls._known:
            cls._known.popitem()[1].close()

    def close(self) -> None:
        """Ends the threads. Process groups end with the default group, or with the process."""
        self._forgotten += 1
        if self._monitor is not None:
            self._monitor.end()
        for transport in (*self._abandoned, *self._transports.values()):
            transport.close()
        if self._backend is not None:
            self._backend.close()

    def transport(self, name: str, device: torch.device) -> Transport:
        """The transport `nccl` or `gloo`; the first call makes its process group.

        All ranks make it together: a first ring call may leave some of them without messages.
        """
        if name not in self._transports:
            self._start_monitor()
            try:
                own = f"{self.name}/ringfa3/{name}/{self._generation}"
                p2p = new_group(self.ranks, self.rank, name, self.store, own, self.timeout)
                one_host = on_one_host(p2p, device)
                self._transports[name] = P2P_TRANSPORTS[name](self, p2p, one_host)
            except RuntimeError as problem:
                raise self.fail(f"connecting over {name}: {first_line(problem)}") from None
        self.last_transport = name
        return self._transports[name]

    def symmetric_backend(self, device: torch.device) -> SymmetricBackend | None:
        """The backend of the `symmetric` transport; None if `unsupported` says why there is none.

        The first call tries it, on all ranks together and with the same result.
        """
        if self._backend is None and self.unsupported is None:
            self._start_monitor()
            opened = open_backend(self, device)
            if isinstance(opened, str):
                self.unsupported = opened
            else:
                self._backend = opened
        if self._backend is not None:
            self.last_transport = "symmetric"
        return self._backend

    @property
    def shared_memory(self) -> IpcMemory | None:
        """The memory of the `symmetric` transport, once that has been tried and works."""
        return None if self._backend is None else self._backend.memory

    def may_use_symmetric(self, transport: str) -> bool:
        """Whether a call of CUDA tensors uses the `symmetric` transport, or has to try it first."""
        return transport in ("auto", "symmetric") and self.unsupported is None

    def _start_monitor(self) -> None:
        if self._monitor is None:  # early: once it is needed, the store may not answer
            self._monitor = StoreMonitor(self, self.store, self._alive)

    @property
    def timeout_s(self) -> float:
        return self.timeout.total_seconds()

    def peer_failure(self) -> str | None:
        """The message of a rank that has given up, else None."""
        return self._monitor.peer_failure if self._monitor is not None else None

    def gather(self, line: str) -> list[str]:
        """Passes a line, returns those of all ranks; all call it at the same point of a call."""
        call, settings = self.latest
        settings = Settings({**settings, "place": f"call {call}, its memory"})
        entry: dict[str, object] = {
            "settings": settings,
            "error": None,
            "mid_call": False,
            "line": line,
        }
        return [str(e["line"]) for e in self._enter(entry)]

    @property
    def call_id(self) -> int:
        """28 bits that identify the call under way, the same on all ranks in it."""
        call, settings = self.latest
        return zlib.crc32(f"{call} {settings.key}".encode()) >> 4

    def begin(self, settings: Settings) -> None:
        """Begins a ring call with settings that were agreed on.

        Raises:
            RingError: an earlier call failed; the group's connections are in no known state.
            ValueError, TypeError: another rank refuses this call or the one before.
        """
        self._require_peers()
        self.latest = LatestCall(self.latest.number + 1, settings)
        self._refused = False
        if self._monitor is not None and self._monitor.join_request == self.epoch + 1:
            self._join_agreement("before its first hop")

    def mark(self) -> CallMark:
        return CallMark(self.latest.settings, self._forgotten)  # of the call under way

    def begin_again(self, mark: CallMark) -> bool:
        """As `begin`, for a call over `symmetric` like an earlier one. False, and nothing begins,
        if ranks have to agree first, or this one or another is in trouble."""
        asked = self._monitor is not None and self._monitor.asks(self.epoch + 1)
        if asked or self.failure is not None or self._forgotten != mark.forgotten:
            return False
        self.latest = LatestCall(self.latest.number + 1, mark.settings)
        self._refused = False
        self.last_transport = "symmetric"
        return True

    def _require_peers(self) -> None:
        """Raises RingError if this rank or another has given up, as far as is known."""
        if self.failure is not None:
            raise RingError(f"the context group is lost since: {self.failure}")
        if (cause := self.peer_failure()) is not None:
            raise self.fail(gave_up(BEFORE, cause))

    def _join_agreement(self, place: str) -> None:
        """Joins an agreement that a rank in trouble has entered; raises on all ranks."""
        call, settings = self.latest
        settings = Settings({**settings, "place": f"call {call}, {place}"})
        self._enter({"settings": settings, "error": None, "mid_call": True})

    def agree(self, settings: Settings, error: Exception | None = None, anew: bool = False) -> None:
        """Returns if every rank passes equal settings and no error, else raises on all.

        Costs nothing if these settings were agreed on before, unless ranks agree `anew`. Every rank
        must call it at the same point.

        Raises:
            ValueError, TypeError: naming the rank, the argument and its value.
            RingError: a rank did not enter within the timeout.
        """
        if error is None and not anew and settings.key in self._agreed:
            return
        try:
            self._require_peers()
            self._enter({"settings": settings, "error": described(error), "mid_call": False})
        except RingError as lost:
            if error is not None:
                raise error from lost
            raise
        except (TypeError, ValueError) as refused:
            raise refused from error
        self._agreed[settings.key] = None
        if len(self._agreed) > MAX_AGREEMENTS:
            self._agreed.popitem(last=False)
            self._forgotten += 1

    def _enter(self, entry: dict[str, object]) -> list[dict[str, object]]:
        """The entries of all ranks; raises on all of them if one has an error or they differ."""
        entries = self._exchange({**entry, "call": self.latest.number})
        try:
            raise_on_error(self.ranks, entries)
            raise_on_difference(self.ranks, entries)
            return entries
        except (TypeError, ValueError):
            self._refused = True
            number = max(cast(int, e["call"]) for e in entries)
            self.latest = LatestCall(number, self.latest.settings)
            if any(e["mid_call"] for e in entries):  # their messages will never be answered
                self._abandon_connections()
            raise

    def _abandon_connections(self) -> None:
        self._abandoned += self._transports.values()
        self._transports = {}
        self._agreed.clear()
        self._forgotten += 1
        self._generation += 1
        if self._backend is not None:
            self._backend.abandon()
            self._abandoned.append(self._backend)
            self._backend = None

    def _exchange(self, entry: Mapping[str, object]) -> list[dict[str, object]]:
        """Writes this rank's entry and reads those of all ranks."""
        self.epoch += 1
        keys = [entry_key(self.epoch, r) for r in range(self.world)]
        entries: list[dict[str, object]] = []
        problem = [f"{BEFORE}: the store does not answer; is its host stopped?"]
        done = threading.Event()
        deadline = time.monotonic() + self.timeout_s - PERIOD_S

        def enter() -> None:
            try:
                if not self._own_store:  # a group of the same name may have left its keys
                    shared = PrefixStore("ringfa3", self.store)
                    limit = self.timeout_s - PERIOD_S
                    self.store = rendezvous(shared, self.rank, self.world, limit)
                    self._own_store = True
                self.store.set(keys[self.rank], json.dumps(entry))
                trouble = entry["error"] is not None or entry["mid_call"]
                if trouble or not self._all_set(keys, PERIOD_S):
                    self.store.set(join_request_key(self.epoch), "")
                if self._all_set(keys, deadline - time.monotonic()):
                    entries.extend(json.loads(e) for e in self.store.multi_get(keys))
                    self._delete_keys(self.epoch - 2)
                else:
                    cause = self.peer_failure()
                    problem[0] = gave_up(BEFORE, cause) if cause else self._absent(keys)
            except AbsentError as error:
                problem[0] = self._no_word([self.ranks[r] for r in error.ranks])
            except dist.DistError as error:
                problem[0] = f"{BEFORE}: the store does not answer ({error})"
            except Exception as error:  # raised below: nobody sees this thread's own
                problem[0] = f"{BEFORE}: {type(error).__name__}: {first_line(error)}"
            finally:
                done.set()

        # on a thread of its own: a call of a store whose host is stopped has no timeout
        threading.Thread(target=enter, daemon=True, name="ringfa3-agreement").start()
        if not done.wait(self.timeout.total_seconds() + 2 * PERIOD_S) or not entries:
            raise self.fail(problem[0])
        return entries

    def _delete_keys(self, epoch: int) -> None:
        """Of an agreement whose entries all ranks have read: all have entered a later one."""
        if epoch > 0:
            self.store.delete_key(entry_key(epoch, self.rank))
            if self.rank == 0:
                self.store.delete_key(join_request_key(epoch))

    def _all_set(self, keys: list[str], seconds: float) -> bool:
        """Whether the keys are set in time. `Store.wait` would log its timeout as a warning."""
        deadline = time.monotonic() + seconds
        pause, longest = POLL_S
        while not self.store.check(keys):
            if time.monotonic() > deadline or self.failure or self.peer_failure():
                return False
            time.sleep(pause)
            pause = min(2 * pause, longest)
        return True

    def _absent(self, keys: list[str]) -> str:
        absent = [r for r, k in zip(self.ranks, keys, strict=True) if not self.store.check([k])]
        return self._no_word(absent)

    def _no_word(self, ranks: Sequence[int]) -> str:
        return f"{BEFORE}: no word from rank {listed(ranks)} within {self.timeout_s:g} s"

    def fail(self, message: str) -> RingError:
        """Marks the group lost, tells the other ranks, and returns the error to raise.

        Streams that wait for peers are released.
        """
        full = f"rank {self.ranks[self.rank]}: {message}"
        self.failure = full
        if self._backend is not None:
            self._backend.abandon()

        def tell() -> None:
            with suppress(RuntimeError):  # the store is gone
                self.store.set(FAILURE_KEY, full)

        thread = threading.Thread(target=tell, daemon=True, name="ringfa3-failure")
        thread.start()
        thread.join(2 * PERIOD_S)  # not longer: the store's host may be stopped
        return RingError(full)

    def __enter__(self) -> None:
        """Around this rank's part of a ring call: tells the other ranks if an error ends it."""

    def __exit__(self, _: object, problem: BaseException | None, __: object) -> None:
        if isinstance(problem, Exception):
            self.tell(problem)

    def tell(self, problem: Exception) -> None:
        """Tells the other ranks that an error ends a ring call, unless they know."""
        if self.failure is None and not self._refused and not isinstance(problem, StepError):
            self.fail(f"{type(problem).__name__}: {first_line(problem)}")

    def wait_for(self, done: threading.Event, what: Callable[[], str]) -> None:
        """Waits for `done` and polls for other ranks' trouble; `what` names the wait.

        Raises:
            RingError: after the timeout, or as soon as another rank has given up.
            ValueError, TypeError: another rank has refused this call, or is in another one.
        """
        if done.wait(PERIOD_S):
            return
        assert self._monitor is not None
        with self._monitor as monitor:
            deadline = time.monotonic() + self.timeout_s - PERIOD_S
            while not done.wait(PERIOD_S / 5):
                if monitor.join_request == self.epoch + 1:
                    self._join_agreement(what())
                if monitor.peer_failure is not None:
                    raise self.fail(gave_up(what(), monitor.peer_failure))
                if time.monotonic() > deadline:
                    raise self.fail(timed_out(what(), self.timeout_s))


atexit.register(RingGroup.close_all)  # a thread that is in C++ when Python ends would abort it
