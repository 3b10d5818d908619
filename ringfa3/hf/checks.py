"""Checks of what transformers passes to attention: what is not computed exactly is a ValueError."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from ringfa3.hf.masks import REMEDY, Mask

Function = TypeVar("Function", bound=Callable[..., Any])

# Keywords of attention in transformers that change its result, and what they stand for.
UNSUPPORTED = {
    "softcap": "softcap of the scores",
    "position_bias": "bias of the scores",
    "head_mask": "head mask",
    "cache": "paged cache",
    "indices": "sparse attention by indices",
    "block_indices": "sparse attention by blocks",
    "sinks": "sinks that change with the query",
}


def uncompiled(function: Function) -> Function:
    """Runs between a compiler's graphs: checks read values, and ranks exchange errors."""
    reason = "ringfa3_plan: a ring breaks the graph: call torch.compile without fullgraph=True"
    outside: Function = torch.compiler.disable(function, reason=reason)  # type: ignore[no-untyped-call]
    return outside


def check_arguments(dropout: float, keywords: dict[str, Any]) -> None:
    """Raises ValueError: an argument changes the result in a way that is not computed."""
    if dropout:
        raise ValueError(
            f"attention_dropout={dropout}: RingFA3 has no dropout: set config.attention_dropout to "
            "0, or call model.eval()"
        )
    if keywords.get("output_attentions"):
        raise ValueError(
            "output_attentions=True: RingFA3 does not store attention weights: use "
            "attn_implementation='eager'"
        )
    for name, meaning in UNSUPPORTED.items():
        value = keywords.get(name)
        if value is not None:
            raise ValueError(f"{name}={_brief(value)}: RingFA3 has no {meaning}; {REMEDY}")


def check_mask(
    module: torch.nn.Module,
    mask: object,
    sliding_window: int | None,
    is_causal: bool | None,
    query: torch.Tensor,
    key: torch.Tensor,
) -> Mask:
    """The mask of a layer; for None that of `is_causal` and `sliding_window`.

    Raises ValueError: the problem of the mask, another kind of mask, or one of
    other keys or of labels for other tokens than the layer has.
    """
    batch, queries, keys = query.shape[0], query.shape[2], key.shape[2]
    if mask is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        left = -1 if sliding_window is None else sliding_window - 1
        return Mask(left, 0 if causal else left, keys, None, None, False)
    if not isinstance(mask, Mask):
        raise ValueError(
            f"attention_mask={_brief(mask)}: RingFA3 takes no prepared 4D mask: give the 2D "
            f"(batch, keys) padding mask, or {REMEDY}"
        )
    if mask.problem is not None:
        raise mask.problem
    # A layer that computes is_causal itself gives False whenever it has a mask, which prevails.
    computes_causal = "is_causal" in inspect.unwrap(type(module).forward).__code__.co_varnames
    if is_causal is not None and is_causal != (mask.right == 0) and not computes_causal:
        raise ValueError(
            f"is_causal={is_causal}, but the model's mask has window ({mask.left}, {mask.right}): "
            "set config.is_causal, from which transformers makes the mask"
        )
    if mask.keys != keys:
        raise ValueError(
            f"past_key_values: the mask is for {mask.keys} keys, this layer has {keys}: use a "
            "DynamicCache"
        )
    if mask.right == 0 and queries > keys:
        raise ValueError(f"past_key_values: {queries} queries for {keys} keys under a causal mask")
    labels = None if mask.documents is None else tuple(mask.documents.shape)
    if labels is not None and (queries != keys or labels not in ((1, keys), (batch, keys))):
        raise ValueError(
            f"packed_sequence_mask_function has labels of shape {labels} for {batch} rows of "
            f"{queries} queries and {keys} keys: give (batch, keys) labels of whole rows, with "
            "use_cache=False"
        )
    return mask


def _brief(value: object) -> str:
    """A value in an error: of a tensor its shape and dtype."""
    if isinstance(value, torch.Tensor):
        return f"<{tuple(value.shape)} {value.dtype}>"
    return (
        repr(value) if isinstance(value, (bool, int, float, str)) else f"<{type(value).__name__}>"
    )
