"""If this fails, the split of a step's time blames the wrong part. The split of a step's time, on a
simulated device: a stream that runs work in order."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist

from ringfa3 import flash_attn_func, host
from ringfa3.custom_op import set_op_hook
from tests.support.ranks import sacrifice
from tests.train.engine.test_engines import LIMIT_S, layout
from train.config import Config, EngineConfig
from train.data.batches import make_batch
from train.data.samples import DocumentSlice, pack
from train.data.shards import open_corpus
from train.engine.make_engine import make_engine
from train.engine.time_split import CATEGORIES, TimeSplit, time_split_on
from train.model.matmul import Linear


class Device:
    """A host clock and a stream. Work takes time on the stream, a call takes time on the host."""

    def __init__(self) -> None:
        self.host = self.stream = 0.0  # seconds

    def work(self, seconds: float, host: float = 0.0) -> None:
        """Issue work of ``seconds``; the host needs ``host`` seconds to do so."""
        self.host += host
        self.stream = max(self.stream, self.host) + seconds

    def event(self) -> SimulatedEvent:
        return SimulatedEvent(self)

    def synchronise(self) -> None:
        self.host = max(self.host, self.stream)


class SimulatedEvent:
    def __init__(self, device: Device) -> None:
        self.device = device

    def record(self) -> None:
        self.device.work(0.0)
        self.at = self.device.stream

    def elapsed_time(self, later: SimulatedEvent) -> float:
        return 1e3 * (later.at - self.at)


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture
def times(device: Device) -> TimeSplit:
    return TimeSplit(device.event, device.synchronise, lambda: device.host)


def test_kinds_add_up_and_the_inner_one_counts(device, times):
    times.begin()
    device.work(1.0)
    with times.of("attention"):
        device.work(5.0)
        with times.of("communication"):
            device.work(0.5)
        device.work(0.25)
    with times.op("linear_backward"):
        device.work(2.0)
    with times.op("ring_attention_backward"):
        device.work(3.0)
    device.work(0.125)
    times.end()
    device.synchronise()
    expected = {"attention": 8.25, "matmul": 2.0, "communication": 0.5, "rest": 1.125, "idle": 0.0}
    assert times.seconds() == pytest.approx(expected)
    assert tuple(times.seconds()) == CATEGORIES


def test_a_device_that_waits_for_its_host_is_idle(device, times):
    """The host needs 2 s to issue a small kernel; work that was queued hides what comes before."""
    times.begin()
    with times.of("attention"):
        device.work(1.0)
    device.work(0.001, host=0.5)  # hidden: the stream is busy until 1.0
    with times.of("matmul"):
        device.work(1.0)
    device.work(0.001, host=4.0)
    device.host += 0.1
    with times.of("matmul"):
        device.work(1.0)
    times.end()
    split = times.seconds()
    assert split["rest"] == pytest.approx(0.001)
    assert split["idle"] == pytest.approx(4.6 - 2.001)
    assert split["matmul"] == pytest.approx(2.0)


def test_a_period_begins_anew_and_takes_events_again(device, times):
    with times.of("matmul"):
        device.work(7.0)  # before any period
    made = []
    times._new_event = lambda: made.append(device.event()) or made[-1]
    for _ in range(3):
        times.begin()
        times.leave()  # of an earlier period
        with times.of("matmul"):
            device.work(1.0)
        times.end()
        device.synchronise()
        assert times.seconds()["matmul"] == pytest.approx(1.0)
    assert len(made) == 8
    times.begin()
    device.work(1.0)
    times.pause()
    with times.of("matmul"):
        device.work(1.0)
    assert not times._boundaries
    assert len(made) == 8


def test_ops_are_seen_in_forward_and_backward(device, times):
    """The hook gets each op once: attention and products of a real model, by their names."""
    x = torch.randn(1, 8, 2, 4, requires_grad=True)
    layer = Linear(4, 4)
    times.begin()
    names = []

    def op(name):
        names.append(name)
        return times.op(name)

    set_op_hook(op)
    try:
        out = layer(flash_attn_func(x, x, x, causal=True).flatten(0, 2))
        out.sum().backward()
    finally:
        set_op_hook(None)
    assert names == ["attention", "linear", "linear_backward", "attention_backward"]
    categories = [x.category for x in times._boundaries if x.category != "rest"]
    assert categories == ["attention", "matmul", "matmul", "attention"]
    layer(torch.randn(3, 4))
    assert len(names) == 4


def test_replayed_ops_are_seen_as_those_of_python(kernels, device, times):
    """The same categories in the same order, while C++ builds schedules, then runs them."""
    q, k = torch.randn(2, 1, 8, 2, 64).bfloat16()
    layer = Linear(128, 64).bfloat16()
    seen = {}
    set_op_hook(times.op)
    try:
        for which in host.HOSTS:
            host.select(which)
            for _ in range(3):
                leaves = [x.clone().requires_grad_() for x in (q, k, k)]
                times.begin()
                out = flash_attn_func(*leaves, causal=True)
                layer(out.flatten(2).flatten(0, 1)).sum().backward()
                times.end()
                seen.setdefault(which, []).append([x.category for x in times._ended])
    finally:
        set_op_hook(None)
    assert host.counts()["replayed"] == 4  # the first forward and backward build
    assert seen["cpp"] == seen["python"]
    assert seen["cpp"][-1].count("attention") == 2


def _communication(_: dist.ProcessGroup, configs: list[Config]) -> list[list[int]]:
    """How often two backwards of this rank wait for others, and what stays open after them."""
    seen = []
    for config in configs:
        device = Device()
        times = TimeSplit(device.event, device.synchronise, lambda device=device: device.host)
        corpus = open_corpus(config.data)
        parallel = layout(1)
        engine = make_engine(config, corpus.tokenizer.get_vocab_size(), parallel)
        engine.watch(times)
        sample = pack(corpus.train, [DocumentSlice(0, 0, 20)])
        batch = make_batch(sample, parallel.cp_group, "zigzag")
        counts = []
        for _ in range(2):
            times.begin()
            engine.backward(batch, torch.ones(()), last=True)
            categories = [x.category == "communication" for x in times._boundaries]
            counts.append(sum(b and not a for a, b in pairwise(categories)))
        seen.append([*counts, len(times._open)])
    return seen


@pytest.mark.soak
def test_engines_report_when_they_wait(config):
    """ddp waits once, after the backward. fsdp2 also waits for the weights of the embedding, two
    blocks, the head and the root, in forward and backward, and in the recomputation of a block.
    """
    config.model.n_layers, config.model.dim, config.memory.recompute = 2, 16, "attention-saving"
    open_corpus(config.data)
    fsdp2 = dataclasses.replace(config, engine=EngineConfig("fsdp2", shard="all"))
    by_rank = sacrifice(2, 60, _communication, [config, fsdp2], limit=2 * LIMIT_S)
    for ddp, sharded in by_rank:
        assert ddp == [1, 1, 0]
        assert sharded == [12, 12, 0]


def test_a_cpu_has_no_stream():
    assert time_split_on(torch.device("cpu")) is None
