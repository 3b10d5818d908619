"""A layer under the ring: its plan, its checks, its call."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F

from ringfa3.attention_op import out_shape
from ringfa3.hf.checks import (
    check_counts,
    check_positions,
    check_tokens,
    first_difference,
    given_positions,
    group_of,
    require_plan,
    text_positions,
    uncompiled,
    uncounted,
)
from ringfa3.hf.documents import begins_of, documents_of
from ringfa3.hf.masks import Mask
from ringfa3.hf.models.encoder_decoder import check_parts, is_cross, on_own_tokens
from ringfa3.hf.models.gated_delta_net import let_run
from ringfa3.hf.probe import FAILURES, Probe, check_model
from ringfa3.hf.router_loss import asks_for_router_logits, carry_plan, let_balance
from ringfa3.masks.mask import Mask as SpanMask
from ringfa3.planning.context_plan import ContextPlan, plan_context
from ringfa3.planning.sharding import effective_window
from ringfa3.ring.op import ring_attn_func
from ringfa3.ring.prepare_call import raise_on_all_ranks
from ringfa3.tensor_cache import TensorCache

# RoPE types of transformers whose frequencies do not depend on the positions of a call.
FIXED_ROPE = ("default", "linear", "llama3", "yarn", "proportional")


# position_ids of the call under way, which `check_call` has compared with those of its plan.
_positions_of_plan: ContextVar[torch.Tensor | None] = ContextVar("positions", default=None)


def found_by_plan(find: Callable[..., Any]) -> Callable[..., Any]:
    """`find_packed_sequence_indices`, which copies from a GPU, so that the host waits. A plan has
    the documents already."""

    @functools.wraps(find)
    def found(position_ids: torch.Tensor) -> Any:
        if torch.compiler.is_compiling():  # Dynamo traces no ContextVar
            return find(position_ids)
        known = _positions_of_plan.get()
        return None if known is not None and position_ids is known else find(position_ids)

    return found


def checked_call(call: Callable[..., Any]) -> Callable[..., Any]:
    """`PreTrainedModel.__call__`, which refuses what no single layer could notice under a plan or
    a mask.

    Raises ValueError, TypeError, on every rank: the model mixes tokens outside of attention, has
    others than those of the plan or the mask, or other positions; or it is to compute a loss that
    is not a sum over the ranks.
    """

    @functools.wraps(call)
    def checked(model: torch.nn.Module, *inputs: Any, **keywords: Any) -> Any:
        plan, mask = (keywords.get(name) for name in ("ringfa3_plan", "ringfa3_mask"))
        probed = isinstance(plan, Probe) or isinstance(mask, Probe)
        if plan is None and mask is None:
            return call(model, *inputs, **keywords)
        if not probed:
            check_call(model, inputs, keywords)
        compared = plan is not None and not probed and not is_cross(plan)
        known = keywords.get("position_ids") if compared else None
        token = _positions_of_plan.set(known)
        try:
            with on_own_tokens(model, inputs, keywords) as given:
                outputs = call(model, *inputs, **given)
        finally:
            _positions_of_plan.reset(token)
        if plan is not None and not probed:
            carry_plan(outputs, plan)
        return outputs

    return checked


def checked_losses(loss_of: Callable[[Any], Callable[..., Any]]) -> Callable[[Any], Any]:
    """The getter of `PreTrainedModel.loss_function`, whose losses are checked under a plan.

    A wrapper that calls `forward` of a model passes by `checked_call`, not by its loss.
    """

    @functools.wraps(loss_of)
    def checked(model: torch.nn.Module) -> Callable[..., Any]:
        return functools.partial(_checked_loss, loss_of(model))

    return checked


def _checked_loss(loss: Callable[..., Any], *inputs: Any, **keywords: Any) -> Any:
    plan = keywords.get("ringfa3_plan")
    if plan is not None:
        check_loss(plan, keywords)
    return loss(*inputs, **keywords)


@uncompiled
def check_call(model: torch.nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
    """What `checked_call` raises."""
    plan, given = (keywords.get(name) for name in ("ringfa3_plan", "ringfa3_mask"))
    of_types = given.values() if isinstance(given, Mapping) else [given]
    masks = [x for x in of_types if isinstance(x, SpanMask)]  # a layer refuses others
    try:
        named = inspect.signature(model.forward).bind_partial(*inputs).arguments | keywords
        tokens = [named[n] for n in ("input_ids", "inputs_embeds") if named.get(n) is not None]
        rows, count = tokens[0].shape[:2] if tokens else (1, 0)
        positions = named.get("position_ids")
        if plan is None:
            check_tokens(model, named)
            for mask in masks:
                check_counts(mask, rows * count, rows * count)
            check_model(model, "ringfa3_mask", any(uncounted(mask, rows) for mask in masks))
            for mask in masks:
                check_positions(mask, positions, rows)
            # An equal mask of an earlier call would stand for this one, and die before it.
            given_positions.difference_update(masks)
            given_positions.update(masks)
            return
        require_plan(plan)
        _check_layerdrop(model)
        if is_cross(plan):
            check_parts(model, plan, named)
            return
        check_tokens(model, named)
        if named.get("labels") is not None:
            _check_labels(named)
        if asks_for_router_logits(model, named):
            let_balance(model)
        let_run(model)
        check_model(model)
        plans = [plan.with_mask(mask) for mask in masks] or [plan]
        for of_layer in plans:
            _check_count(of_layer, rows, count)
            _check_positions(of_layer, positions)
        given_positions.update(plans)
    except (TypeError, ValueError, *FAILURES) as problem:
        raise_on_all_ranks(group_of(plan), problem)


def _check_layerdrop(model: torch.nn.Module) -> None:
    """Raises ValueError: layers are left out at random, so ranks would run different ones."""
    config = getattr(model, "config", None)
    for name in ("layerdrop", "encoder_layerdrop", "decoder_layerdrop"):
        if model.training and (value := getattr(config, name, 0.0)):
            raise ValueError(
                f"config.{name}={value} with ringfa3_plan: each rank would leave out other layers: "
                "set it to 0, or call model.eval()"
            )


@uncompiled
def check_loss(plan: object, keywords: dict[str, Any]) -> None:
    """Raises ValueError, on every rank: a loss is not a share of the mean over all ranks."""
    try:
        _check_labels(keywords)
    except ValueError as problem:
        raise_on_all_ranks(group_of(plan), problem)


def _check_labels(keywords: dict[str, Any]) -> None:
    if keywords.get("shift_labels") is None or keywords.get("num_items_in_batch") is None:
        raise ValueError(
            "labels with ringfa3_plan: transformers would shift them inside this rank's tokens, "
            "and divide the loss by the number of this rank's labels: shift them, then pass "
            "shift_labels=plan.shard(shifted) and num_items_in_batch, the number of labels of all "
            "ranks"
        )


def check_context(
    module: torch.nn.Module,
    plan: object,
    mask: Mask,
    spans: SpanMask | None,
    keywords: dict[str, Any],
    query: torch.Tensor,
    key: torch.Tensor,
) -> ContextPlan:
    """The plan of a layer, with its mask `spans`, if it has one.

    Raises TypeError, ValueError: what a layer is given does not fit its plan or the ring.

    query: (b, h, s, d); key: (b, h_kv, s_k, d).
    """
    require_plan(plan)
    assert isinstance(plan, ContextPlan)
    if spans is not None:
        plan = plan.with_mask(spans)
    batch, tokens = query.shape[0], query.shape[2]
    crossing = is_cross(plan)
    if key.shape[2] != tokens and not crossing:
        raise ValueError(
            f"past_key_values holds {key.shape[2] - tokens} tokens: a ring has no KV cache: pass "
            "use_cache=False and whole documents"
        )
    _check_count(plan, batch, tokens)
    if crossing and (keys := key.shape[0] * key.shape[2]) != plan.local_keys:
        raise ValueError(
            f"cross-attention has {keys} keys, and ringfa3_plan gives this rank {plan.local_keys}: "
            "give the encoder this rank's tokens of its plan"
        )
    padding = mask.padding
    if padding is not None and documents_of(batch, tokens, tokens, True, padding, None, 0):
        raise ValueError(
            f"attention_mask hides {int((~padding).sum())} tokens: a ring takes no padding: pack "
            "the documents, give plan_context their cumulative lengths, and attention_mask=None"
        )
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        if keywords.get(name) is not None:
            raise ValueError(
                f"{name} with ringfa3_plan: the plan has the documents: leave {name} out"
            )
    if spans is None and plan.causal and mask.right != 0:
        raise ValueError(
            f"ringfa3_plan is causal, the model's mask has window ({mask.left}, {mask.right}): "
            "make the plan with causal=False"
        )
    _check_rope(module)
    positions = keywords.get("position_ids")
    if positions is not None or plan not in given_positions:
        _check_positions(plan, positions)
    if mask.documents is not None:
        _check_documents(plan, mask.documents, batch)
    return plan


def _check_count(plan: ContextPlan, batch: int, tokens: int) -> None:
    if batch * tokens != plan.local_tokens:
        raise ValueError(
            f"ringfa3_plan gives this rank {plan.local_tokens} of {plan.total_tokens} tokens, "
            f"input_ids has shape ({batch}, {tokens}): pass plan.shard(input_ids, 1), of the plan "
            "of these documents"
        )


def attend_spans(
    plan: ContextPlan | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sink: torch.Tensor | None,
    scale: float,
    spans: SpanMask,
) -> torch.Tensor:
    """out (b, s, h, d_v) under a mask of all rows; without a plan on one device."""
    plan = plan_context(spans, (0, 1)) if plan is None else plan
    packed = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
    out = ring_attn_func(*packed, plan, softmax_scale=scale, sink=sink)
    assert isinstance(out, torch.Tensor)
    return out.view(out_shape(q, v))


def attend(
    plan: ContextPlan,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sink: torch.Tensor | None,
    scale: float,
    left: int,
    right: int,
    deterministic: bool,
) -> torch.Tensor:
    """out (b, s, h, d_v) of this rank's tokens, under a layer's window."""
    if effective_window(plan.causal, plan.window_size) != (left, right):
        plan = plan.with_window((left, -1 if plan.causal else right))
    packed = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
    out = ring_attn_func(*packed, plan, softmax_scale=scale, deterministic=deterministic, sink=sink)
    assert isinstance(out, torch.Tensor)
    return out.view(out_shape(q, v))


def _check_rope(module: torch.nn.Module) -> None:
    config = getattr(module, "config", None)
    for name in ("rope_parameters", "rope_scaling"):  # transformers 5 and 4
        settings = getattr(config, name, None) or {}
        by_layer_type = [x for x in settings.values() if isinstance(x, dict)]
        for part in by_layer_type or [settings]:
            rope = part.get("rope_type", part.get("type", "default"))
            if rope not in FIXED_ROPE:
                raise ValueError(
                    f"{name}: rope_type={rope!r} takes its frequencies from the largest position "
                    f"of a call, which differs between ranks: allowed are {', '.join(FIXED_ROPE)}"
                )


_checked: TensorCache[None] = TensorCache()  # position_ids and documents that are a plan's


def know_positions(plan: ContextPlan, positions: torch.Tensor) -> None:
    """Spares `_check_positions` a look at position_ids that were made from the plan."""
    _checked.get(positions, plan.handle, lambda: None)


def _check_positions(plan: ContextPlan, positions: torch.Tensor | None) -> None:
    """Compares position_ids with the plan's, once for each version of the tensor.

    (3, b, n) positions of images differ from the plan's. But in both a document begins with 0,
    and goes on with others; positions that count a rank's own tokens do not.
    """
    remedy = "pass position_ids=plan.positions[None]"
    if positions is None:
        raise ValueError(
            f"position_ids=None with ringfa3_plan: {remedy}. If you do, this model does not pass "
            "them on to its attention, and cannot run under a ring"
        )

    def compare() -> None:
        wanted, rows = plan.positions, text_positions(positions)
        found = (positions[0] if rows is None else rows).flatten().cpu()
        if found.shape != wanted.shape:
            raise ValueError(
                f"position_ids have shape {tuple(positions.shape)}, and this rank has "
                f"{len(wanted)} tokens: {remedy}; of several axes plan.shard(position_ids, 2)"
            )
        if rows is None:
            begins = (positions == 0).all(0).flatten().cpu()
            if problem := first_difference(begins.long(), (wanted == 0).long()):
                raise ValueError(
                    f"position_ids on {len(positions)} axes are not 0 where documents of "
                    f"ringfa3_plan begin, and there alone: {problem} (1: all axes are 0): give "
                    "plan.shard(position_ids, 2) of those of whole documents"
                )
        elif problem := first_difference(found, wanted):
            raise ValueError(
                f"position_ids are not those of ringfa3_plan on this rank: {problem}: {remedy}"
            )

    _checked.get(positions, plan.handle, compare)


def _check_documents(plan: ContextPlan, labels: torch.Tensor, batch: int) -> None:
    """Compares labels of a mask with breaks of the plan's positions, once for each version.

    transformers reads documents from position_ids in this way; others are a user's own.
    """

    def compare() -> None:
        breaks = plan.positions.view(batch, -1).diff() != 1
        expected = F.pad(breaks, (1, 0), value=True).flatten().nonzero().flatten()
        if not torch.equal(begins_of(labels, batch), expected):
            raise ValueError(
                "a packed_sequence_mask_function has other documents than ringfa3_plan: leave it "
                "out, the plan separates its documents"
            )

    _checked.get(labels, plan.handle, compare)
