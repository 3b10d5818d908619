"""Messages between the ranks of a context group: gloo for host memory, NCCL for CUDA tensors."""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from ringfa3.errors import first_line
from ringfa3.kernels.streams import relaxed_capture
from ringfa3.ring.process_group import end_group
from ringfa3.symmetric.watchdog import JOIN_S

POLL_S = 0.25  # between two looks at NCCL's messages under way
# Cycles of the device, some 3.5 us. A kernel that occupies every SM delays NCCL's, and so the
# transfer, until it ends. A kernel that starts after NCCL's gets the SMs that are left, and the
# others once they are free.
HEAD_START = 6000


@dataclass(frozen=True)
class Message:
    """One tensor to or from a peer.

    tensor  contiguous, sent or filled
    peer    rank in the context group
    what    for error messages, as in "forward hop 2: K/V"
    tag     0 to 3; messages of different tags between two ranks never match
    """

    tensor: torch.Tensor
    peer: int
    what: str
    tag: int


class Exchange(Protocol):
    """Messages under way. `wait` returns when the received tensors may be used, or raises."""

    def wait(self) -> None: ...


class Transport(Protocol):
    """Moves messages between the ranks of a context group.

    one_host  whether all ranks are on one host
    """

    one_host: bool

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Exchange: ...

    def close(self, lost: bool) -> None:
        """Ends the transport's thread and its process group.

        lost: messages under way need not arrive
        """


class Peers(Protocol):
    """What a transport needs of `RingGroup`.

    ranks    global ranks of the group
    rank     this rank's number in the group
    timeout  after which a peer that does not answer is an error
    call_id  identifies the ring call under way, 28 bits, the same on all ranks in it
    """

    ranks: list[int]
    rank: int
    timeout: timedelta

    @property
    def call_id(self) -> int: ...

    def fail(self, message: str) -> Exception:
        """Tells the other ranks and returns the error to raise."""

    def wait_for(self, done: threading.Event, what: Callable[[], str]) -> None:
        """Waits, and polls for other ranks' trouble; raises after the timeout."""


class GlooTransport:
    """Host memory. A thread waits for the messages; meanwhile the caller polls the store."""

    def __init__(self, group: Peers, p2p: dist.ProcessGroup, one_host: bool) -> None:
        self.group, self.p2p, self.one_host = group, p2p, one_host
        self.waiting: queue.SimpleQueue[_GlooExchange | None] = queue.SimpleQueue()
        self.under_way: set[_GlooExchange] = set()  # keeps their tensors alive
        self._thread = threading.Thread(target=self._serve, daemon=True, name="ringfa3-gloo")
        self._thread.start()

    def _serve(self) -> None:
        while (exchange := self.waiting.get()) is not None:
            exchange.run()

    def close(self, lost: bool) -> None:
        self.waiting.put(None)
        self._thread.join(JOIN_S)
        end_group(self.p2p, lost)
        del self.p2p  # its sockets close with the last reference

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Exchange:
        exchange = _GlooExchange(self, sends, receives)
        self.under_way.add(exchange)
        return exchange


class _GlooExchange:
    def __init__(
        self, transport: GlooTransport, sends: Sequence[Message], receives: Sequence[Message]
    ) -> None:
        self._transport = transport
        self._messages = (*sends, *receives)
        self._done = threading.Event()
        self._failure: tuple[str, Exception] | None = None
        self._current = ""
        self._works: list[tuple[dist.Work, str]] = []
        group = transport.group
        tag = group.call_id << 2  # messages of different calls never match
        for post, verb, messages in (
            (transport.p2p.recv, "receiving from", receives),
            (transport.p2p.send, "sending to", sends),
        ):
            for m in messages:
                what = f"{m.what}, {verb} rank {group.ranks[m.peer]}"
                try:
                    work = post([m.tensor], m.peer, tag | m.tag)
                except RuntimeError as problem:
                    raise group.fail(f"{what}: {first_line(problem)}") from None
                self._works.append((work, what))

    def run(self) -> None:
        for work, what in self._works:
            self._current = what
            try:
                work.wait(self._transport.group.timeout)
            except RuntimeError as problem:
                self._failure = (what, problem)
                break
        self._done.set()

    def wait(self) -> None:
        if self._works:
            group = self._transport.group
            self._transport.waiting.put(self)
            group.wait_for(self._done, lambda: self._current)
            if self._failure is not None:
                what, problem = self._failure
                raise group.fail(f"{what}: {first_line(problem)}")
        self._transport.under_way.discard(self)


