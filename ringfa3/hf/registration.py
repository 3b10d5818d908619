"""`register`: makes RingFA3 an attention implementation of transformers; and the names of the
package whose modules import transformers or accelerate, when they are used."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])

NAME = "ringfa3"  # no name with "flash" in it: transformers replaces those
PACKAGE = "ringfa3.hf"
MODULES = {
    "ContextParallel": "trainer",
    "context_parallel": "trainer",
    "shard_batch": "batch",
    "verify": "verification",
}


def register() -> None:
    """Registers `attn_implementation="ringfa3"` in transformers; a second call changes nothing.

    A call of a `PreTrainedModel` with `ringfa3_plan` is checked as a whole from then on: layers
    that do not attend would not notice the plan. So is each loss that the model computes.

    Raises:
        ImportError: transformers is missing; `pip install 'ringfa3[hf]'` brings it.
    """
    try:
        from transformers import (
            AttentionInterface,
            AttentionMaskInterface,
            PreTrainedModel,
            masking_utils,
        )
    except ImportError as problem:
        raise ImportError(f"{problem}: pip install 'ringfa3[hf]' brings transformers") from problem
    from ringfa3.hf.attention import attention_forward
    from ringfa3.hf.masks import mask_function
    from ringfa3.hf.ring_layer import checked_call, checked_losses, found_by_plan

    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, mask_function)
    model: Any = PreTrainedModel
    model.__call__ = _once(checked_call, model.__call__)
    masking: Any = masking_utils
    masking.find_packed_sequence_indices = _once(
        found_by_plan, masking.find_packed_sequence_indices
    )
    losses = model.loss_function
    model.loss_function = losses.getter(_once(checked_losses, losses.fget))


def _once(wrap: Callable[[Function], Function], function: Function) -> Function:
    """`function` wrapped, whoever else wrapped it before, unless a call of this did so."""
    if not hasattr(function, "_ringfa3"):
        function = wrap(function)
        function._ringfa3 = True  # type: ignore[attr-defined]
    return function


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
