"""If this fails, compiled training differs from uncompiled. ``train.compile=block`` under every
engine: the steps of uncompiled ddp, within 1e-5."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.support.ranks import sacrifice
from tests.train.engine.test_engines import (
    DDP,
    ENGINES,
    LIMIT_S,
    ZERO,
    check_same_steps,
    config,
    layout,
    needs_deepspeed,
    train,
    variant,
)
from tests.train.jobs import steps
from train.config import Config, MemoryConfig
from train.model import compiled

__all__ = ["config"]  # a fixture
pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]


def _run_all(_: dist.ProcessGroup, configs: list[Config]) -> list[list[Any]]:
    compiled.BACKEND = "aot_eager"
    for one in configs:
        train(one, layout(one.parallel.cp))
    return [steps(Path(one.run.dir)) for one in configs]


@pytest.mark.parametrize("recompute", ["none", "attention-saving"])
@pytest.mark.parametrize(
    "engines",
    [
        pytest.param(ENGINES, id="ddp, fsdp2"),
        pytest.param(ZERO, marks=needs_deepspeed, id="zero"),
    ],
)
def test_compiled_blocks_take_the_same_steps(config, engines, recompute):
    """Two ranks share each sample; two micro-batches a step; validations run uncompiled."""
    config.train.steps, config.train.eval_every, config.parallel.cp = 6, 3, 2
    memory = MemoryConfig(recompute, mlp_chunk=64, loss_chunk=50)
    blocks = dataclasses.replace(config.train, compile="block")
    configs = [variant(config, "eager", DDP, memory=memory)]
    configs += [variant(config, n, e, memory=memory, train=blocks) for n, e in engines.items()]
    eager, *others = sacrifice(2, 120, _run_all, configs, limit=3 * LIMIT_S * len(configs))[0]
    assert len(eager) == 6
    for other in others:
        check_same_steps(eager, other)
