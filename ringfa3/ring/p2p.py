"""Messages between the ranks of a CP group: gloo for host memory, NCCL for CUDA tensors."""

from __future__ import annotations

import queue
import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist

from ringfa3.errors import disconnected, first_line, gave_up, timed_out
from ringfa3.kernels.streams import relaxed_capture
from ringfa3.ring.process_group import end_group
from ringfa3.threads import JOIN_S

POLL_S = 0.1  # between two looks at NCCL's messages under way
GRACE_S = 0.5  # without progress, in which messages that matched may still end
# Added to the limits of gloo and NCCL, whose errors name no hop, or end the process: ours is first.
LONGER = timedelta(minutes=10)
# Cycles of the device, some 3.5 us. A kernel that occupies every SM delays NCCL's, and so the
# transfer, until it ends. A kernel that starts after NCCL's gets the SMs that are left, and the
# others once they are free.
HEAD_START = 6000


class Message(NamedTuple):
    """One tensor to or from a peer.

    tensor  contiguous, sent or filled
    peer    rank in the CP group
    what    for error messages, as in "forward hop 2: K/V"
    tag     0 to 3; messages of different tags between two ranks never match
    slot    0 or 1, the same in an exchange: of what the sender publishes to ranks of its host
    at      first byte in the slot; None: the peer is on another host, or nothing is published
    """

    tensor: torch.Tensor
    peer: int
    what: str
    tag: int
    slot: int = 0
    at: int | None = None


class Exchange(Protocol):
    """Messages under way. `wait` returns when the received tensors may be used, or raises."""

    def wait(self) -> None: ...


class Transport(Protocol):
    """Moves messages between the ranks of a CP group."""

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Exchange: ...

    def completed_before(self, call: int) -> bool:
        """Whether all messages of calls before `call` have been sent and received."""

    def abort(self) -> None:
        """Ends messages that will never match, and with them all others."""

    def close(self, lost: bool) -> None:
        """Ends the transport's thread and its process group.

        lost: messages under way need not arrive
        """


class Peers(Protocol):
    """What a transport needs of `RingGroup`.

    ranks    global ranks of the group
    rank     this rank's number in the group
    timeout  after which a peer that does not answer is an error
    call     number of the ring call under way
    call_id  identifies it, 28 bits, the same on all ranks in it
    failure  why the group is lost
    """

    ranks: list[int]
    rank: int
    failure: str | None

    @property
    def timeout(self) -> timedelta: ...

    @property
    def call(self) -> int: ...

    @property
    def call_id(self) -> int: ...

    def peer_failure(self) -> str | None:
        """The message of a rank that has given up, else None."""

    def fail(self, message: str) -> Exception:
        """Tells the other ranks and returns the error to raise."""

    def lose(self, message: str) -> None:
        """Tells the other ranks and interrupts the caller."""

    def wait_for(self, done: threading.Event, what: Callable[[], str]) -> None:
        """Waits, and polls for other ranks' trouble; raises after the timeout."""


class GlooTransport:
    """Host memory. A thread waits for the messages; meanwhile the caller polls the store."""

    def __init__(self, group: Peers, p2p: dist.ProcessGroup) -> None:
        self.group, self.p2p = group, p2p
        self.waiting: queue.SimpleQueue[_GlooExchange | None] = queue.SimpleQueue()
        self.under_way: set[_GlooExchange] = set()  # keeps their tensors alive
        self._thread = threading.Thread(target=self._serve, daemon=True, name="ringfa3-gloo")
        self._thread.start()

    def _serve(self) -> None:
        while (exchange := self.waiting.get()) is not None:
            exchange.run()

    def completed_before(self, call: int) -> bool:
        """As `Transport.completed_before`: callers wait for their messages."""
        return True

    def abort(self) -> None:
        """As `Transport.abort`: messages have tags, so those of other calls never match."""

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
        self._failure: str | None = None
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
                work.wait(self._transport.group.timeout + LONGER)
            except RuntimeError:  # gloo's text names addresses of sockets
                self._failure = disconnected(what)
                break
        self._done.set()

    def wait(self) -> None:
        if self._works:
            group = self._transport.group
            self._transport.waiting.put(self)
            group.wait_for(self._done, lambda: self._current)
            if self._failure is not None:
                raise group.fail(self._failure)
        self._transport.under_way.discard(self)


class _Posted(NamedTuple):
    """Messages under way over NCCL.

    time             when they were posted
    call             of `Peers`
    sends, receives  what and peer of each
    """

    time: float
    call: int
    work: dist.Work
    sends: Sequence[tuple[str, int]]
    receives: Sequence[tuple[str, int]]

    def what(self, ranks: Sequence[int]) -> str:
        """For error messages. ranks: global ranks of peers."""
        both = (self.sends, "sending to"), (self.receives, "receiving from")
        each = (f"{what}, {verb} rank {ranks[peer]}" for x, verb in both for what, peer in x)
        return "; ".join(each)