class NcclTransport:
    """CUDA memory. A wait orders streams and returns at once. NCCL's kernel has a head start on
    those that the caller starts next.

    A thread prints hop and peer of messages that are overdue, except those in a CUDA graph. NCCL's
    own watchdog, whose timeout on this communicator is the same, ends the process.
    """

    def __init__(self, group: Peers, p2p: dist.ProcessGroup, one_host: bool) -> None:
        self.group, self.p2p, self.one_host = group, p2p, one_host
        self.posted: queue.SimpleQueue[tuple[float, list[dist.Work], str] | None]
        self.posted = queue.SimpleQueue()
        self._ended = False
        self._thread = threading.Thread(target=self._watch, daemon=True, name="ringfa3-nccl")
        self._thread.start()

    def close(self, lost: bool) -> None:
        self.posted.put(None)
        self._thread.join(JOIN_S)  # messages under way have that long to arrive
        self._ended = True
        end_group(self.p2p, lost)
        del self.p2p

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Exchange:
        ranks, works = self.group.ranks, []
        if sends or receives:
            device = (*sends, *receives)[0].tensor.device
            self.p2p._start_coalescing(device)
            for m in sends:
                self.p2p.send([m.tensor], m.peer, m.tag)
            for m in receives:
                self.p2p.recv([m.tensor], m.peer, m.tag)
            works = [self.p2p._end_coalescing(device)]
            if not torch.cuda.is_current_stream_capturing():  # captured events cannot be queried
                what = [f"{m.what}, sending to rank {ranks[m.peer]}" for m in sends]
                what += [f"{m.what}, receiving from rank {ranks[m.peer]}" for m in receives]
                self.posted.put((time.monotonic(), works, "; ".join(what)))
            torch.cuda._sleep(HEAD_START)  # type: ignore[no-untyped-call]
        return _NcclExchange(works)

    def _watch(self) -> None:
        with relaxed_capture():  # a query of an event would end a capture of another thread
            while (exchange := self.posted.get()) is not None:
                posted, works, what = exchange
                with suppress(RuntimeError):  # of the device: the main thread's next call raises it
                    self._watch_exchange(posted, works, what)

    def _watch_exchange(self, posted: float, works: Sequence[dist.Work], what: str) -> None:
        """Returns once the works are done or overdue."""
        limit = 0.9 * self.group.timeout.total_seconds()
        while not self._ended and not all(w.is_completed() for w in works):
            if time.monotonic() > posted + limit:
                line = f"rank {self.group.ranks[self.group.rank]}: {what}: nothing for {limit:g} s"
                print(f"ringfa3: {line}", file=sys.stderr, flush=True)
                break
            time.sleep(POLL_S)


class _NcclExchange:
    def __init__(self, works: Sequence[dist.Work]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


class FakeTransport:
    """Of a group with backend `fake`, for runs without communication: zeros arrive at once. Kernels
    run and buffers are allocated as in a real call; results are finite, and void."""

    one_host = False

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Exchange:
        del sends
        for message in receives:
            message.tensor.zero_()
        return _NcclExchange([])

    def close(self, lost: bool) -> None:
        """There is nothing to end."""


P2P_TRANSPORTS: dict[str, type[GlooTransport] | type[NcclTransport]] = {
    "gloo": GlooTransport,
    "nccl": NcclTransport,
}
