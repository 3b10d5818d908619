"""``train.compile=block``: a block as graphs of ``torch.compile``, with attention as one node.

A block of a step has one graph forward and one backward, which all blocks share. They are compiled
in the first step, once more where the plan is another, and once more where the number of tokens is
another: then for any number but 0 and 1, which have graphs of their own. The last norm and the loss
between its matrix products are compiled likewise.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ringfa3 import keep_attention

BACKEND = "inductor"


def compiled_block(recompute: str) -> Callable[..., Tensor]:
    """Runs ``block.body(x, rotation, plan)`` for (block, x, rotation, plan), compiled.

    ``recompute`` is the key of ``memory``. Raises ``torch._dynamo.exc.Unsupported`` where a block
    is not one graph.
    """
    return _compiled_block(recompute, BACKEND)


def compiled_function(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A function of tensors and numbers as one graph."""
    return _compiled(function, BACKEND)


@lru_cache(None)
def _compiled(function: Callable[..., Tensor], backend: str) -> Callable[..., Tensor]:
    return torch.compile(function, backend=backend, fullgraph=True)


@lru_cache(None)
def _compiled_block(recompute: str, backend: str) -> Callable[..., Tensor]:
    # DDP's optimiser of graphs cannot cut a checkpoint. A block is shorter than a bucket anyway.
    torch._dynamo.config.optimize_ddp = False

    def run(block: Any, x_TD: Tensor, rotation: Any, plan: Any) -> Tensor:
        if recompute == "none":
            return block.body(x_TD, rotation, plan)
        kept = {"context_fn": keep_attention} if recompute == "attention-saving" else {}
        return checkpoint(block.body, x_TD, rotation, plan, use_reentrant=False, **kept)

    return torch.compile(run, backend=backend, fullgraph=True)
