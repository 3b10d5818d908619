"""AdamW over three groups of parameters."""

from __future__ import annotations

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


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of every group to ``lr`` times its ``lr_scale``."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]
