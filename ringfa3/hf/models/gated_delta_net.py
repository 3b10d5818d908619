"""Gated delta nets (Qwen3-Next, Qwen3.5, Olmo Hybrid) under a ring.

A recurrence needs its tokens in order. So the ranks of a plan exchange the hidden states into the
contiguous layout, where the layer's own forward runs, and back. There a document may continue from
the rank before. The convolution gets a halo. The recurrence gets its state: over the tokens of a
rank, the state S (d_k, d_v) becomes A S + B. The layer's own scan computes A from the identity and
B from zero, and each rank applies the (A, B) of those ranks before it that have its first document.

transformers' layers pass the keyword ringfa3_plan on to these two functions of their module.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
from collections.abc import Callable
from typing import Any

import torch

from ringfa3.hf.checks import group_of, require_plan, uncompiled
from ringfa3.hf.probe import Probe
from ringfa3.planning.context_plan import plan_context
from ringfa3.ring.prepare_call import raise_on_all_ranks

SCAN, CONVOLUTION = "torch_chunk_gated_delta_rule", "causal_conv1d_fn"
SUFFIX = "GatedDeltaNet"

Function = Callable[..., Any]


def let_run(model: torch.nn.Module) -> None:
    """Replaces the forward of the classes of a model's gated delta nets, and functions of their
    modules, by ones that follow a plan. Without a plan these compute what they did before.

    Layers that do not pass ringfa3_plan on, as those of transformers 4, stay as they are: the
    check of the model refuses them.
    """
    for layer in {type(module) for module in model.modules()}:
        functions = sys.modules[layer.__module__]
        known = all(hasattr(functions, name) for name in (SCAN, CONVOLUTION))
        if not (known and layer.__name__.endswith(SUFFIX)) or hasattr(layer.forward, "_ringfa3"):
            continue
        if "kwargs" in inspect.signature(layer.forward).parameters:
            setattr(functions, CONVOLUTION, _convolution(getattr(functions, CONVOLUTION)))
            setattr(functions, SCAN, _scan(getattr(functions, SCAN)))
            layer.forward = _layer(layer.forward)


def _layer(forward: Function) -> Function:
    @functools.wraps(forward)
    def ring(layer: Any, hidden_states: torch.Tensor, *inputs: Any, **keywords: Any) -> Any:
        """(b, s, hidden), whose b * s tokens are those of this rank."""
        plan, mask = (keywords.get(name) for name in ("ringfa3_plan", "ringfa3_mask"))
        if plan is None and mask is None:  # a compiler traces this
            return forward(layer, hidden_states, *inputs, **keywords)
        return exchanged(layer, hidden_states, *inputs, **keywords)

    @uncompiled
    def exchanged(layer: Any, hidden_states: torch.Tensor, *inputs: Any, **keywords: Any) -> Any:
        plan: Any = keywords.get("ringfa3_plan")
        try:
            _check(layer, keywords)
        except (TypeError, ValueError) as problem:
            raise_on_all_ranks(group_of(plan), problem)
        x = plan.to_contiguous(hidden_states.flatten(0, 1))
        out = forward(layer, x[None], *inputs, **keywords)
        return plan.from_contiguous(out[0]).view(hidden_states.shape)

    ring._ringfa3 = True  # type: ignore[attr-defined]
    return ring


def _check(layer: torch.nn.Module, keywords: dict[str, Any]) -> None:
    """Raises TypeError, ValueError: the keywords have no plan that a recurrence can follow."""
    plan: Any = keywords.get("ringfa3_plan")
    if plan is not None and not isinstance(plan, Probe):
        require_plan(plan)
    if keywords.get("ringfa3_mask") is not None or plan.mask is not None:
        raise ValueError(
            f"ringfa3_mask in a model with {type(layer).__name__}, a recurrence, which has no "
            "mask: leave it out, and give the lengths of documents to plan_context or as "
            "cu_seq_lens_q"
        )
    if plan.total_tokens < plan.world:
        raise ValueError(
            f"ringfa3_plan has {plan.total_tokens} tokens for {plan.world} ranks: a gated delta "
            "net needs one on each: add a document without loss"
        )
    if keywords.get("cache_params") is not None:
        raise ValueError(
            "past_key_values with ringfa3_plan: a ring has no cache: pass use_cache=False"
        )


def _convolution(function: Function) -> Function:
    @functools.wraps(function)
    def ring(x: torch.Tensor, weight: torch.Tensor, *inputs: Any, **keywords: Any) -> Any:
        """(1, channels, tokens); weight (channels, kernel size)."""
        plan = keywords.pop("ringfa3_plan", None)
        if plan is None:
            return function(x, weight, *inputs, **keywords)
        rows, own = plan.contiguous.halo(x[0], weight.shape[-1] - 1, dim=1)
        return function(rows[None], weight, *inputs, **keywords)[..., own]

    return ring


def _scan(function: Function) -> Function:
    @functools.wraps(function)
    def ring(*inputs: torch.Tensor, ringfa3_plan: Any = None, **keywords: Any) -> Any:
        """query, key, value (1, tokens, heads, head dim); keywords g, beta (1, tokens, heads)."""
        if ringfa3_plan is None:
            return function(*inputs, **keywords)
        g, beta = keywords.pop("g"), keywords.pop("beta")
        keywords |= {"output_final_state": True}

        def run(
            begin: int, end: int, state: torch.Tensor | None, value: torch.Tensor | None = None
        ) -> tuple[torch.Tensor, torch.Tensor]:
            """(out, last state) of tokens [begin, end) of one document."""
            q, k, v = (x[:, begin:end] for x in inputs)
            v = v if value is None else value
            gates = {"g": g[:, begin:end], "beta": beta[:, begin:end]}
            result: tuple[torch.Tensor, torch.Tensor]
            result = function(q, k, v, **{**keywords, **gates, "initial_state": state})
            return result

        layout = ringfa3_plan.contiguous
        mine = layout.shards[layout.rank]
        bounds = list(itertools.pairwise([*mine.row.tolist(), layout.local_tokens]))
        states: list[torch.Tensor | None] = [None] * len(bounds)
        if layout.world > 1:
            states[0] = _state_before(layout, bounds[-1], run, inputs[2].shape[2])
        outs = [run(*ends, state)[0] for ends, state in zip(bounds, states, strict=True)]
        return torch.cat(outs, 1), None

    return ring


def _state_before(layout: Any, last: tuple[int, int], run: Function, heads: int) -> torch.Tensor:
    """(1, heads, d_k, d_v): the state at this rank's first token, zero where a document begins.

    last: rows of this rank's last document. All ranks take the maps of all earlier ranks, so the
    backward has one exchange on every rank. `where` drops those of other documents, whose NaN a
    product with zero would pass on.
    """
    _, added = run(*last, None)
    d_k = added.shape[2]
    one = torch.eye(d_k, dtype=added.dtype, device=added.device).expand(1, heads, d_k, d_k)
    _, kept = run(*last, one, added.new_zeros((1, last[1] - last[0], heads, d_k)))
    ranks = plan_context(layout.world, layout.group, "contiguous")  # one token stands for one rank
    before = layout.world - 1
    maps, _ = ranks.halo(torch.cat((kept, added), -1), before)  # zeros for ranks below 0
    first = layout.shards[layout.rank].sequence[0]
    alike = [shard.sequence[-1] == first for shard in layout.shards[: layout.rank]]
    alike = [False] * (before - layout.rank) + alike
    counts = torch.tensor(alike, dtype=torch.bool, device=added.device).view(-1, 1, 1, 1)
    state = torch.zeros_like(added)
    for of_rank in maps[:-1].where(counts, 0.0)[:, None]:
        state = of_rank[..., :d_k] @ state + of_rank[..., d_k:]
    return state
