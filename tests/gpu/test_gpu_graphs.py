"""If this fails, CUDA graphs of ring calls hang, or replay wrong numbers. Ring calls over
`symmetric` in CUDA graphs: `pytest -m gpu tests/gpu/test_gpu_graphs.py`."""

from __future__ import annotations

import os
import random
import re
import time

import pytest
import torch
import torch.distributed as dist

from ringfa3 import RingError, RingFA3Attention, flash_attn_varlen_func, plan_context
from ringfa3.symmetric.forward_mode import FORWARD_MODE_ENV, FORWARD_MODES
from tests.support.dense import cumulative
from tests.support.gpus import spawn, worlds

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

TURNS = 24
TIMEOUT_S = 10.0
H, HK, D = 8, 2, 128


class Layer:
    """Attention on a rank's shards of static tensors."""

    def __init__(self, lengths: list[int], deterministic: bool, layout: str = "zigzag") -> None:
        self.lengths, self.deterministic = lengths, deterministic
        self.plan = plan_context(cumulative(lengths), None, layout)
        self.attend = RingFA3Attention(
            H, HK, D, transport="symmetric", layout=layout, deterministic=deterministic
        )
        shapes = [(self.plan.local_tokens, n, D) for n in (H, HK, HK, H)]
        self.q, self.k, self.v, self.dout = (
            torch.zeros(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes
        )
        self.leaves = [x.requires_grad_() for x in (self.q, self.k, self.v)]

    def fill(self, seed: int) -> None:
        """Fills the shards with other numbers, from whole tensors that are equal on all ranks."""
        torch.manual_seed(seed)
        tokens = sum(self.lengths)
        self.whole = [torch.randn(tokens, n, D, device="cuda").bfloat16() for n in (H, HK, HK, H)]
        with torch.no_grad():
            for x, y in zip((self.q, self.k, self.v, self.dout), self.whole, strict=True):
                x.copy_(self.plan.shard(y))

    def forward(self) -> torch.Tensor:
        return self.attend(*(x.unsqueeze(0) for x in self.leaves), self.plan)[0]

    def expected(self) -> list[torch.Tensor]:
        """Out, dq, dk, dv of this rank's tokens, computed on one device."""
        *inputs, dout = self.whole
        leaves = [x.detach().requires_grad_() for x in inputs]
        cu = cumulative(self.lengths)
        out = flash_attn_varlen_func(*leaves, cu, cu, causal=True)
        assert isinstance(out, torch.Tensor)
        grads = torch.autograd.grad(out, leaves, dout)
        return [self.plan.shard(x.detach()) for x in (out, *grads)]


def step(layers: list[Layer]) -> list[list[torch.Tensor]]:
    """Out, dq, dk, dv of each layer; all forwards run first."""
    outs = [layer.forward() for layer in layers]
    results = [
        [out.detach(), *torch.autograd.grad(out, layer.leaves, layer.dout)]
        for layer, out in reversed(list(zip(layers, outs, strict=True)))
    ]
    return results[::-1]


def captured(layers: list[Layer]) -> tuple[torch.cuda.CUDAGraph, list[list[torch.Tensor]]]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step(layers)
    return graph, results


def _graphs(rank: int, world: int) -> None:
    """Replays of two graphs and eager steps in any order, on other numbers each time, with late
    ranks and collectives of the job beside them. Every third turn each result equals one device
    within two roundings of bf16; deterministic layers equal an eager step bit for bit."""
    own, shared = random.Random(rank), random.Random(world)
    side, x = torch.cuda.Stream(), torch.zeros(1 << 20, device="cuda")
    dist.all_reduce(x)  # connects
    for kind in FORWARD_MODES:
        os.environ[FORWARD_MODE_ENV] = kind
        layers = [
            Layer([2048 * world], deterministic=True),
            Layer([700, 1, 900, 128, 1500], deterministic=False),
            Layer([300, 2000 * world], deterministic=True, layout="contiguous"),
        ]
        for number, layer in enumerate(layers):
            layer.fill(number)
        if kind == FORWARD_MODES[0]:
            with pytest.raises(ValueError, match="cannot be captured in a CUDA graph: no "):
                captured(layers)
        step(layers)
        replays = [captured(layers)]
        for turn in range(TURNS):
            if turn == TURNS // 2:
                replays.append(captured(layers[:2]))  # calls of the other parities, too
            for number, layer in enumerate(layers):
                layer.fill(100 * turn + number)
            choice = shared.randrange(1 + len(replays))
            beside = shared.random() < 0.3
            if own.random() < 0.3:
                torch.cuda._sleep(int(10 ** own.uniform(3, 6.5)))
            if own.random() < 0.1:
                time.sleep(own.uniform(0, 0.05))
            if choice == len(replays):
                results = step(layers)
            else:
                graph, results = replays[choice]
                with torch.no_grad():
                    for y in (y for some in results for y in some):
                        y.fill_(torch.nan)
                graph.replay()
            if beside:
                with torch.cuda.stream(side):
                    dist.all_reduce(x)
            found = [[y.clone() for y in some] for some in results]
            if shared.random() < 0.5:  # at once again, on the same numbers
                replays[0][0].replay()
            again = step(layers)
            for layer, got, eager in zip(layers, found, again, strict=False):
                for name, a, b in zip(("out", "dq", "dk", "dv"), got, eager, strict=True):
                    where = f"{kind}, turn {turn}, {name} of {layer.lengths}"
                    if layer.deterministic or name == "out":
                        assert torch.equal(a, b), where
                    else:
                        torch.testing.assert_close(a, b, atol=1e-2, rtol=2**-6, msg=where)
            if turn % 3 == 0:
                for layer, got in zip(layers, found, strict=False):
                    for a, b in zip(got, layer.expected(), strict=True):
                        torch.testing.assert_close(a, b, atol=2e-2, rtol=2**-6)
        del replays


def _many(rank: int, world: int) -> None:
    """Replays in a queue, without the host in between, equal an eager step bit for bit."""
    layers = [Layer([1024 * world], deterministic=True) for _ in range(2)]
    for number, layer in enumerate(layers):
        layer.fill(number)
    step(layers)
    expected = step(layers)
    graph, results = captured(layers)
    for result in results:
        for tensor in result:
            tensor.detach().fill_(float("nan"))
    for turn in range(100 * world):
        if turn % world == rank:
            torch.cuda._sleep(100_000)
        graph.replay()
    for got, eager in zip(results, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(got, eager, strict=True))


def _stall(rank: int, world: int) -> None:
    """Rank 1 does not replay; each other rank raises, naming hop and peer."""
    layers = [Layer([1024 * world], deterministic=False)]
    layers[0].fill(0)
    step(layers)
    graph, _ = captured(layers)
    y = torch.zeros(1, device="cuda").add_(1)  # its kernel is loaded
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    if rank == 1:
        time.sleep(TIMEOUT_S + 10)
        os._exit(0)
    start = time.monotonic()
    with pytest.raises(RingError) as raised:  # noqa: PT012
        graph.replay()
        while True:  # until the queue is full: then the driver blocks every thread that calls it
            y.add_(1)
    assert time.monotonic() - start < TIMEOUT_S + 5
    said = str(raised.value)
    assert re.search(r"(forward|backward) hop \d: |aborted: rank", said), said
    with pytest.raises(RingError, match="this CP group is unusable"):
        step(layers)
    os._exit(0)


@worlds(2, 3, 4, 8)
def test_graphs(world: int) -> None:
    spawn(_graphs, world)


@worlds(2, 4, soak=(3, 8))
def test_many_replays(world: int) -> None:
    spawn(_many, world)


@worlds(2, soak=(3, 4))
def test_a_rank_that_stalls(world: int) -> None:
    spawn(_stall, world, TIMEOUT_S)
