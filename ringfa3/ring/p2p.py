"""How tensors move between the ranks of a context group: gloo for host memory, NCCL for CUDA."""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from ringfa3.errors import first_line
from ringfa3.symmetric.watchdog import END_S

POLL_S = 0.25  # how often the watch over NCCL looks at the messages under way
# Cycles of the device, some 3.5 us. A kernel that takes every SM keeps NCCL's, and so the transfer,
# out to its end; beside NCCL's it begins on fewer, and takes the others when they are free.
HEAD_START = 6000


@dataclass(frozen=True)
class Message:
    """One tensor to or from a peer.

    tensor  contiguous, sent or filled
    peer    rank in the context group
    what    for error messages, as in "forward hop 2: K/V"
    tag     0 to 3, keeps streams of messages between two ranks apart
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

    def close(self) -> None:
        """Ends the transport's thread."""


class Peers(Protocol):
    """What a transport needs of its context group.

    ranks    global ranks of the group
    rank     this one's place in it
    timeout  after which a silent peer is an error
    identity of the ring call under way, 28 bits, equal on all ranks that are in the same call
    """

    ranks: list[int]
    rank: int
    timeout: timedelta

    @property
    def identity(self) -> int: ...

    def fail(self, message: str) -> Exception:
        """Tells the other ranks and returns the error to raise."""

    def await_event(self, done: threading.Event, what: Callable[[], str]) -> None:
        """Waits, watching for other ranks' trouble; raises after the timeout."""


class GlooTransport:
    """Host memory. A thread waits for the messages, so that the caller can look around."""

    def __init__(self, group: Peers, p2p: dist.ProcessGroup) -> None:
        self.group, self.p2p = group, p2p
        self.waiting: queue.SimpleQueue[_GlooExchange | None] = queue.SimpleQueue()
        self.under_way: set[_GlooExchange] = set()  # their tensors live until they have arrived
        self._thread = threading.Thread(target=self._serve, daemon=True, name="ringfa3-gloo")
        self._thread.start()

    def _serve(self) -> None:
        while (exchange := self.waiting.get()) is not None:
            exchange.run()

    def close(self) -> None:
        self.waiting.put(None)
        self._thread.join(END_S)

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
        self._failed: tuple[str, Exception] | None = None
        self._awaited = ""
        self._works: list[tuple[dist.Work, str]] = []
        group = transport.group
        tag = group.identity << 2  # messages of different calls never meet
        for post, verb, messages in (
            (dist.irecv, "receiving from", receives),
            (dist.isend, "sending to", sends),
        ):
            for m in messages:
                peer = group.ranks[m.peer]
                what = f"{m.what}, {verb} rank {peer}"
                try:
                    work = post(m.tensor, peer, group=transport.p2p, tag=tag | m.tag)
                except RuntimeError as problem:
                    raise group.fail(f"{what}: {first_line(problem)}") from None
                assert work is not None
                self._works.append((work, what))

    def run(self) -> None:
        for work, what in self._works:
            self._awaited = what
            try:
                work.wait(self._transport.group.timeout)
            except RuntimeError as problem:
                self._failed = (what, problem)
                break
        self._done.set()

    def wait(self) -> None:
        if self._works:
            group = self._transport.group
            self._transport.waiting.put(self)
            group.await_event(self._done, lambda: self._awaited)
            if self._failed is not None:
                what, problem = self._failed
                raise group.fail(f"{what}: {first_line(problem)}")
        self._transport.under_way.discard(self)


class NcclTransport:
    """CUDA memory. Waiting orders streams, not the host. NCCL's kernel has a head start on
    those that the caller starts next.

    A watch names hop and peer when messages are overdue; ending the process is left to NCCL's own
    watchdog, whose timeout on this communicator is the same.
    """

    def __init__(self, group: Peers, p2p: dist.ProcessGroup) -> None:
        self.group, self.p2p = group, p2p
        self.posted: queue.SimpleQueue[tuple[float, list[dist.Work], str] | None]
        self.posted = queue.SimpleQueue()
        self._over = False
        self._thread = threading.Thread(target=self._watch, daemon=True, name="ringfa3-nccl")
        self._thread.start()

    def close(self) -> None:
        self._over = True
        self.posted.put(None)
        self._thread.join(END_S)

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
            torch.cuda._sleep(HEAD_START)  # type: ignore[no-untyped-call]
        return _NcclExchange(works)

    def _watch(self) -> None:
        seconds = self.group.timeout.total_seconds()
        while (next_one := self.posted.get()) is not None:
            posted, works, what = next_one
            while not self._over and not all(w.is_completed() for w in works):
                if time.monotonic() > posted + 0.9 * seconds:
                    print(
                        f"ringfa3: rank {self.group.ranks[self.group.rank]}: {what}: "
                        f"nothing for {0.9 * seconds:g} s",
                        file=sys.stderr,
                        flush=True,
                    )
                    break
                time.sleep(POLL_S)


class _NcclExchange:
    def __init__(self, works: Sequence[dist.Work]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


TRANSPORTS: dict[str, type[GlooTransport] | type[NcclTransport]] = {
    "gloo": GlooTransport,
    "nccl": NcclTransport,
}
