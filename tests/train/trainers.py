"""Trainers in this process, and what they train."""

from __future__ import annotations

import sys

import torch

from train.config import Config
from train.data.shards import open_corpus
from train.engine.parallel import ParallelLayout
from train.run.failure import FailureReport
from train.run.run_folder import RunFolder
from train.tasks.trainer import Trainer


def shrink(config: Config) -> Config:
    """``config`` with one small block, and 12 steps that are saved at every fourth."""
    config.model.dim, config.model.ffn_dim, config.model.n_layers = 32, 64, 1
    config.train.steps, config.train.eval_every, config.optim.warmup_steps = 12, 0, 2
    config.checkpoint.every = 4
    return config


def make_trainer(config: Config, parallel: ParallelLayout | None = None) -> Trainer:
    """The trainer of one rank; default: of a single process."""
    parallel = parallel or ParallelLayout(rank=0, world=1, cp=1, device=torch.device("cpu"))
    words = FailureReport(parallel.rank, sys.stderr)
    return Trainer(config, open_corpus(config.data), parallel, RunFolder(config), words)


def tensors_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Weights and optimiser state, of which a single process holds all."""
    return {name: shard.boxes[0].values for name, shard in trainer.state.shards().items()}


def weights(trainer: Trainer) -> torch.Tensor:
    """All weights, flat."""
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
