"""Gated delta nets (Qwen3-Next, Qwen3.5, Olmo Hybrid) under a ring.

A recurrence needs its tokens in order. So the ranks of a plan exchange the hidden states into the
contiguous layout, where the layer's own forward runs, and back. There a document may continue from
the rank before. The convolution gets a halo. The recurrence gets its state: over the tokens of a
rank, the state S (d_k, d_v) becomes A S + B. The layer's own scan computes A from the identity and
B from zero, and each rank applies the (A, B) of the ranks before it.

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

from ringfa3.hf.checks import uncompiled
from ringfa3.planning.context_plan import plan_context
from ringfa3.ring.prepare_call import raise_on_all_ranks

SCAN, CONVOLUTION = "torch_chunk_gated_delta_rule", "causal_conv1d_fn"
SUFFIX = "GatedDeltaNet"

Function = Callable[..., Any]


def let_run(model: torch.nn.Module) -> None:
    """Lets the gated delta nets of a model run under a plan, and those of its other models.

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
        plan = keywords.get("ringfa3_plan")
        if plan is None:
            return forward(layer, hidden_states, *inputs, **keywords)
        if plan.total_tokens < plan.world:
            raise_on_all_ranks(
                plan.group,
                ValueError(
                    f"ringfa3_plan has {plan.total_tokens} tokens for {plan.world} ranks: a gated "
                    "delta net needs one on each: add a document without loss"
                ),
            )
        if keywords.get("cache_params") is not None:
            raise_on_all_ranks(
                plan.group,
                ValueError(
                    "past_key_values with ringfa3_plan: a ring has no cache: pass use_cache=False"
                ),
            )
        x = plan.to_contiguous(hidden_states.flatten(0, 1))
        out = forward(layer, x[None], *inputs, **keywords)
        return plan.from_contiguous(out[0]).view(hidden_states.shape)

    ring._ringfa3 = True  # type: ignore[attr-defined]
    return uncompiled(ring)


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

    last: rows of this rank's last document. All ranks use the states of all earlier ranks, also
    where they count for nothing: so the backward has one exchange on every rank.
    """
    mine = layout.shards[layout.rank]
    _, added = run(*last, None)
    d_k = added.shape[2]
    one = torch.eye(d_k, dtype=added.dtype, device=added.device).expand(1, heads, d_k, d_k)
    _, kept = run(*last, one, added.new_zeros((1, last[1] - last[0], heads, d_k)))
    if mine.position[-1] == 0:  # its document forgets what came before
        kept = kept * 0.0
    ranks = plan_context(layout.world, layout.group, "contiguous")  # one token stands for one rank
    maps, _ = ranks.halo(torch.cat((kept, added), -1), layout.world - 1)
    state = torch.zeros_like(added)
    for before in maps[:-1, None]:
        state = before[..., :d_k] @ state + before[..., d_k:]
    return state * float(mine.position[0] > 0)
