"""Checks of what transformers passes to attention: what is not computed exactly is a ValueError."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from ringfa3.hf.masks import REMEDY, Mask
from ringfa3.masks.mask import Mask as SpanMask
from ringfa3.tensor_cache import TensorCache

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


def check_spans(
    module: torch.nn.Module,
    given: object,
    mask: object,
    query: torch.Tensor,
    key: torch.Tensor,
    keywords: dict[str, Any],
    shares: bool,
) -> SpanMask:
    """The spans of a layer, from `ringfa3_mask`: one mask, or masks by layer type.

    Args:
        mask: the model's own, of which only padding counts.
        shares: whether the layer has the tokens of one rank alone, of a plan that checks them.

    Raises ValueError, TypeError: there is no mask for this layer, or it is none of its tokens.
    """
    types = getattr(getattr(module, "config", None), "layer_types", None)
    number = getattr(module, "layer_idx", None)
    if isinstance(given, Mapping):
        layer_type = None if types is None or number is None else types[number]
        if layer_type not in given:
            raise ValueError(
                f"ringfa3_mask has masks for {sorted(given)}, and a layer is {layer_type!r}: give "
                "one for each of config.layer_types"
            )
        given = given[layer_type]
    elif types is not None and len(set(types)) > 1:
        raise ValueError(
            f"ringfa3_mask={given!r} in a model with layers of {sorted(set(types))}: give a dict, "
            "a mask for each layer type"
        )
    if not isinstance(given, SpanMask):
        raise TypeError(f"ringfa3_mask must be a ringfa3.Mask, got {type(given).__name__}")
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        if keywords.get(name) is not None:
            raise ValueError(f"{name} with ringfa3_mask: the mask has the documents: leave it out")
    padding = mask.padding if isinstance(mask, Mask) else mask
    if isinstance(padding, torch.Tensor) and not _checked.get(padding, None, _all_seen(padding)):
        raise ValueError(
            "attention_mask hides tokens, and ringfa3_mask is given: give attention_mask=None, and "
            "padding as Mask.documents(..., seqused_q=...)"
        )
    if not shares:
        counts = query.shape[0] * query.shape[2], key.shape[0] * key.shape[2]
        if counts != (given.q_tokens, given.k_tokens):
            raise ValueError(
                f"ringfa3_mask has {given.q_tokens} queries and {given.k_tokens} keys, this layer "
                f"{counts[0]} and {counts[1]}, of all rows: pass use_cache=False, and Mask.pack of "
                "the rows' masks"
            )
        _check_positions(given, keywords.get("position_ids"), query.shape[0])
    return given


_checked: TensorCache[bool] = TensorCache()  # of padding and position_ids


def _all_seen(padding: torch.Tensor) -> Any:
    return lambda: padding.dim() == 2 and bool((padding != 0).all())


def _check_positions(mask: SpanMask, positions: torch.Tensor | None, batch: int) -> None:
    """Raises ValueError: position_ids are not the mask's, up to one number for all tokens."""
    if positions is None or positions.dim() != 2:  # none reach attention, or three of each token
        return
    found = positions.expand(batch, -1)

    def equal() -> bool:
        wanted = torch.tensor(mask.positions, dtype=torch.int64, device="cpu")
        distance = found.flatten().cpu() - wanted
        return bool((distance == distance[:1]).all())

    if not _checked.get(positions, (mask.digest, batch), equal):
        raise ValueError(
            f"position_ids begin with {found[0, :4].tolist()} and are not those of ringfa3_mask, "
            f"from {mask.positions[:4].tolist()}: pass torch.tensor(mask.positions).view(b, s)"
        )


def _brief(value: object) -> str:
    """A value in an error: of a tensor its shape and dtype."""
    if isinstance(value, torch.Tensor):
        return f"<{tuple(value.shape)} {value.dtype}>"
    return (
        repr(value) if isinstance(value, (bool, int, float, str)) else f"<{type(value).__name__}>"
    )
