"""If this fails, rings over peers' memory give wrong results, or hang. The `symmetric` transport on
GPUs that share NVLink: `pytest -m gpu tests/gpu`.

Run it before timing anything over this transport.
"""

from __future__ import annotations

import os
import random
import re
import time
from collections.abc import Sequence
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ringfa3 import RingError, flash_attn_func, plan_context, ring_attn_func
from ringfa3.symmetric.backend import DriverCalls, SymmetricBackend
from ringfa3.symmetric.forward_mode import FORWARD_MODE_ENV, FORWARD_MODES
from ringfa3.symmetric.stream_ops import Copy, Event, Operation, SetSignal, Stream, WaitAndReset
from tests.gpu.test_gpu_ring import plain_attention
from tests.support.dense import cumulative
from tests.support.gpus import Worker, spawn, worlds
from tests.support.placements import placed

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

STEPS = 12
TIMEOUT_S = 10.0


class Slow:
    """Random delays before operations of any stream, and NaN where a copy will arrive.

    On side streams both are copies from the host: a kernel might find no free SM beside one of ours
    that waits for an operation behind it.
    """

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.inner = SymmetricBackend.prepare
        self.poison = torch.full((1 << 25,), 0xFF, dtype=torch.uint8).pin_memory()
        self.scratch = torch.empty_like(self.poison, device="cuda")

    def sleep(self, side: bool = False) -> None:
        """Sometimes, up to about a millisecond on the current stream, or a while on the host."""
        if self.rng.random() < 0.2:
            if side:
                size = int(10 ** self.rng.uniform(4, 7.5))
                self.scratch[:size].copy_(self.poison[:size], non_blocking=True)
            else:
                torch.cuda._sleep(int(10 ** self.rng.uniform(3, 6.3)))
        if self.rng.random() < 0.02:
            time.sleep(self.rng.uniform(0, 0.01))

    def prepare(
        self,
        backend: SymmetricBackend,
        operations: Sequence[Operation],
        in_kernel: frozenset[Event],
    ) -> DriverCalls:
        """With a disturbance before each operation, or before a few on signals."""
        whole = DriverCalls([], [])
        begin = 0
        while begin < len(operations):
            end = begin + 1
            while (
                end < len(operations)
                and all(
                    isinstance(x, (SetSignal, WaitAndReset)) for x in operations[begin : end + 1]
                )
                and self.rng.random() < 0.7
            ):
                end += 1
            calls, waits = self.inner(backend, operations[begin:end], in_kernel)
            whole.calls.append((partial(self.disturb, backend, operations[begin]), ()))
            whole.calls.extend(calls)
            whole.waits.extend(waits)
            begin = end
        return whole

    def disturb(self, backend: SymmetricBackend, operation: Operation) -> int:
        with torch.cuda.stream(backend._streams[operation.stream]):
            self.sleep(side=operation.stream is not Stream.COMPUTE)
            if isinstance(operation, Copy):
                rows = operation.target
                row_bytes = backend.row_bytes[rows.buffer]
                arriving = backend.local(rows.buffer, rows.slot)
                arriving = arriving[rows.begin * row_bytes : rows.end * row_bytes]
                arriving.copy_(self.poison[: len(arriving)], non_blocking=True)
        return 0


