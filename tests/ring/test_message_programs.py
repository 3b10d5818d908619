"""If this fails, ring calls by messages do other things in C++ than in Python: other launches or
messages, other bits, or errors that nobody gets."""

from __future__ import annotations

import copy
import gc
import os
import re
import signal
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ringfa3 import ContextPlan, KernelSpec, Mask, RingError, host, plan_context, ring_attn_func
from ringfa3.build.host_library import ensure_host_library
from ringfa3.planning.exchange.launch_exchange import LaunchExchange
from ringfa3.planning.row_exchange import RowIndex
from ringfa3.ring.levels import message_program
from ringfa3.ring.op import run_backward, run_forward
from ringfa3.ring.p2p import FakeTransport, GlooTransport, Message
from ringfa3.ring.p2p_pass import P2PRingPass
from ringfa3.ring.prepare_call import PreparedCall
from tests.support.fake_kernels import SMS, FakeKernels
from tests.support.host_calls import equal, in_terms
from tests.support.message_ring import Links, Transport, in_threads
from tests.support.ranks import Ranks, sacrifice

TOKENS, HEADS, KV_HEADS, HEAD_DIM = 96, 4, 2, 64  # of a rank
SCALE = HEAD_DIM**-0.5
CALLS = 2  # of each host: the first one builds the schedule


@contextmanager
def launcher(driver_of: str, hosts: int = 1) -> Iterator[FakeKernels]:
    """The C++ launcher, and kernels that stand in, in a process of the pool."""
    kernels = FakeKernels(driver_of)  # type: ignore[arg-type]
    with kernels.stands_in(), mock.patch.dict(os.environ, RINGFA3_HOSTS=str(hosts)):
        host.start(host.load(ensure_host_library()), "cpu", kernels.driver())
        try:
            yield kernels
        finally:
            host.stop()


