"""If this fails, `mode=verify` accepts a broken ring. ``mode=verify``: it accepts a correct ring
and names what is wrong with a broken one."""

from __future__ import annotations

import dataclasses
import io
import math
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from rich.console import Console

from ringfa3 import RingFA3Attention
from tests.support.ranks import sacrifice
from train.config import Config, EngineConfig
from train.data import batches
from train.data.shards import open_corpus
from train.engine.ddp import DDPEngine
from train.engine.parallel import ParallelLayout
from train.model import window
from train.tasks.verify import compare

WINDOWS = [40, 90]


def _checked(make_batch: Any) -> Any:
    """No bug: batches whose tokens are placed by the work of the widest layer."""

    def make(*arguments: Any, **options: Any) -> batches.Batch:
        batch = make_batch(*arguments, **options)
        assert batch.plan.window_size == (max(WINDOWS) - 1, -1)
        assert batch.plan.kv_budget == options["kv_budget"]
        return batch

    return make


def _off_by_one(plan_context: Any) -> Any:
    """A ring whose rows see one key more in the past than a window allows."""

    def plan(cu_seqlens: Any, *, group: Any, window_size: Any, **options: Any) -> Any:
        left = 31 if group is not None and group.size() > 1 else 30
        return plan_context(cu_seqlens, group=group, window_size=(left, -1), **options)

    return plan


def _without_windows(narrowed: Any) -> Any:
    """A ring whose layers all have the window of the plan, that of the widest."""
    return lambda plan, window: plan if plan.world > 1 else narrowed(plan, window)


def _local_positions(make_batch: Any) -> Any:
    def make(sample: Any, cp_group: Any, *rest: Any, **options: Any) -> batches.Batch:
        batch = make_batch(sample, cp_group, *rest, **options)
        return dataclasses.replace(batch, positions=torch.arange(len(batch.positions)))

    return make


def _doubled(backward: Any) -> Any:
    def double(self: Any, batch: Any, scale: Any, last: bool) -> Any:
        return backward(self, batch, scale * self.parallel.cp, last)

    return double


