"""A layer under the ring: its plan, its checks, its call."""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ringfa3.attention_op import out_shape
from ringfa3.hf.checks import uncompiled
from ringfa3.hf.documents import begins_of, documents_of
from ringfa3.hf.gated_delta_net import let_run
from ringfa3.hf.masks import Mask
from ringfa3.hf.probe import FAILURES, Probe, asks_for_router_logits, check_model
from ringfa3.masks.mask import Mask as SpanMask
from ringfa3.planning.context_plan import ContextPlan, check_plan, effective_window, plan_context
from ringfa3.ring.op import ring_attn_func
from ringfa3.ring.prepare_call import default_group, raise_on_all_ranks
from ringfa3.tensor_cache import TensorCache

# RoPE types of transformers whose frequencies do not depend on the positions of a call.
FIXED_ROPE = ("default", "linear", "llama3", "yarn", "proportional")


def group_of(plan: object) -> dist.ProcessGroup | None:
    """The group whose ranks share an error of a call with this `ringfa3_plan`."""
    if plan is None or getattr(plan, "world", 2) == 1:
        return None
    group: dist.ProcessGroup | None = getattr(plan, "group", None)
    return group or default_group()


def checked_call(call: Callable[..., Any]) -> Callable[..., Any]:
    """`PreTrainedModel.__call__`, which refuses what no single layer could notice under a plan.

    Raises ValueError, on every rank: the model mixes tokens outside of attention, or is to compute
    a loss that is not a sum over the ranks.
    """

    @functools.wraps(call)
    def checked(model: torch.nn.Module, *inputs: Any, **keywords: Any) -> Any:
        plan = keywords.get("ringfa3_plan")
        if plan is not None and not isinstance(plan, Probe):
            check_call(model, plan, inputs, keywords)
        return call(model, *inputs, **keywords)

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
def check_call(
    model: torch.nn.Module, plan: object, inputs: tuple[Any, ...], keywords: dict[str, Any]
) -> None:
    """What `checked_call` raises."""
    try:
        named = inspect.signature(model.forward).bind_partial(*inputs).arguments
        _check_losses(model, {**named, **keywords})
        let_run(model)
        check_model(model)
        if isinstance(plan, ContextPlan):
            _note_positions(plan, {**named, **keywords}.get("position_ids"))
    except (ValueError, *FAILURES) as problem:
        raise_on_all_ranks(group_of(plan), problem)


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


def _check_losses(model: torch.nn.Module, keywords: dict[str, Any]) -> None:
    if keywords.get("labels") is not None:
        _check_labels(keywords)
    if asks_for_router_logits(model, keywords):
        raise ValueError(
            "output_router_logits=True with ringfa3_plan: the load-balancing loss would be that "
            "of this rank's tokens: pass output_router_logits=False"
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
    check_plan(plan)
    assert isinstance(plan, ContextPlan)
    whole = plan  # as the model was called with it
    if spans is not None:
        plan = plan.with_mask(spans)
    batch, tokens = query.shape[0], query.shape[2]
    if key.shape[2] != tokens:
        raise ValueError(
            f"past_key_values holds {key.shape[2] - tokens} tokens: a ring has no KV cache: pass "
            "use_cache=False and whole documents"
        )
    if batch * tokens != plan.local_tokens:
        raise ValueError(
            f"ringfa3_plan gives this rank {plan.local_tokens} of {plan.total_tokens} tokens, "
            f"input_ids has shape ({batch}, {tokens}): pass plan.shard(input_ids, 1), of the plan "
            "of these documents"
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
    if positions is not None or whole not in _given_positions:
        _check_positions(plan, positions)
    if mask.documents is not None:
        _check_documents(plan, mask.documents, batch)
    return plan


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
# Plans whose positions the last call of a model had. `check_model` has shown that the tokens of
# the model depend on these alone, so layers that do not get them, as Llama 4's, have them too.
_given_positions: weakref.WeakSet[ContextPlan] = weakref.WeakSet()


def _check_positions(plan: ContextPlan, positions: torch.Tensor | None) -> None:
    """Compares position_ids with the plan's, once for each version of the tensor."""
    remedy = "pass position_ids=plan.positions[None]"
    if positions is None:
        raise ValueError(
            f"position_ids=None with ringfa3_plan: {remedy}. If you do, this model does not pass "
            "them on to its attention, and cannot run under a ring"
        )

    def compare() -> None:
        given = positions.flatten().cpu()
        if not torch.equal(given, plan.positions.to(given.dtype)):
            raise ValueError(
                f"position_ids begin with {given[:4].tolist()}, those of ringfa3_plan with "
                f"{plan.positions[:4].tolist()}: {remedy}"
            )

    _checked.get(positions, plan.handle, compare)


def _note_positions(plan: ContextPlan, positions: object) -> None:
    """Whether this call has the plan's positions. A layer raises what is wrong with others."""
    _given_positions.discard(plan)
    if isinstance(positions, torch.Tensor):
        with contextlib.suppress(ValueError):
            _check_positions(plan, positions)
            _given_positions.add(plan)


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
