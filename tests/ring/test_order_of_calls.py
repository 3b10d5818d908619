"""If this fails, ranks that call in another order get wrong numbers without an error. Calls of
equal settings in another order on each rank, or refused while a host goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from unittest import mock

import torch
import torch.distributed as dist

from ringfa3 import plan_context, ring_attn_func
from ringfa3.ring import p2p
from ringfa3.ring.group import RingGroup
from ringfa3.ring.p2p import GlooTransport, Message
from tests.support.ranks import Ranks, group_of, sacrifice

Group = dist.ProcessGroup
SOON_S = 8.0  # on a busy machine; the timeouts are longer


class LateTransport(GlooTransport):
    """The host goes on while messages are under way, as over NCCL; `synchronise` waits for them."""

    here: LateTransport

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        LateTransport.here = self
        self.late = True
        self.posted: list[tuple[int, threading.Event]] = []
        self.aborted = threading.Event()

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> p2p.Exchange:
        exchange = super().exchange(sends, receives)
        if not self.late:
            return exchange
        self.posted.append((self.group.call, exchange._done))  # type: ignore[attr-defined]
        self.waiting.put(exchange)  # type: ignore[arg-type]
        return mock.Mock()

    def completed_before(self, call: int) -> bool:
        return all(done.is_set() for number, done in self.posted if number < call)

    def abort(self) -> None:
        self.aborted.set()

    def synchronise(self) -> None:
        while not self.aborted.is_set() and not all(done.is_set() for _, done in self.posted):
            time.sleep(0.01)


def _text(act: Callable[[], None]) -> str:
    try:
        act()
    except ValueError as error:
        return str(error)
    return "nothing was raised"


class Step:
    def __init__(self, group: Group) -> None:
        self.plan = plan_context([0, 40, 41, 150], group)
        self.x = torch.ones(self.plan.local_tokens, 2, 8)

    def forward(self) -> torch.Tensor:
        out = ring_attn_func(*[self.x.clone().requires_grad_()] * 3, self.plan)
        assert isinstance(out, torch.Tensor)
        return out


def _exchanged(_: Group, late: bool) -> list[str]:
    """What two backwards raise, in another order on each rank; then those in one order do."""
    group = group_of(2, 60.0)
    if dist.get_rank() >= 2:
        return []
    step = Step(group)
    step.forward().sum().backward()
    outs = [step.forward() for _ in range(2)]

    def backward() -> None:
        for out in reversed(outs) if dist.get_rank() else outs:
            out.sum().backward()
        if late:
            LateTransport.here.synchronise()

    if late:
        LateTransport.here.late = True
    start = time.monotonic()
    seen = [_text(backward)]
    assert time.monotonic() - start < SOON_S
    if late:
        mock.patch.object(LateTransport, "late", False).start()
    outs = [step.forward() for _ in range(2)]
    for out in reversed(outs):
        out.sum().backward(retain_graph=True)
        out.sum().backward()
    return [*seen, "right"]


def test_backwards_in_another_order_raise_on_all_ranks(ranks: Ranks) -> None:
    """They name their forward calls. The same order on all ranks, and a second backward through
    one forward, never raise."""
    for seen, right in ranks.run(4, _exchanged, False)[:2]:
        assert "forward of this backward differs between the ranks" in seen
        assert "rank 0: call 3; rank 1: call 4" in seen
        assert right == "right"


def _late(group: Group, rounds: int) -> list[tuple[str, float]]:
    """The outcome of calls that rank 1 refuses, while rank 0's host has gone on."""
    rank, seen = dist.get_rank(), []
    with (
        mock.patch.dict(p2p.P2P_TRANSPORTS, gloo=LateTransport),  # type: ignore[dict-item]
        mock.patch.object(RingGroup, "asynchronous", True),
    ):
        step = Step(group)
        for number in range(rounds):
            step.forward()  # connects
            LateTransport.here.synchronise()
            dist.barrier(group)
            start = time.monotonic()

            def call(number: int = number) -> None:
                if rank == 0:
                    step.forward()
                elif number % 2:
                    ring_attn_func(step.x, step.x, step.x[1:], step.plan)
                else:
                    ring_attn_func(step.x, step.x, step.x, step.plan, softmax_scale=0.5)
                LateTransport.here.synchronise()

            seen.append((_text(call), time.monotonic() - start))
    return seen


def test_a_refused_call_interrupts_a_caller_whose_host_has_gone_on() -> None:
    """The call has no results: its connections end, and the next call makes new ones."""
    for outcomes in sacrifice(2, 20.0, _late, 4, limit=60.0):
        for number, (seen, seconds) in enumerate(outcomes):
            assert ("v has shape" if number % 2 else "softmax_scale differs") in seen
            assert seconds < SOON_S


def _late_exchange(group: Group) -> str:
    with (
        mock.patch.dict(p2p.P2P_TRANSPORTS, gloo=LateTransport),  # type: ignore[dict-item]
        mock.patch.object(RingGroup, "asynchronous", True),
    ):
        step = Step(group)
        outs = [step.forward() for _ in range(2)]
        LateTransport.here.synchronise()
        dist.barrier(group)

        def backward() -> None:
            for out in reversed(outs) if dist.get_rank() else outs:
                out.sum().backward()
            LateTransport.here.synchronise()

        return _text(backward)


def test_calls_in_another_order_are_found_where_no_host_waits() -> None:
    """By the digests of calls, which ranks compare over the store."""
    for seen in sacrifice(2, 20.0, _late_exchange, limit=60.0):
        assert "ring calls up to number" in seen
        assert "rank 0: backward of call" in seen
