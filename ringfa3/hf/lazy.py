"""Names of the package whose modules import transformers or accelerate when they are used."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

PACKAGE = "ringfa3.hf"
MODULES = {
    "ContextParallel": "trainer",
    "context_parallel": "trainer",
    "shard_batch": "batch",
    "verify": "verification",
}


def lazy_names() -> Callable[[str], Any]:
    """The `__getattr__` of the package.

    Its ImportError says what brings transformers and accelerate.
    """

    def find(name: str) -> Any:
        if name not in MODULES:
            raise AttributeError(f"module {PACKAGE!r} has no attribute {name!r}")
        try:
            return getattr(importlib.import_module(f"{PACKAGE}.{MODULES[name]}"), name)
        except ModuleNotFoundError as problem:
            if problem.name not in ("accelerate", "transformers"):
                raise
            raise ImportError(f"{problem}: pip install 'ringfa3[hf]' brings it") from problem

    return find
