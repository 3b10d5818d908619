"""Hugging Face models on RingFA3: `register()`, then `attn_implementation="ringfa3"`.

`context_parallel` and `ContextParallel` put them under a trainer, `shard_batch` under a loop of
one's own; `verify` compares a step over a ring with that of one process.

In: what transformers passes to attention and mask functions, and a trainer's batches. Out:
outputs, losses, or a ValueError. Imports `custom_op`, `tensor_cache`, `attention_op`,
`functional`, `kernels`, `planning`, `ring`, `validation`; transformers and accelerate, which
`import ringfa3` does not import.
"""

from __future__ import annotations

import importlib
from typing import Any

from ringfa3.hf.registration import register

# Their modules import transformers or accelerate, so they are imported when they are used.
_MODULES = {
    "ContextParallel": "trainer",
    "context_parallel": "trainer",
    "shard_batch": "batch",
    "verify": "verification",
}

__all__ = ["ContextParallel", "context_parallel", "register", "shard_batch", "verify"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    except ModuleNotFoundError as problem:
        if problem.name not in ("accelerate", "transformers"):
            raise
        raise ImportError(f"{problem}: pip install 'ringfa3[hf]' brings it") from problem
