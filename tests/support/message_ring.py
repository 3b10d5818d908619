"""The passes of all ranks of a ring by messages, in threads of one process.

Messages go by queues. What a message sends must not change before it has left. New buffers are NaN,
and so is what a message fills until it has come. So a read or a write too early gives wrong values.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar
from unittest.mock import patch

import torch

from ringfa3.pass_interface import Attend
from ringfa3.planning.context_plan import ContextPlan
from ringfa3.ring.p2p import Message
from ringfa3.ring.p2p_pass import P2PRingPass

LIMIT_S = 20.0
T = TypeVar("T")


@dataclass
class Links:
    """sent: rows by (tag, sender, receiver). broken: a rank has failed."""

    sent: Counter[tuple[int, int, int]] = field(default_factory=Counter)
    queues: dict[tuple[int, int, int], queue.SimpleQueue[torch.Tensor]] = field(
        default_factory=lambda: defaultdict(queue.SimpleQueue)
    )
    lock: Any = field(default_factory=threading.Lock)
    broken: bool = False

    def queue(self, *link: int) -> queue.SimpleQueue[torch.Tensor]:
        with self.lock:
            return self.queues[link]

    def receive(self, link: queue.SimpleQueue[torch.Tensor]) -> torch.Tensor:
        """Waits for rows."""
        end = time.monotonic() + LIMIT_S
        while not self.broken and time.monotonic() < end:
            with suppress(queue.Empty):
                return link.get(timeout=0.05)
        raise AssertionError("rows never come")


@dataclass
class _Exchange:
    links: Links
    receives: list[tuple[torch.Tensor, queue.SimpleQueue[torch.Tensor]]]
    sends: list[tuple[torch.Tensor, torch.Tensor]]

    def wait(self) -> None:
        for tensor, link in self.receives:
            assert tensor.isnan().all(), "something was written where a message arrives"
            tensor.copy_(self.links.receive(link))
        for tensor, copy in self.sends:
            assert torch.equal(tensor, copy), "rows changed before they had left"


@dataclass
class Transport:
    """A `Transport` of one rank."""

    rank: int
    links: Links

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> _Exchange:
        copies = []
        for m in sends:
            assert m.peer != self.rank
            assert len(m.tensor), "an empty message"
            assert not m.tensor.isnan().any(), f"{m.what} leaves before it has come"
            copies.append((m.tensor, m.tensor.clone()))
            self.links.queue(m.tag, self.rank, m.peer).put(copies[-1][1])
            with self.links.lock:
                self.links.sent[m.tag, self.rank, m.peer] += len(m.tensor)
        for m in receives:
            m.tensor.fill_(torch.nan)
        links = [self.links.queue(m.tag, m.peer, self.rank) for m in receives]
        into = list(zip((m.tensor for m in receives), links, strict=True))
        return _Exchange(self.links, into, copies)

    def close(self, lost: bool) -> None:
        """There is nothing to end."""


def run_passes(
    plans: Sequence[ContextPlan],
    pass_type: str,
    kv: Callable[[ContextPlan], torch.Tensor],
    attend: Callable[[ContextPlan, P2PRingPass], Attend],
) -> tuple[list[P2PRingPass], Links]:
    """The passes of all ranks, after `run`, and what they sent.

    kv: K, and V too, of a plan's rank. attend: of each rank.
    """
    links = Links()

    def run(plan: ContextPlan) -> P2PRingPass:
        ring = P2PRingPass(Transport(plan.rank, links), plan, pass_type)  # type: ignore[arg-type]
        k = kv(plan)
        try:
            ring.start(k, k.clone())
            ring.run(attend(plan, ring))
        except BaseException:
            links.broken = True
            raise
        return ring

    return in_threads(plans, run, links), links


def in_threads(
    plans: Sequence[ContextPlan], run: Callable[[ContextPlan], T], links: Links
) -> list[T]:
    """What `run` returns for each rank's plan. New buffers are NaN meanwhile."""
    with nan_memory(links), ThreadPoolExecutor(len(plans)) as pool:
        return list(pool.map(run, plans))


@contextmanager
def nan_memory(links: Links) -> Iterator[None]:
    """New buffers are NaN. At the end all messages have been received."""
    new_empty = torch.Tensor.new_empty

    def new_nan(x: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        return new_empty(x, *args, **options).fill_(torch.nan)

    with patch.object(torch.Tensor, "new_empty", new_nan):
        yield
    assert all(link.empty() for link in links.queues.values()), "a message was never received"
