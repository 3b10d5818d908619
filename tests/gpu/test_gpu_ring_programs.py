"""If this fails, ring calls that start in C++ compute other bits than those that start in Python.
Rings whose calls start in C++, against those that start in Python, bit for bit.

Over `nccl` each rank has a GPU of its own. So it has over `symmetric` or, where there are too few,
all ranks share the first one: their memory, signals and driver calls are the same there, and only
their kernels take turns.
"""

from __future__ import annotations

import os
import random
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from ringfa3 import host, ring_attn_func
from ringfa3.build.host_library import ensure_host_library
from ringfa3.symmetric import self_test
from ringfa3.symmetric.forward_mode import FORWARD_MODE_ENV, FORWARD_MODES
from tests.gpu.test_gpu_symmetric import Layer
from tests.support import gpus
from tests.support.gpus import Worker, require_gpus, worlds
from tests.support.ranks import free_port

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

LAYERS = 4
TURNS = 6  # of each layer: both parities have a first call, which builds the program, and more

Results = list[torch.Tensor]


def _as_if_apart(rank: int) -> AbstractContextManager[object]:
    """Lets ranks that share a GPU pass for ranks with a GPU each."""
    introduce = self_test._introduction

    def introduction(device: torch.device) -> tuple[str, str, str]:
        machine, gpu, problem = introduce(device)
        return machine, f"{gpu}, rank {rank}", problem

    return mock.patch.object(self_test, "_introduction", introduction)


def _run(layer: Layer, scale: float) -> Results:
    """Out and gradients of the rank's tokens, with q times `scale`."""
    q, k, v = (x.detach().clone() for x in layer.mine)
    leaves = [x.requires_grad_() for x in (q * scale, k, v)]
    out = ring_attn_func(*leaves, layer.plan, deterministic=True, transport=layer.transport)
    assert isinstance(out, torch.Tensor)
    out.backward(layer.plan.shard(layer.dout))
    return [out.detach(), *(x.grad for x in leaves if x.grad is not None)]


def _replays(rank: int, world: int) -> None:
    """Layers that differ in shapes, masks and plans take turns; their inputs change each turn."""
    rng = random.Random(world)
    for kind in FORWARD_MODES:
        os.environ[FORWARD_MODE_ENV] = kind
        host.select("python")
        layers = [Layer(rng, longest=400) for _ in range(LAYERS)]
        wanted = [[_run(layer, scale) for scale in (1.0, 0.5)] for layer in layers]
        _take_turns(layers, wanted, kind)
    for layer in layers:
        layer.forward()
        layer.backward()
        layer.check()


def _take_turns(layers: list[Layer], wanted: list[list[Results]], kind: str) -> None:
    """Compares calls in C++ with the results of scales 1 and 0.5."""
    host.select("cpp")
    before = host.counts()["replayed"]
    for turn in range(TURNS):
        for number, layer in enumerate(layers):
            got = _run(layer, (1.0, 0.5)[turn // 2 % 2])
            names = zip(("out", "dq", "dk", "dv"), got, strict=True)
            for (name, x), y in zip(names, wanted[number][turn // 2 % 2], strict=True):
                assert torch.equal(x, y), f"{kind}, turn {turn}, layer {number}: {name}"
        layers[0].forward()  # an odd call: the next turn has the other parity
    replayed = host.counts()["replayed"] - before
    assert replayed >= 2 * LAYERS * (TURNS - 2), f"{kind}: {replayed} calls were replayed"


class OverNccl(Layer):
    transport = "nccl"


def _messages(rank: int, world: int) -> None:
    """As `_replays`, over `nccl`."""
    rng = random.Random(world)
    host.select("python")
    layers: list[Layer] = [OverNccl(rng, longest=400) for _ in range(LAYERS)]
    wanted = [[_run(layer, scale) for scale in (1.0, 0.5)] for layer in layers]
    _take_turns(layers, wanted, "messages")
    _memory(rank, world, OverNccl)


def _memory(rank: int, world: int, layer_type: type[Layer] = Layer) -> None:
    """A step that is replayed needs no more memory than Python's, beside 1 MiB."""
    layer = layer_type(random.Random(0), lengths=[2048 * world])
    peaks = []
    for which in host.HOSTS:
        host.select(which)
        for _ in range(6):
            _run(layer, 1.0)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        _run(layer, 1.0)
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert host.counts()["replayed"] > 0
    assert peaks[1] <= peaks[0] + (1 << 20), f"peaks in bytes: {peaks}"


def spawn(function: Worker, world: int) -> None:
    """As of `tests.support.gpus`, but over gloo, and on one GPU where there are too few."""
    require_gpus(1)
    ensure_host_library()  # before the ranks need it
    mp.spawn(_enter, (world, free_port(), function), world)


def _enter(rank: int, world: int, port: int, function: Worker) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    shared = torch.cuda.device_count() < world
    torch.cuda.set_device(0 if shared else rank)
    dist.init_process_group("gloo", rank=rank, world_size=world, timeout=timedelta(seconds=60))
    apart = _as_if_apart(rank) if shared else nullcontext()
    with apart:
        function(rank, world)
    dist.barrier()
    dist.destroy_process_group()


@worlds(2, 3, 4)
def test_ring_programs(world: int) -> None:
    spawn(_replays, world)


@worlds(2, 4)
def test_programs_of_messages(world: int) -> None:
    ensure_host_library()  # before the ranks need it
    gpus.spawn(_messages, world)


@worlds(2, soak=(4,))
def test_memory_of_ring_programs(world: int) -> None:
    spawn(_memory, world)