def new_plan(group: Any, world: int) -> ContextPlan:
    end = TOKENS * world
    return plan_context([0, 7 * end // 24, 10 * end // 24, end], group)


def tensors(plan: ContextPlan, seed: int) -> list[torch.Tensor]:
    """q, k, v, dout, dlse and a sink."""
    generator = torch.Generator().manual_seed(8 * seed + plan.rank)
    made = [
        torch.randn(rows, heads, HEAD_DIM, generator=generator).bfloat16()
        for rows, heads in (
            (plan.local_tokens, HEADS),
            *[(plan.local_keys, KV_HEADS)] * 2,
            (plan.local_tokens, HEADS),
        )
    ]
    dlse = torch.randn(HEADS, plan.local_tokens, generator=generator)
    return [*made, dlse, torch.randn(HEADS, generator=generator)]


def step(plan: ContextPlan, seed: int, with_sink: bool) -> dict[str, torch.Tensor]:
    """Inputs and results of a forward and a backward."""
    q, k, v, dout, dlse, sink = tensors(plan, seed)
    leaves = [x.requires_grad_() for x in ((q, k, v, sink) if with_sink else (q, k, v))]
    options = {"sink": sink} if with_sink else {}
    out, lse = ring_attn_func(q, k, v, plan, return_lse=True, **options)  # type: ignore[arg-type]
    grads = torch.autograd.grad([out, lse], leaves, [dout, dlse])
    names = ("q", "k", "v", "dout", "dlse", "sink", "out", "lse", "dq", "dk", "dv", "dsink")
    return dict(zip(names, (q, k, v, dout, dlse, sink, out, lse, *grads), strict=False))


def _of_both(group: dist.ProcessGroup, driver_of: str, hosts: int) -> tuple[list[str], bool]:
    """What differs between the hosts, and whether rows of the plan's messages are scattered."""
    logs: dict[str, list[Any]] = {which: [] for which in host.HOSTS}
    inner, world = GlooTransport.exchange, dist.get_world_size(group)

    def exchange(transport: Any, *messages: list[Message]) -> Any:
        moved = [[(*m[1:4], m.tensor.shape, m.tensor.stride()) for m in x] for x in messages]
        logs[which].append(moved)
        return inner(transport, *messages)

    with (
        launcher(driver_of, hosts) as kernels,
        mock.patch.object(GlooTransport, "exchange", exchange),
    ):
        plan = new_plan(group, world)
        results: dict[str, list[Any]] = {which: [] for which in host.HOSTS}
        replayed = []
        for which in host.HOSTS:
            host.select(which)
            before = host.counts()["replayed"]
            for seed in range(CALLS):
                kernels.take()
                made = step(plan, seed, world == 3)
                # gradients may lie where a buffer of the call was
                known = {name: x for name, x in made.items() if name not in ("dk", "dv")}
                logs[which].append([in_terms(x, known) for x in kernels.take()])
                results[which].append(made)
            replayed.append(host.counts()["replayed"] - before)
    problems = [] if replayed == [0, 2 * CALLS] else [f"programs ran {replayed} times"]
    problems += [] if len(logs["cpp"]) > 3 * CALLS or world == 1 else ["no messages"]
    for cpp, python in zip(logs["cpp"], logs["python"], strict=True):
        problems += [f"{x}, not {y}" for x, y in zip(cpp, python, strict=True) if x != y]
    for python, cpp in zip(results["python"], results["cpp"], strict=True):
        problems += [name for name in python if not equal(python[name], cpp[name])]
    return problems, scattered(plan.by_messages())


def scattered(exchange: LaunchExchange) -> bool:
    return any(RowIndex.of_run(rows) is None for flow in exchange.flows for rows in flow.sent)


@pytest.mark.parametrize(("world", "hosts"), [(2, 1), (3, 1), (4, 1), (4, 2)])
def test_cpp_does_what_python_does_over_gloo(
    ranks: Ranks, host_library: Any, fake_library: FakeKernels, world: int, hosts: int
) -> None:
    """Launches with their arguments, messages in their order, results bit for bit; several calls.
    At three ranks also a sink."""
    del host_library  # built before the ranks need it
    found = ranks.run(world, _of_both, fake_library.library._name, hosts)
    assert [problems for problems, _ in found] == [[]] * world
    assert world < 4 or any(rows for _, rows in found)


class Broken(FakeTransport):
    """The messages of an exchange fail when it starts, or when a rank waits for them."""

    def __init__(self, fails_at: str) -> None:
        self.fails_at = fails_at

    def exchange(self, *messages: Any) -> Any:
        if self.fails_at == "start":
            raise RingError("rank 1: disk on fire")
        super().exchange(*messages)
        if self.fails_at == "wait":
            return self
        return FakeTransport().exchange([], [])

    def wait(self) -> None:
        raise RingError("rank 1: disk on fire")


def calls_of(plan: ContextPlan, transport: Any) -> Iterator[list[torch.Tensor]]:
    """Results of a forward and a backward by a transport."""
    q, k, v, dout, dlse, sink = tensors(plan, 0)
    with torch.no_grad():
        call = PreparedCall(plan, "forward", partial(P2PRingPass, transport))
        out, lse = run_forward(q, k, v, SCALE, call, sink)
        yield [out, lse]
        call = call._replace(pass_type="backward")
        yield list(run_backward(dout, dlse, q, k, v, out, lse, SCALE, False, call, sink))


def test_errors_of_messages_are_raised_as_they_are(kernels: FakeKernels) -> None:
    """A later call runs, and programs have run all of them."""
    plan, before = new_plan((0, 2), 2), host.counts()["replayed"]
    for fails_at in ("start", "wait"):
        with pytest.raises(RingError, match=r"^rank 1: disk on fire$"):
            next(calls_of(plan, Broken(fails_at)))
    assert len(list(calls_of(plan, Broken("never")))) == 2
    assert host.counts()["replayed"] - before == 4


def test_captures_and_empty_ranks_run_in_python(kernels: FakeKernels) -> None:
    """A graph cannot call Python, and a program returns nothing empty."""
    plan, before = new_plan((0, 2), 2), host.counts()["replayed"]
    wanted = list(calls_of(plan, FakeTransport()))
    kernels.library.fake_capture(1)
    captured = list(calls_of(plan, FakeTransport()))
    kernels.library.fake_capture(0)
    assert host.counts()["replayed"] - before == 2
    for x, y in zip(captured, wanted, strict=True):
        assert all(map(equal, x, y))
    empty = plan_context(Mask.documents([0, 1], [0, 64], causal=False), (1, 2))
    assert not empty.local_tokens
    assert [len(x) for x in calls_of(empty, FakeTransport())] == [2, 4]
    assert host.counts()["replayed"] - before == 2


def _dies(group: dist.ProcessGroup, driver_of: str) -> tuple[str, bool]:
    """The error of a backward in which rank 1 is killed, and whether a program ran."""
    inner = GlooTransport.exchange

    def exchange(transport: Any, *messages: list[Message]) -> Any:
        if dist.get_rank() == 1 and messages[0][0].what.startswith("backward"):
            os.kill(os.getpid(), signal.SIGKILL)
        return inner(transport, *messages)

    with launcher(driver_of), mock.patch.object(GlooTransport, "exchange", exchange):
        host.select("cpp")
        plan = new_plan(group, dist.get_world_size(group))
        with pytest.raises(RingError) as caught:
            step(plan, 0, with_sink=False)
        return str(caught.value), host.counts()["replayed"] > 0


def test_a_rank_that_dies_in_a_program_is_named(
    host_library: Any, fake_library: FakeKernels
) -> None:
    """All raise RingError; the first of them names the hop."""
    del host_library  # built before the ranks need it
    results = sacrifice(3, 10.0, _dies, fake_library.library._name, lost=1)
    (first, _), (second, _) = found = [results[rank] for rank in (0, 2)]
    assert all(replayed for _, replayed in found)
    named = re.compile(r"rank \d: backward hop \d: (K/V|dK/dV), (sending to|receiving from) rank 1")
    assert named.search(first) or named.search(second), found


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("hosts", [1, 2])
def test_buffers_of_a_program_are_not_touched_while_messages_use_them(hosts: int) -> None:
    """Rows that leave keep their values, and rows that arrive are read after they have come. The
    plans have schedules over peers' memory, which do not fit. Reference: Python's results."""
    world, made = 4, {}
    for which in host.HOSTS:
        host.select(which)
        of_rank = tuple(rank * hosts // world for rank in range(world))
        end = TOKENS * world
        plans = [plan_context([0, 7 * end // 24, end], (r, world), hosts=of_rank) for r in range(4)]
        for plan in plans:
            KernelSpec(
                HEADS, KV_HEADS, HEAD_DIM, num_sms=SMS, sink=True, lse_gradient=True
            ).prepare(plan)
            assert bool(plan.prepared) == (hosts == 1)
        links, before = Links(), host.counts()["replayed"]
        run = lambda plan: list(calls_of(plan, Transport(plan.rank, links)))  # noqa: B023, E731
        made[which] = in_threads(plans, run, links)
        assert host.counts()["replayed"] - before == (2 * world if which == "cpp" else 0)
        assert sum(links.sent.values())
    for python, cpp in zip(made["python"], made["cpp"], strict=True):
        for x, y in zip(python, cpp, strict=True):
            assert all(map(equal, x, y))


@pytest.mark.usefixtures("kernels")
def test_a_plan_dies_with_its_programs() -> None:
    """Else memory of the device stays."""
    plan = copy.copy(new_plan((0, 2), 2))  # which no cache holds
    assert len(list(calls_of(plan, FakeTransport()))) == 2
    assert len(message_program._programs[plan]) == 2
    gone = weakref.ref(plan)
    del plan
    gc.collect()
    assert gone() is None
