"""AdamW over three groups of parameters, and the learning rate as a function of the step."""

from __future__ import annotations

import math

import torch

from train.config import OptimConfig
from train.model.transformer import Transformer

VECTORS = ("norm.weight", ".bias")  # ends of the names of gains and biases


def make_optimizer(model: Transformer, optim: OptimConfig) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only and ``embedding_lr_scale`` on the embedding.

    Names distinguish matrices from vectors, because an engine may shard a parameter to another
    shape. Each group has an ``lr_scale`` that multiplies the scheduled learning rate.
    """
    embedding = model.embedding.weight
    rest = {name: p for name, p in model.named_parameters() if p is not embedding}
    vectors = [p for name, p in rest.items() if name.endswith(VECTORS)]
    matrices = [p for name, p in rest.items() if not name.endswith(VECTORS)]
    groups = [
        {"params": [embedding], "weight_decay": 0.0, "lr_scale": optim.embedding_lr_scale},
        {"params": matrices, "weight_decay": optim.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    groups = [{"lr_scale": 1.0, **group} for group in groups if group["params"]]
    beta1, beta2 = optim.betas
    return torch.optim.AdamW(groups, lr=optim.lr, betas=(beta1, beta2), eps=optim.eps, fused=True)


def learning_rate(optim: OptimConfig, step: int, steps: int) -> float:
    """Learning rate of optimiser step ``step`` (from 0) of ``steps``.

    It rises linearly over ``warmup_steps`` and reaches ``lr`` in the last of them. Then it decays
    towards ``lr * final_lr_ratio``, its value at step ``steps``. With ``wsd`` it decays only in the
    last ``decay_steps``.
    """
    if step < optim.warmup_steps:
        return optim.lr * (step + 1) / optim.warmup_steps
    first = optim.warmup_steps
    if optim.schedule == "wsd":
        first = max(first, steps - (optim.decay_steps or max(1, steps // 10)))
    done = max(0, step - first) / max(1, steps - first)
    left = (1 + math.cos(math.pi * done)) / 2 if optim.schedule == "cosine" else 1 - done
    return optim.lr * (optim.final_lr_ratio + (1 - optim.final_lr_ratio) * left)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of every group to ``lr`` times its ``lr_scale``."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]
