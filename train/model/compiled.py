"""``train.compile=block``: a block as graphs of ``torch.compile``, with attention as one node.

All blocks share one forward graph and one backward graph. PyTorch compiles them

* in the first step,
* once more at the first plan that differs,
* and once more at the first number of tokens that differs: then for any number except 0 and 1,
  which have graphs of their own.

The last norm, and the loss between its matrix products, are compiled in the same way.
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
    """A function (block, x, rotation, plan) that runs ``block.body(x, rotation, plan)``, compiled.

    ``recompute`` is as in ``memory``. A call raises ``torch._dynamo.exc.Unsupported`` if the block
    is not one graph.
    """
    return _compiled_block(recompute, BACKEND)


def compiled_function(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A function of tensors and numbers, compiled as one graph."""
    return _compiled(function, BACKEND)


@lru_cache(None)
def _compiled(function: Callable[..., Tensor], backend: str) -> Callable[..., Tensor]:
    return torch.compile(function, backend=backend, fullgraph=True)


@lru_cache(None)
def _compiled_block(recompute: str, backend: str) -> Callable[..., Tensor]:
    # DDPOptimizer splits graphs at the borders of buckets, which is impossible inside an activation
    # checkpoint. A block is smaller than a bucket anyway.
    torch._dynamo.config.optimize_ddp = False

    def run(block: Any, x_TD: Tensor, rotation: Any, plan: Any) -> Tensor:
        if recompute == "none":
            return block.body(x_TD, rotation, plan)
        kept = {"context_fn": keep_attention} if recompute == "attention-saving" else {}
        return checkpoint(block.body, x_TD, rotation, plan, use_reentrant=False, **kept)

    return torch.compile(run, backend=backend, fullgraph=True)
