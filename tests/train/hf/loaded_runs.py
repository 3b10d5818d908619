"""Runs that have loaded their weights and taken no step. Their ranks need no transformers."""

from __future__ import annotations

import sys
from unittest import mock

import torch
import torch.distributed as dist

from tests.train.engine.test_engines import layout
from train.config import Config
from train.data.shards import open_corpus
from train.engine.parallel import ParallelLayout
from train.hf import load
from train.run.failure import FailureReport
from train.run.run_folder import RunFolder
from train.tasks.trainer import Trainer


def load_run(config: Config, parallel: ParallelLayout) -> int:
    """Save step 0 of a run; returns how many numbers this rank has read of the folder."""
    read = 0
    whole_fill = load._fill

    def fill(stored: object, shard: object) -> None:
        nonlocal read

        class Counted:
            def __getitem__(self, key: tuple[slice, ...]) -> torch.Tensor:
                nonlocal read
                values = stored[key]
                read += values.numel()
                return values

        whole_fill(Counted(), shard)

    report = FailureReport(parallel.rank, sys.stderr)
    with mock.patch.object(load, "_fill", fill):
        trainer = Trainer(config, open_corpus(config.data), parallel, RunFolder(config), report)
    trainer._require_saved()
    trainer.close()
    return read


def load_runs(_: dist.ProcessGroup, configs: list[Config]) -> list[int]:
    """`load_run` for one run after the other, on this rank."""
    return [load_run(config, layout(config.parallel.cp)) for config in configs]
