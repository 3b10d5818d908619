"""Encoder-decoder models under a ring: which plan, and which positions, each part of a model has.

`ringfa3_plan` is `target.cross(source)`. The encoder runs on the plan of the source, the decoder on
that of the target, and cross-attention on their cross plan. transformers passes one keyword on to
all of them. So a call of a part replaces it, and a layer of the decoder takes the plan of its own
tokens if its mask is causal. Positions are those of the plans: most encoders take no position_ids.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ringfa3.hf.checks import all_seen, check_takes_text, given_positions, takes
from ringfa3.hf.masks import Mask
from ringfa3.hf.probe import check_model, passed_as_part
from ringfa3.masks.mask import Mask as SpanMask
from ringfa3.planning.context_plan import ContextPlan

DECODER_IDS = "decoder_input_ids"
# What would use this rank's tokens alone, or other tokens than those of the plan.
REFUSED = {
    "labels": "the model would average its loss over this rank's labels: compute it of the logits, "
    "as a sum over plan.shard(labels), over the number of labels of all ranks",
    "ringfa3_mask": "leave it out, and give masks to plan_context and to target.cross",
    "encoder_outputs": "a ring runs the encoder too: give input_ids",
    "past_key_values": "a ring has no KV cache, and so no generation: pass use_cache=False and "
    "whole documents",
    "output_router_logits": "the loss of experts has no plan of both parts: pass False",
}


def is_cross(plan: object) -> bool:
    """Whether `ringfa3_plan` is one for an encoder-decoder: a plan that `plan.cross` made."""
    return getattr(plan, "key_plan", None) is not None


def crosses(module: torch.nn.Module, mask: object) -> bool:
    """Whether a layer of a decoder attends to the encoder's tokens, which no causal mask does."""
    return mask.right != 0 if isinstance(mask, Mask) else not getattr(module, "is_causal", True)


def plan_of_layer(module: torch.nn.Module, plan: Any, mask: object) -> Any:
    """`ringfa3_plan` of a layer; of a decoder that of its own tokens or the cross plan."""
    return plan.query_plan if is_cross(plan) and not crosses(module, mask) else plan


@contextmanager
def on_own_tokens(
    model: torch.nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """The keywords of a call; of a part of an encoder-decoder with its own plan and positions."""
    plan = keywords.get("ringfa3_plan")
    if not is_cross(plan) or takes(model, DECODER_IDS):
        yield keywords
        return
    decodes = takes(model, "encoder_hidden_states")
    own = plan.query_plan if decodes else plan.key_plan  # type: ignore[union-attr]
    tensors = (x for x in (*inputs, *keywords.values()) if isinstance(x, torch.Tensor))
    positions = own.positions.to(next(tensors).device)
    given = keywords | {"ringfa3_plan": plan if decodes else own}
    if takes(model, "position_ids") and keywords.get("position_ids") is None:
        given["position_ids"] = positions[None]
    embedding = getattr(model, "embed_positions", None)
    if embedding is None or not takes(embedding, "position_ids"):
        yield given
        return

    def replace(_: object, args: Any, of_call: dict[str, Any]) -> Any:
        return args, of_call | {"position_ids": positions}

    hook = embedding.register_forward_pre_hook(replace, with_kwargs=True)
    try:
        yield given
    finally:
        hook.remove()


def check_parts(model: torch.nn.Module, plan: ContextPlan, named: dict[str, Any]) -> None:
    """Raises ValueError: a call of an encoder-decoder, or of a part of one, with a cross plan has
    inputs that do not fit it, or mixes tokens outside of attention.

    named: the inputs of its call by name.
    """
    for name, reason in REFUSED.items():
        if not (named.get(name) is None or named[name] is False):
            raise ValueError(f"{name} with ringfa3_plan in {type(model).__name__}: {reason}")
    check_takes_text(model, "ringfa3_plan")
    own = "input_ids", "inputs_embeds"
    if takes(model, DECODER_IDS):
        _check_part("encoder", plan.key_plan, named, *own)
        _check_part("decoder", plan.query_plan, named, *(f"decoder_{name}" for name in own))
        check_model(model, pairs=True)
    elif not passed_as_part(model):
        raise ValueError(
            f"ringfa3_plan is of an encoder-decoder, of which {type(model).__name__} is at most a "
            "part: call the whole model, or give it the plan of its own tokens"
        )
    elif takes(model, "encoder_hidden_states"):
        _check_part("encoder", plan.key_plan, named, "encoder_hidden_states")
        _check_part("decoder", plan.query_plan, named, *own)
        _check_lengths(model, plan.query_plan)
    else:
        _check_part("encoder", plan.key_plan, named, *own)
        _check_lengths(model, plan.key_plan)
    given_positions.update(x for x in (plan, plan.key_plan, plan.query_plan) if x is not None)


def _check_part(part: str, plan: ContextPlan | None, named: dict[str, Any], *names: str) -> None:
    """Raises ValueError: the inputs of these names have not this rank's tokens of a part's plan."""
    assert plan is not None
    if min(plan.tokens_per_rank) == 0:
        raise ValueError(
            f"ringfa3_plan has {plan.total_tokens} tokens of the {part} for {plan.world} ranks: "
            "transformers makes no mask of 0 tokens: add a pair of documents without loss"
        )
    found = [(name, named[name]) for name in names if named.get(name) is not None]
    if not found:
        raise ValueError(
            f"{names[0]} is missing with ringfa3_plan: a model would make it of this rank's other "
            f"tokens: pass plan.shard(tokens)[None], of the {part}'s plan"
        )
    name, x = found[0]
    if tuple(x.shape[:2]) != (1, plan.local_tokens):
        raise ValueError(
            f"{name} has shape {tuple(x.shape)}, and ringfa3_plan gives this rank "
            f"{plan.local_tokens} of the {part}'s {plan.total_tokens} tokens: pass "
            f"plan.shard(tokens)[None], of the {part}'s plan"
        )


def _check_lengths(model: torch.nn.Module, plan: ContextPlan | None) -> None:
    """Raises ValueError: a document is longer than a table of positions.

    One rank alone may have the token without a row, and the others would wait for it.
    """
    assert plan is not None
    table = getattr(model, "embed_positions", None)
    if not isinstance(table, torch.nn.Embedding):
        return
    longest = plan.lengths.max() if plan.mask is None else 1 + plan.mask.positions.max()
    rows = table.num_embeddings - getattr(table, "offset", 0)
    if longest > rows:
        raise ValueError(
            f"ringfa3_plan has a document of {longest} tokens, and {type(model).__name__} has "
            f"{rows} positions: cut the document, or set config.max_position_embeddings"
        )


def check_cross(
    module: torch.nn.Module, plan: ContextPlan, given: object, mask: Mask
) -> SpanMask | None:
    """The spans of cross-attention, those of its plan.

    Raises ValueError: the layer has others, or a mask of its own that hides keys.

    given: `ringfa3_mask`, else the plan's. mask: the model's.
    """
    if given is not plan.mask:
        raise ValueError(
            f"ringfa3_mask in {type(module).__name__} of an encoder-decoder, which attends to "
            "tokens of the encoder and of the decoder: leave it out, and give target.cross its mask"
        )
    hidden = mask.padding is not None and not all_seen(mask.padding)
    if (mask.left, mask.right) != (-1, -1) or hidden:
        raise ValueError(
            f"attention_mask hides keys of {type(module).__name__}: a ring takes no padding: pack "
            "the documents, and give plan_context their cumulative lengths"
        )
    return plan.mask