class Layer:
    """A random plan and random tensors, the same on all ranks."""

    transport = "symmetric"

    def __init__(
        self, rng: random.Random, longest: int = 900, lengths: list[int] | None = None
    ) -> None:
        dtype = rng.choice((torch.bfloat16, torch.float16))
        count = rng.randint(1, 6)
        self.lengths = lengths or [
            rng.choice((1, 127, 128, rng.randint(1, longest))) for _ in range(count)
        ]
        h, hk, d = rng.choice(((8, 2, 64), (4, 4, 128)))
        causal, window = rng.random() < 0.7, rng.choice(((-1, -1), (100, -1)))
        layout = rng.choice(("zigzag", "contiguous"))
        self.plan = plan_context(cumulative(self.lengths), None, layout, causal, window)
        torch.manual_seed(rng.randrange(1 << 30))
        tokens = sum(self.lengths)
        self.q, self.k, self.v, self.dout = (
            torch.randn(tokens, n, d, device="cuda").to(dtype) for n in (h, hk, hk, h)
        )
        self.mine = [self.plan.shard(x).requires_grad_() for x in (self.q, self.k, self.v)]

    def forward(self) -> None:
        out = ring_attn_func(*self.mine, self.plan, transport=self.transport)
        assert isinstance(out, torch.Tensor)
        self.out = out

    def backward(self) -> None:
        self.out.backward(self.plan.shard(self.dout))

    def check(self) -> None:
        """max|x - ref| <= 2 max|x_pt - ref| + 1e-5 for out, dq, dk, dv of the rank's tokens; ref is
        float64, and x_pt of all tokens."""
        got = [x.detach() for x in (self.out, *(x.grad for x in self.mine))]
        truth, plain = [], []
        for results, kind in ((truth, torch.float64), (plain, self.dout.dtype)):
            inputs = [x.to(kind).requires_grad_() for x in (self.q, self.k, self.v)]
            y = plain_attention(*inputs, self.lengths, self.plan.effective_window)
            y.backward(self.dout.to(kind))
            results += [y.detach(), *(x.grad for x in inputs)]
        for name, x, exact, x_pt in zip(("out", "dq", "dk", "dv"), got, truth, plain, strict=True):
            error = (x - self.plan.shard(exact)).abs().max() if len(x) else 0.0
            allowed = 2 * (x_pt - exact).abs().max() + 1e-5
            assert error <= allowed, f"{name} is off by {error:.2e}, allowed {allowed:.2e}"


def _exact(rank: int, world: int) -> None:
    """Steps of three layers, forward and backward; ranks meet only in the ring.

    The layers' forwards are gathered, hop by hop, or alternate.
    """
    rng, slow = random.Random(world), Slow(rank)
    for step in range(STEPS):
        layers = [Layer(rng) for _ in range(3)]
        with mock.patch.object(SymmetricBackend, "prepare", lambda m, *a: slow.prepare(m, *a)):
            for number, layer in enumerate(layers):
                slow.sleep()
                turn = number if step % 3 == 2 else step % 3
                os.environ[FORWARD_MODE_ENV] = FORWARD_MODES[turn % 2]
                layer.forward()
            for layer in reversed(layers):
                slow.sleep()
                layer.backward()
        for layer in layers:
            layer.check()


def _crowded(rank: int, world: int) -> None:
    """Gathered forwards on all SMs beside collectives of the job. One rank waits for its collective
    before it publishes; the others start theirs after the launch. None hangs, and all equal one
    device within two roundings of bf16. In every other step each tile waits for a few rows of
    rank 0."""
    os.environ[FORWARD_MODE_ENV] = "gathered"
    side, x = torch.cuda.Stream(), torch.zeros(1 << 20, device="cuda")
    few = placed([(0, 16, 0)] + [(0, 2048, r) for r in range(1, world)], world, (-1, 0))
    cases = []
    for plan in (plan_context(2048 * world), few.plans[rank]):
        torch.manual_seed(0)
        tokens = plan.total_tokens
        q, k, v = (torch.randn(1, tokens, n, 128, device="cuda").bfloat16() for n in (32, 8, 8))
        whole = flash_attn_func(q, k, v, causal=True)
        assert isinstance(whole, torch.Tensor)
        cases.append((plan, [plan.shard(y[0]) for y in (q, k, v)], plan.shard(whole[0])))
    for plan, mine, _ in cases:  # opens the backend and lets its memory grow: ranks meet for that
        ring_attn_func(*mine, plan, transport="symmetric")
    dist.all_reduce(x)
    for step in range(20 * world):
        plan, mine, expected = cases[step % 2]
        if late := step // 2 % world == rank:
            torch.cuda._sleep(1_000_000)
            dist.all_reduce(x)
        out = ring_attn_func(*mine, plan, transport="symmetric")
        if not late:
            with torch.cuda.stream(side):
                dist.all_reduce(x)
        assert isinstance(out, torch.Tensor)
        torch.testing.assert_close(out, expected, atol=1e-2, rtol=2**-6)