class NcclTransport:
    """CUDA memory. A wait orders streams and returns at once. NCCL's kernel has a head start on
    those that the caller starts next.

    A thread watches the messages, except those in a CUDA graph. If they are overdue, or another
    rank has given up, it interrupts the caller and then aborts the communicator, which ends its
    kernels. NCCL's own watchdog would end the process, so its timeout here is a longer one.

    No exchange wakes the thread: it would compete for the GIL with the caller, who issues the next
    kernel. Messages of a communicator end in the order in which they were posted, so the thread
    queries few of them.
    """

    def __init__(self, group: Peers, p2p: dist.ProcessGroup) -> None:
        self.group, self.p2p = group, p2p
        self._posted: deque[_Posted] = deque()  # those under way
        self._look = threading.Event()  # the watching thread looks at once: the caller waits
        self._progress = 0.0  # when the latest exchange ended
        self._aborting = threading.Lock()  # a look at a work while it is aborted ends the process
        self._ended = self._closing = False
        self._limit = timedelta()
        self._extend_limit()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="ringfa3-nccl")
        self._thread.start()

    def completed_before(self, call: int) -> bool:
        """As `Transport.completed_before`."""
        self._look.set()
        with suppress(IndexError):  # the watching thread may take the last one meanwhile
            return self._posted[0].call >= call
        return True

    def abort(self) -> None:
        """As `Transport.abort`; the watchdog of an aborted communicator ends in peace."""
        with self._aborting:
            if self._ended:
                return
            self._ended = True
            end_group(self.p2p, lost=True)
        self._close()

    def close(self, lost: bool) -> None:
        self._close()
        self._thread.join(JOIN_S)  # messages under way have that long to arrive
        with self._aborting:
            if not self._ended:
                self._ended = True
                end_group(self.p2p, lost)
        del self.p2p

    def _close(self) -> None:
        self._closing = True
        self._look.set()

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Exchange:
        works: list[dist.Work] = []
        if sends or receives:
            device = (*sends, *receives)[0].tensor.device
            self.p2p._start_coalescing(device)
            for m in sends:
                self.p2p.send([m.tensor], m.peer, m.tag)
            for m in receives:
                self.p2p.recv([m.tensor], m.peer, m.tag)
            works = [self.p2p._end_coalescing(device)]
            if not torch.cuda.is_current_stream_capturing():  # captured events cannot be queried
                what = [(m.what, m.peer) for m in sends], [(m.what, m.peer) for m in receives]
                self._posted.append(_Posted(time.monotonic(), self.group.call, works[0], *what))
            torch.cuda._sleep(HEAD_START)  # type: ignore[no-untyped-call]
        return _NcclExchange(works)

    def _watch(self) -> None:
        with relaxed_capture():  # a query of an event would end a capture of another thread
            while self._posted or not self._closing:
                self._look.wait(POLL_S)
                self._look.clear()
                self._forget_completed()
                if self._posted:
                    with suppress(RuntimeError):  # of an abort: the thread must go on
                        self._check_oldest(self._posted[0])

    def _forget_completed(self) -> None:
        under_way = list(self._posted)
        ended = bisect_left(under_way, True, key=lambda x: not self._completed(x.work))
        for _ in range(ended):
            self._posted.popleft()
        if ended:
            self._progress = time.monotonic()

    def _check_oldest(self, oldest: _Posted) -> None:
        """Gives up messages that are overdue, or will never come."""
        group = self.group
        waited = time.monotonic() - max(oldest.time, self._progress)
        limit = self._extend_limit()
        failure = group.failure or group.peer_failure()
        if waited > limit or (failure is not None and waited > GRACE_S):
            what = oldest.what(group.ranks)
            group.lose(gave_up(what, failure) if failure else timed_out(what, limit))
            self.abort()

    def _extend_limit(self) -> float:
        """The group's timeout in seconds, which users may change."""
        limit = self.group.timeout
        if limit > self._limit:
            self._limit = limit
            own = self.p2p._get_backend(torch.device("cuda"))
            own._set_default_timeout(limit + LONGER)
        return limit.total_seconds()

    def _completed(self, work: dist.Work) -> bool:
        """Also those that the device has lost: the main thread's next call raises its error."""
        with self._aborting, suppress(RuntimeError):
            return self._ended or work.is_completed()
        return True


class _NcclExchange:
    def __init__(self, works: Sequence[dist.Work]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


class FakeTransport:
    """Stands in for messages in a group of backend `fake`: ones arrive at once, as K may be divided
    by them. Kernels run and buffers are allocated as in a real call; results are finite, and
    void."""

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Exchange:
        del sends
        for message in receives:
            message.tensor.fill_(1)
        return _NcclExchange([])

    def completed_before(self, call: int) -> bool:
        """As `Transport.completed_before`."""
        return True

    def abort(self) -> None:
        """There is nothing to end."""

    def close(self, lost: bool) -> None:
        """There is nothing to end."""


P2P_TRANSPORTS: dict[str, type[GlooTransport] | type[NcclTransport]] = {
    "gloo": GlooTransport,
    "nccl": NcclTransport,
}