class _Wrong(torch.autograd.Function):
    """The identity, with a wrong gradient: that of the first ``rows`` rows is ``value``."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, rows: int, value: float) -> torch.Tensor:
        context.rows, context.value = rows, value
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        gradient = gradient.clone()
        gradient[: context.rows] = context.value
        return gradient, None, None


def _with_dk(attend: Any, value: float) -> Any:
    """A ring whose backward gives a dK of one value."""

    def forward(self: Any, q: Any, k: Any, v: Any, plan: Any) -> Any:
        wrong = _Wrong.apply(k, len(k) if plan.world > 1 else 0, value)
        return attend(self, q, wrong, v, plan=plan)

    return forward


def _without_a_hop_of_dv(attend: Any) -> Any:
    """A ring in which a rank loses dV of a part of its rows."""

    def forward(self: Any, q: Any, k: Any, v: Any, plan: Any) -> Any:
        lost = len(v) // 8 if plan.world > 1 and dist.get_rank() == 1 else 0
        return attend(self, q, k, _Wrong.apply(v, lost, 0.0), plan=plan)

    return forward


ATTEND = "ringfa3.RingFA3Attention.forward"
BUGS = {  # what to replace, by what
    "none": ("train.tasks.verify.make_batch", _checked(batches.make_batch)),
    "mask": ("train.data.batches.plan_context", _off_by_one(batches.plan_context)),
    "windows": ("train.model.transformer.narrowed", _without_windows(window.narrowed)),
    "positions": ("train.tasks.verify.make_batch", _local_positions(batches.make_batch)),
    "gradients": ("train.engine.ddp.DDPEngine.backward", _doubled(DDPEngine.backward)),
    "dK": (ATTEND, _with_dk(RingFA3Attention.forward, 0.0)),
    "NaN": (ATTEND, _with_dk(RingFA3Attention.forward, math.nan)),
    "dV": (ATTEND, _without_a_hop_of_dv(RingFA3Attention.forward)),
}
WRONG = {
    "dK": "gradient of attention.wk",
    "NaN": "gradient of attention.wk",
    "dV": "gradient of attention.wv",
}


def _compare_all(
    _: dist.ProcessGroup, config: Config, bugs: list[str]
) -> dict[str, tuple[bool, str]]:
    """By bug: whether the steps agree, and what this rank prints."""
    rank, world = dist.get_rank(), dist.get_world_size()
    parallel = ParallelLayout(rank, world, world, torch.device("cpu"), dist.group.WORLD)
    corpus, results = open_corpus(config.data), {}
    for bug in bugs:
        target, replacement = BUGS[bug]
        printed = io.StringIO()
        with mock.patch(target, replacement):
            config = config.comparable()
            same, _ = compare(config, corpus, parallel, Console(file=printed, width=200))
        results[bug] = same, printed.getvalue()
    return results


def test_bugs_of_a_ring_are_found(config: Config) -> None:
    """A mask that is off by one key of 30, a window of 90 keys for one of 40, local positions,
    gradients cp times too large, no dK, a dK of NaN, an eighth of a rank's dV lost.

    In bfloat16, whose rounding hides the most; the test of every engine is in float32.
    """
    config.model.dim, config.model.ffn_dim, config.train.gradient_accumulation_steps = 32, 64, 2
    config.model.n_layers, config.model.windows = 2, WINDOWS
    config.data.seq_len, config.train.precision = 300, "bfloat16"
    config.memory.recompute, config.memory.offload = "attention-saving", "all"
    open_corpus(config.data)  # tokenised once, not by every rank
    by_rank = sacrifice(2, 60, _compare_all, config, list(BUGS), limit=100)
    for results in by_rank:
        assert [bug for bug, (same, _) in results.items() if same] == ["none"]
    text = {bug: printed for bug, (_, printed) in by_rank[0].items()}
    assert "parallel.cp=2 matches parallel.cp=1 up to rounding" in text["none"]
    assert "does NOT match parallel.cp=1: gradient norm, gradient" in text["gradients"]
    for bug, wrong in WRONG.items():
        assert wrong in text[bug].rpartition("NOT")[2]
    for bug in ("mask", "windows", "positions"):
        assert "loss of a token" in text[bug].rpartition("NOT")[2]


ENGINES = [
    EngineConfig("fsdp2", shard="all"),
    *(
        pytest.param(
            EngineConfig("deepspeed", stage=stage, offload=offload),
            marks=pytest.mark.deepspeed,
            id=f"zero-{stage}-{offload}",
        )
        for stage, offload in ((1, "none"), (2, "optimizer"), (3, "none"))
    ),
]


@pytest.mark.parametrize("engine", ENGINES)
def test_gradients_are_compared_under_every_engine(config: Config, engine: EngineConfig) -> None:
    """Each of them holds other parts of the gradients."""
    config.model.dim, config.model.ffn_dim, config.model.n_layers = 32, 64, 2
    config.data.seq_len, config.train.precision, config.train.gradient_accumulation_steps = (
        300,
        "float32",
        2,
    )
    config.engine, config.model.windows = engine, WINDOWS
    config.parallel.cp, config.data.tokens_per_rank = 2, 300  # two samples in a micro-batch
    config.parallel.kv_budget = 900
    open_corpus(config.data)
    results, _ = sacrifice(2, 60, _compare_all, config, ["none", "dK"], limit=100)
    assert {bug: same for bug, (same, _) in results.items()} == {"none": True, "dK": False}
    assert WRONG["dK"] in results["dK"][1].rpartition("NOT")[2]


def test_a_job_verifies_itself(pretrain, overrides, tmp_path):
    """Exit code 0, a table, and no run folder."""
    folder = tmp_path / "run"
    done = pretrain(*overrides, f"run.dir={folder}", "mode=verify", "parallel.cp=all", processes=2)
    assert done.returncode == 0, done.stderr
    assert "parallel.cp=2 matches parallel.cp=1" in done.stdout
    assert "gradient norm" in done.stdout
    assert not folder.exists()


def test_a_group_has_one_sample_of_any_length(config):
    """The default batch of 125m would be 2,048 samples of 256 tokens."""
    config.train.batch_tokens, config.verify.seq_len = 2**19, 256
    assert config.comparable().accumulation_over(1) == 1
    config.train.gradient_accumulation_steps = 2
    assert config.comparable().accumulation_over(1) == 2