def _overlapping(rank: int, world: int) -> None:
    """Groups that share some ranks, in turn and out of step: each has its own memory, which grows.
    Within two roundings of bf16 of one device."""
    pair = dist.new_group([0, 1])
    for tokens in (512, 4096, 1024):
        for group, size in ((pair, 2), (dist.group.WORLD, world), (pair, 2)):
            if rank >= size:
                continue
            plan = plan_context(tokens * size, group=group)
            torch.manual_seed(tokens)
            q, k, v = (torch.randn(1, tokens * size, n, 64, device="cuda") for n in (4, 2, 2))
            whole = flash_attn_func(q.bfloat16(), k.bfloat16(), v.bfloat16(), causal=True)
            assert isinstance(whole, torch.Tensor)
            mine = (plan.shard(x[0].bfloat16()) for x in (q, k, v))
            out = ring_attn_func(*mine, plan, transport="symmetric")
            assert isinstance(out, torch.Tensor)
            torch.testing.assert_close(out, plan.shard(whole[0]), atol=1e-2, rtol=2**-6)


def _stall(rank: int, world: int, direction: str = "forward", kind: str = "hops") -> None:
    """Rank 1 does not enter the second call; each other rank raises, naming hop and peer."""
    os.environ[FORWARD_MODE_ENV] = kind
    plan = plan_context(1024 * world)
    x = torch.randn(plan.local_tokens, 4, 64, device="cuda").bfloat16().requires_grad_()

    def forward() -> torch.Tensor:
        out = ring_attn_func(x, x, x, plan, transport="symmetric")
        assert isinstance(out, torch.Tensor)
        return out

    forward().sum().backward()
    out = forward() if direction == "backward" else x
    y = torch.zeros(1, device="cuda").add_(1)  # its kernel is loaded
    torch.cuda.synchronize()
    dist.barrier()
    if rank == 1:
        time.sleep(TIMEOUT_S + 10)
        os._exit(0)
    start = time.monotonic()
    with pytest.raises(RingError) as raised:  # noqa: PT012
        if direction == "forward":
            forward()
        else:
            out.sum().backward()
        while True:  # until the queue is full: then the driver blocks every thread that calls it
            y.add_(1)
    assert time.monotonic() - start < TIMEOUT_S + 5
    said = str(raised.value)
    assert re.search(rf"{direction} hop \d: d?K/d?V|aborted: rank", said), said
    with pytest.raises(RingError, match="this CP group is unusable"):
        forward()
    os._exit(0)


def _stall_gathered(rank: int, world: int) -> None:
    """The same in a gathered forward."""
    _stall(rank, world, "forward", "gathered")


def _stall_backward(rank: int, world: int) -> None:
    """The same in a backward call."""
    _stall(rank, world, "backward")


@worlds(2, 3, 4, 8)
def test_symmetric(world: int) -> None:
    """The single-device gate on slow, poisoned streams."""
    spawn(_exact, world)


@worlds(2, 4, soak=(3, 8))
@pytest.mark.parametrize("function", [_crowded, _overlapping])
def test_other_collectives_and_groups(world: int, function: Worker) -> None:
    spawn(function, world)


@worlds(2, soak=(3, 4, 8))
@pytest.mark.parametrize("function", [_stall, _stall_gathered, _stall_backward])
def test_a_rank_that_stalls(world: int, function: Worker) -> None:
    spawn(function, world, TIMEOUT_S)
