"""Checks of what transformers passes to attention: what is not computed exactly is a ValueError."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ringfa3.hf.masks import REMEDY, Mask
from ringfa3.masks.mask import Mask as SpanMask
from ringfa3.planning.context_plan import ContextPlan, check_plan
from ringfa3.ring.prepare_call import default_group
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


# Layers that mix tokens without attention, which has the only masks.
WITHOUT_MASKS = ("linear_attention", "conv", "mamba", "hybrid", "hybrid_sliding")

# What a model attends to besides its own tokens.
OTHER_KEYS = ("encoder_hidden_states", "encoder_outputs", "cross_attention_states")


def uncompiled(function: Function) -> Function:
    """Runs between a compiler's graphs: checks read values, and ranks exchange errors."""
    reason = (
        "ringfa3_plan and ringfa3_mask break the graph: call torch.compile without fullgraph=True"
    )
    outside: Function = torch.compiler.disable(function, reason=reason)  # type: ignore[no-untyped-call]
    return outside


def takes(module: torch.nn.Module, name: str) -> bool:
    """Whether a module's forward has an argument of this name, or any number of them."""
    arguments = inspect.signature(module.forward).parameters.values()
    return any(x.name == name or x.kind is x.VAR_POSITIONAL for x in arguments)


def group_of(plan: object) -> dist.ProcessGroup | None:
    """The group whose ranks share an error of a call with this `ringfa3_plan`."""
    if plan is None or getattr(plan, "world", 2) == 1:
        return None
    group: dist.ProcessGroup | None = getattr(plan, "group", None)
    return group or default_group()


def require_plan(plan: object) -> None:
    """Raises TypeError: `ringfa3_plan` is no plan."""
    try:
        check_plan(plan)
    except TypeError:
        raise TypeError(
            f"ringfa3_plan={_brief(plan)} is no plan: pass ringfa3.plan_context(cu_seqlens)"
        ) from None


def check_tokens(model: torch.nn.Module, named: dict[str, Any]) -> None:
    """Raises ValueError: a model with `ringfa3_plan` or `ringfa3_mask` has more tokens than those.

    Its towers get these keywords, too, and would take them for plans and masks of their tokens,
    or of their keys, wherever the numbers of tokens are equal.

    named: the inputs of its call by name.
    """
    keyword = "ringfa3_plan" if named.get("ringfa3_plan") is not None else "ringfa3_mask"
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        remedy = "leave it out" if keyword == "ringfa3_mask" else "pass target.cross(source)"
        raise ValueError(
            f"{keyword} in {type(model).__name__}, an encoder-decoder, whose encoder, decoder and "
            f"cross-attention have different tokens: {remedy}"
        )
    check_takes_text(model, keyword)
    for name in OTHER_KEYS:
        if named.get(name) is not None:
            raise ValueError(
                f"{name} with {keyword} in {type(model).__name__}: cross-attention has other keys "
                f"than the tokens of {keyword}: leave one of them out"
            )


