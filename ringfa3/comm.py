"""A context group's means of talking: agreement before a call, point-to-point during it.

Agreement runs on a side channel, the group's store: every rank leaves its verdict and what it is
about to do, nobody raises before all have, and then all raise or none. Tensors travel on a
process group of our own, so that they never mix with the user's collectives.

A rank that waits for a peer keeps an eye on that side channel as well. So the message that names
the cause reaches every rank, also where only one rank enters an agreement at all.
"""

from __future__ import annotations

import json
import queue
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

AGREEMENTS_KEPT = 4096  # keys of (plan, shapes) already agreed on
GLANCE_S = 0.25  # how often a waiting rank looks at the side channel
ERRORS: dict[str, type[Exception]] = {"ValueError": ValueError, "TypeError": TypeError}


class RingError(RuntimeError):
    """A ring call could not be finished: a peer died, stopped, or gave up first."""


@dataclass(frozen=True)
class Message:
    """One tensor to or from a peer.

    tensor  contiguous, sent or filled
    peer    rank in the context group
    what    for error messages, as in "forward hop 2: K/V"
    tag     keeps streams of messages between two ranks apart
    """

    tensor: torch.Tensor
    peer: int
    what: str
    tag: int


class Exchange(Protocol):
    """Messages under way; `wait` returns when received tensors may be used, or raises."""

    def wait(self) -> None: ...


class Transport(Protocol):
    """Moves messages between the ranks of a context group."""

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Exchange: ...