def check_takes_text(model: torch.nn.Module, keyword: str) -> None:
    """Raises ValueError: a model has no input_ids, whose tokens a plan and a mask have."""
    if not takes(model, "input_ids"):
        raise ValueError(
            f"{keyword} in {type(model).__name__}, which takes no input_ids: a plan and a mask are "
            "of the tokens of a text model: make inputs_embeds of text and images first, and give "
            f"{keyword} to the text model alone"
        )


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
    config = getattr(module, "config", None)
    types = getattr(config, "layer_types", None)
    if getattr(config, "is_encoder_decoder", False) and keywords.get("ringfa3_mask") is not None:
        raise ValueError(
            f"ringfa3_mask in {type(module).__name__} of an encoder-decoder, which attends to "
            "tokens of the encoder and of the decoder: leave it out"
        )
    if without := sorted({*(types or ())} & {*WITHOUT_MASKS}):
        raise ValueError(
            f"ringfa3_mask in a model with layers of {without}, which have no mask: leave it out"
        )
    number = getattr(module, "layer_idx", None)
    if isinstance(given, Mapping):
        layer_type = None if types is None or number is None else types[number]
        if layer_type not in given:
            raise ValueError(
                f"ringfa3_mask has masks for {[*given]}, and a layer is {layer_type!r}: give one "
                "for each of config.layer_types"
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
    if isinstance(padding, torch.Tensor) and not all_seen(padding):
        raise ValueError(
            "attention_mask hides tokens, and ringfa3_mask is given: give attention_mask=None, and "
            "padding as Mask.documents(..., seqused_q=...)"
        )
    if not shares:
        check_counts(given, query.shape[0] * query.shape[2], key.shape[0] * key.shape[2])
        positions = keywords.get("position_ids")
        if positions is not None or given not in given_positions:
            check_positions(given, positions, query.shape[0])
    return given


# Masks and plans whose positions the last call of a model had. `check_model` has shown that its
# tokens depend on these alone, so layers that do not get them, as Llama 4's, have them too.
given_positions: weakref.WeakSet[SpanMask | ContextPlan] = weakref.WeakSet()


_checked: TensorCache[bool] = TensorCache()  # of padding
_found: TensorCache[str] = TensorCache()  # by `_difference`


def all_seen(padding: torch.Tensor) -> bool:
    """Whether a mask has two dimensions and hides nothing; read once for each version."""
    return _checked.get(padding, None, lambda: padding.dim() == 2 and bool((padding != 0).all()))


def check_counts(mask: SpanMask, queries: int, keys: int) -> None:
    """Raises ValueError: a mask is of other numbers of tokens, those of all rows."""
    if (queries, keys) != (mask.q_tokens, mask.k_tokens):
        raise ValueError(
            f"ringfa3_mask has {mask.q_tokens} queries and {mask.k_tokens} keys, this layer "
            f"{queries} and {keys}, of all rows: pass use_cache=False, and Mask.pack of the rows' "
            "masks"
        )


def check_positions(mask: SpanMask, positions: torch.Tensor | None, batch: int) -> None:
    """Raises ValueError: position_ids of all rows are not the mask's.

    They may differ by one number for all tokens. None stands for 0, 1, 2, ... in each row; so do
    (3, b, n) positions of images, of which no row counts tokens.
    """
    remedy = "pass position_ids=torch.tensor(mask.positions).view(b, s)"
    rows = text_positions(positions)
    if positions is not None and rows is not None:
        key = mask.digest, batch
        if problem := _found.get(positions, key, lambda: _difference(rows, mask, batch)):
            raise ValueError(f"position_ids are not those of ringfa3_mask: {problem}: {remedy}")
    elif problem := uncounted(mask, batch):
        given = None if positions is None else f"{tuple(positions.shape)} without a row of text"
        raise ValueError(
            f"position_ids={given}, with a ringfa3_mask whose positions are not 0, 1, 2, ... in "
            f"each row: {problem}: {remedy}"
        )


@functools.lru_cache(16)
def uncounted(mask: SpanMask, batch: int) -> str:
    """The first token whose position is not 0, 1, 2, ... in its row, in words; "" for none."""
    tokens = torch.arange(mask.q_tokens // batch, dtype=torch.int64, device="cpu")
    return _difference(tokens[None], mask, batch)


def text_positions(positions: torch.Tensor | None) -> torch.Tensor | None:
    """(b or 1, n) positions that count tokens; None if there are none.

    With a row for each of several axes, (4, b, n), the first one counts tokens. (3, b, n) are the
    time, height and width of image patches.
    """
    if positions is None or positions.dim() != 3:
        return positions
    return positions[0] if len(positions) == 4 else None


def _difference(rows: torch.Tensor, mask: SpanMask, batch: int) -> str:
    """`first_difference` of (b or 1, n) positions and the mask's, up to a common number."""
    tokens = mask.q_tokens // batch
    if rows.shape not in [(1, tokens), (batch, tokens)]:
        return f"their shape is {tuple(rows.shape)}, of {batch} rows of {tokens} tokens"
    found = rows.expand(batch, -1).flatten().cpu()
    wanted = torch.tensor(mask.positions[: len(found)], dtype=torch.int64, device="cpu")
    return first_difference(found, wanted + (found[:1] - wanted[:1]))


def first_difference(found: torch.Tensor, wanted: torch.Tensor) -> str:
    """The first index where (n,) positions differ, and both values; "" if they are equal."""
    (unequal,) = (found != wanted).nonzero(as_tuple=True)
    if not len(unequal):
        return ""
    at = int(unequal[0])
    return f"token {at} has {int(found[at])}, not {int(wanted[at])}"


def _brief(value: object) -> str:
    """A value in an error: of a tensor its shape and dtype."""
    if isinstance(value, torch.Tensor):
        return f"<{tuple(value.shape)} {value.dtype}>"
    return (
        repr(value) if isinstance(value, (bool, int, float, str)) else f"<{type(value).__name__}>"
    )