class RingGroup:
    """One rank's view of a context group. `RingGroup.of(group)` makes it once per group."""

    _known: dict[dist.ProcessGroup, RingGroup] = {}  # noqa: RUF012

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.ranks = dist.get_process_group_ranks(group)  # global ranks, for messages
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self.timeout = _timeout_of(group)
        self.store, self.name = group.get_group_store(), group.group_name
        self.failure: str | None = None
        self.call = 0  # ring calls begun, forward and backward
        self._settings: dict[str, str] = {}  # of the call under way
        self._epoch = 0
        self._agreed: OrderedDict[str, None] = OrderedDict()
        self._transports: dict[str, Transport] = {}
        self._lookout: _Lookout | None = None

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> RingGroup:
        if group not in cls._known:
            cls._known[group] = cls(group)
        return cls._known[group]

    def transport(self, name: str) -> Transport:
        """The transport `nccl` or `gloo`; its process group is made at the first call."""
        if name not in self._transports:
            if self._lookout is None:  # made now: once it is needed, the store may not answer
                self._lookout = _Lookout(self)
            self._transports[name] = _TRANSPORTS[name](self, self._new_group(name))
        return self._transports[name]

    def _new_group(self, backend: str) -> dist.ProcessGroup:
        """A process group of the same ranks, made by them alone.

        `new_group(use_local_synchronization=True)` names a group by how many its process has, and
        waits for ever where that is not the same on all ranks.
        """
        p2p, _ = c10d._new_process_group_helper(
            self.world,
            self.rank,
            self.ranks,
            dist.Backend(backend),
            self.store,
            c10d.GroupName(f"{self.name}/ringfa3/{backend}"),
            timeout=self.timeout,
        )
        assert isinstance(p2p, dist.ProcessGroup)
        c10d._world.pg_group_ranks[p2p] = {r: i for i, r in enumerate(self.ranks)}
        return p2p

    def begin(self, settings: Mapping[str, str]) -> None:
        """Marks the start of a ring call with settings that were agreed on.

        Raises:
            RingError: an earlier call failed; the group's connections are in no known state.
        """
        if self.failure is not None:
            raise RingError(f"the context group is lost since: {self.failure}")
        self.call += 1
        self._settings = dict(settings)

    def agree(self, settings: Mapping[str, str], error: Exception | None = None) -> None:
        """Returns if every rank enters with equal settings and no error, else raises on all.

        Costs nothing when these settings were agreed on before. Every rank must call it at the
        same point. `settings` maps an argument's name to its value; what must be equal over the
        ranks belongs in it.

        Raises:
            ValueError, TypeError: naming the rank, the argument and its value.
            RingError: a rank did not come within the timeout.
        """
        key = json.dumps(settings, sort_keys=True)
        if error is None and key in self._agreed:
            return
        if self.failure is not None:
            raise RingError(f"the context group is lost since: {self.failure}")
        entry = {"call": self.call, "settings": dict(settings), "error": None}
        if error is not None:
            kind = "TypeError" if isinstance(error, TypeError) else "ValueError"
            entry["error"] = [kind, str(error)]
        entries = self._meet(entry)
        self._raise_on_error(entries)
        self._raise_on_difference([e["settings"] for e in entries])
        self._agreed[key] = None
        if len(self._agreed) > AGREEMENTS_KEPT:
            self._agreed.popitem(last=False)

    def _entry_key(self, epoch: int, rank: int) -> str:
        return f"ringfa3/agree/{epoch}/{rank}"

    def _meet(self, entry: Mapping[str, object]) -> list[dict[str, object]]:
        """Leaves this rank's entry and reads those of all."""
        self._epoch += 1
        keys = [self._entry_key(self._epoch, r) for r in range(self.world)]
        try:
            self.store.set(keys[self.rank], json.dumps(entry))
            self.store.wait(keys, self.timeout)
            entries = [json.loads(e) for e in self.store.multi_get(keys)]
            if self._epoch > 2:  # everyone has read it: all have entered the one after it
                self.store.delete_key(self._entry_key(self._epoch - 2, self.rank))
        except dist.DistError as problem:
            raise self.fail(
                f"agreement before a ring call: {self._absent(keys, problem)}"
            ) from None
        return entries

    def _absent(self, keys: list[str], problem: Exception) -> str:
        try:
            absent = [r for r, k in zip(self.ranks, keys, strict=True) if not self.store.check([k])]
        except dist.DistError:
            return f"the store does not answer ({problem})"
        return f"no word from rank {_listed(absent)} within {self.timeout.total_seconds():g} s"

    def _raise_on_error(self, entries: Sequence[Mapping[str, object]]) -> None:
        wrong = [(r, e["error"]) for r, e in zip(self.ranks, entries, strict=True) if e["error"]]
        if wrong:
            rank, (kind, text) = wrong[0]  # type: ignore[misc]
            others = f" (and {len(wrong) - 1} more ranks)" if len(wrong) > 1 else ""
            raise ERRORS[kind](f"rank {rank}: {text}{others}")  # type: ignore[has-type]

    def _raise_on_difference(self, settings: Sequence[object]) -> None:
        maps = [s if isinstance(s, dict) else {} for s in settings]
        everywhere = [name for name in maps[0] if all(name in m for m in maps)]  # most telling first
        for name in [*everywhere, *sorted(set().union(*maps) - set(everywhere))]:
            values: dict[str, list[int]] = {}
            for rank, s in zip(self.ranks, maps, strict=True):
                values.setdefault(str(s.get(name, "missing")), []).append(rank)
            if len(values) > 1:
                groups = sorted(values.items(), key=lambda item: len(item[1]))
                said = "; ".join(f"rank {_listed(ranks)}: {value}" for value, ranks in groups)
                raise ValueError(f"{name} differs over the ranks of the context group: {said}")

    def fail(self, message: str) -> RingError:
        """Marks the group lost, tells the other ranks, and returns the error to raise."""
        full = f"rank {self.ranks[self.rank]}: {message}"
        self.failure = full
        teller = threading.Thread(
            target=lambda: self.store.set("ringfa3/failure", full), daemon=True
        )
        teller.start()
        teller.join(2 * GLANCE_S)  # a store whose host is stopped must not hold us
        return RingError(full)

    @contextmanager
    def telling_peers(self) -> Iterator[None]:
        """Tells the other ranks if an error ends this rank's part of a ring call."""
        try:
            yield
        except Exception as problem:
            if self.failure is None and not isinstance(problem, (ValueError, TypeError)):
                self.fail(f"{type(problem).__name__}: {_first_line(problem)}")
            raise

    def await_event(self, done: threading.Event, what: str) -> None:
        """Waits for `done`, watching for other ranks' trouble.

        Raises:
            RingError: after the timeout, or as soon as another rank has given up.
            ValueError, TypeError: another rank has refused this call.
        """
        if done.wait(GLANCE_S):
            return
        assert self._lookout is not None
        with self._lookout as lookout:
            deadline = time.monotonic() + self.timeout.total_seconds() - GLANCE_S
            while not done.wait(GLANCE_S / 5):
                if lookout.summons:
                    self.agree({**self._settings, "place": f"call {self.call}, {what}"})
                if lookout.alarm is not None:
                    raise self.fail(f"{what}: gave up because {lookout.alarm}")
                if time.monotonic() > deadline:
                    seconds = self.timeout.total_seconds()
                    raise self.fail(f"{what}: nothing within {seconds:g} s; is that rank stopped?")


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def _timeout_of(group: dist.ProcessGroup) -> timedelta:
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    timeout: timedelta = group._get_backend(torch.device(device)).options._timeout
    return timeout


class _Lookout(threading.Thread):
    """Watches the side channel while its rank waits; used as a context manager.

    alarm     what a rank said that gave up, None so far
    summons   a rank refuses, or asks about, the call that this rank is in
    """

    def __init__(self, group: RingGroup) -> None:
        super().__init__(daemon=True, name="ringfa3-lookout")
        self._group, self._store = group, group.store.clone()  # type: ignore[attr-defined]
        self._active = threading.Event()
        self.alarm: str | None = None
        self.summons = False
        self.start()

    def __enter__(self) -> _Lookout:
        self.summons = False
        self._active.set()
        return self

    def __exit__(self, *_: object) -> None:
        self._active.clear()

    def run(self) -> None:
        while True:
            self._active.wait()
            try:
                self._glance()
            except dist.DistError:
                return  # the store's host is gone: the wait ends at its own deadline
            time.sleep(GLANCE_S)

    def _glance(self) -> None:
        if self._store.check(["ringfa3/failure"]):
            self.alarm = self._store.get("ringfa3/failure").decode()
        group = self._group
        for rank in range(group.world):
            key = group._entry_key(group._epoch + 1, rank)
            if rank != group.rank and self._store.check([key]):
                entry = json.loads(self._store.get(key))
                # a rank that is behind our call, or refuses, will never send what we wait for
                self.summons |= entry["error"] is not None or entry["call"] < group.call


class GlooTransport:
    """Host memory. A thread waits for the messages, so that the caller can look around."""

    def __init__(self, group: RingGroup, p2p: dist.ProcessGroup) -> None:
        self.group, self.p2p = group, p2p
        self.waiting: queue.SimpleQueue[_GlooExchange] = queue.SimpleQueue()
        threading.Thread(target=self._serve, daemon=True, name="ringfa3-gloo").start()

    def _serve(self) -> None:
        while True:
            self.waiting.get().run()

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Exchange:
        return _GlooExchange(self, sends, receives)


class _GlooExchange:
    def __init__(
        self, transport: GlooTransport, sends: Sequence[Message], receives: Sequence[Message]
    ) -> None:
        self._transport = transport
        self._done = threading.Event()
        self._failed: tuple[str, Exception] | None = None
        self._works: list[tuple[dist.Work, str]] = []
        group = transport.group
        for post, verb, messages in (
            (dist.irecv, "receiving from", receives),
            (dist.isend, "sending to", sends),
        ):
            for m in messages:
                peer = group.ranks[m.peer]
                what = f"{m.what}, {verb} rank {peer}"
                try:
                    work = post(m.tensor, peer, group=transport.p2p, tag=m.tag)
                except RuntimeError as problem:
                    raise group.fail(f"{what}: {_first_line(problem)}") from None
                assert work is not None
                self._works.append((work, what))

    def run(self) -> None:
        for work, what in self._works:
            try:
                work.wait(self._transport.group.timeout)
            except RuntimeError as problem:
                self._failed = (what, problem)
                break
        self._done.set()

    def wait(self) -> None:
        if not self._works:
            return
        group = self._transport.group
        self._transport.waiting.put(self)
        group.await_event(self._done, self._works[0][1])
        if self._failed is not None:
            what, problem = self._failed
            raise group.fail(f"{what}: {_first_line(problem)}")


def _first_line(problem: Exception) -> str:
    return str(problem).strip().split("\n")[0]


class NcclTransport:
    """CUDA memory. Waiting orders streams, not the host.

    A watch names hop and peer when messages are overdue; ending the process is left to NCCL's own
    watchdog, whose timeout on this communicator is the same.
    """

    def __init__(self, group: RingGroup, p2p: dist.ProcessGroup) -> None:
        self.group, self.p2p = group, p2p
        self.posted: queue.SimpleQueue[tuple[float, list[dist.Work], str]] = queue.SimpleQueue()
        threading.Thread(target=self._watch, daemon=True, name="ringfa3-nccl").start()

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Exchange:
        ranks = self.group.ranks
        posts = [
            dist.P2POp(op, m.tensor, ranks[m.peer], self.p2p, m.tag)
            for op, messages in ((dist.isend, sends), (dist.irecv, receives))
            for m in messages
        ]
        works = dist.batch_isend_irecv(posts) if posts else []
        if works:
            said = [f"{m.what}, sending to rank {ranks[m.peer]}" for m in sends]
            said += [f"{m.what}, receiving from rank {ranks[m.peer]}" for m in receives]
            self.posted.put((time.monotonic(), works, "; ".join(said)))
        return _NcclExchange(works)

    def _watch(self) -> None:
        seconds = self.group.timeout.total_seconds()
        while True:
            posted, works, what = self.posted.get()
            while not all(w.is_completed() for w in works):
                if time.monotonic() > posted + seconds - 1:
                    print(
                        f"ringfa3: rank {self.group.ranks[self.group.rank]}: {what}: "
                        f"nothing within {seconds:g} s",
                        file=sys.stderr,
                        flush=True,
                    )
                    return
                time.sleep(GLANCE_S)


class _NcclExchange:
    def __init__(self, works: Sequence[dist.Work]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


_TRANSPORTS: dict[str, type[GlooTransport] | type[NcclTransport]] = {
    "gloo": GlooTransport,
    "nccl": NcclTransport,
}
