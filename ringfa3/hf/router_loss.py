"""The load-balancing loss of experts under a ring.

Let f be the share of all tokens that an expert gets, and P the mean of its probability over all
tokens. The loss is E * sum(f * P) over the E experts: no sum over ranks. But f has no gradient. So
with the f of all tokens, and a rank's sum in P, the losses of the ranks and their gradients add up
to those of one process. Ranks exchange E counts.

transformers computes it by a function of the logits of all layers. It gets no plan, so a model's
outputs carry the plan in their logits.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from ringfa3.hf.checks import uncompiled
from ringfa3.planning.context_plan import ContextPlan, plan_context

LOSS, LOGITS = "load_balancing_loss_func", "router_logits"
MIXTRAL = "transformers.models.mixtral.modeling_mixtral"  # TRL calls its function for every model

Function = Callable[..., Any]
_factor: ContextVar[float] = ContextVar("factor of the loss", default=1.0)


class RouterLogits(tuple[torch.Tensor, ...]):
    """Logits of this rank's tokens, (local tokens, experts) for each layer, with their plan."""

    plan: ContextPlan


@contextmanager
def scaled(factor: float) -> Iterator[None]:
    """Multiplies the losses of this rank: a trainer may average what others sum."""
    token = _factor.set(factor)
    try:
        yield
    finally:
        _factor.reset(token)


def asks_for_router_logits(model: torch.nn.Module, keywords: dict[str, Any]) -> bool:
    """Whether a call asks for the balance of experts, by its flag or else by the config."""
    flag = keywords.get("output_router_logits")
    config = getattr(model, "config", None)
    return bool(getattr(config, "output_router_logits", False) if flag is None else flag)


def let_balance(model: torch.nn.Module) -> None:
    """Replaces the loss of experts in the modules of a model's classes by one that follows the
    plan of its logits. Without a plan it computes what it did before.

    Raises ValueError: the model has another loss.
    """
    own = {sys.modules[base.__module__] for base in type(model).__mro__}
    functions = [getattr(module, LOSS) for module in own if hasattr(module, LOSS)]
    if not functions or not all(map(_is_known, functions)):
        raise ValueError(
            f"output_router_logits=True with ringfa3_plan: {type(model).__name__} has no "
            f"{LOSS} like Mixtral's, which is known to be right over several ranks: pass "
            "output_router_logits=False"
        )
    for module in own | {importlib.import_module(MIXTRAL)}:
        function = getattr(module, LOSS, None)
        if function is not None and not hasattr(function, "_ringfa3") and _is_known(function):
            setattr(module, LOSS, _over_ranks(function))


@uncompiled
def carry_plan(outputs: Any, plan: ContextPlan) -> None:
    """Lets the router logits of a model's outputs, if it has some, carry the plan."""
    if isinstance(outputs, dict) and isinstance(outputs.get(LOGITS), tuple):
        logits = RouterLogits(outputs[LOGITS])
        logits.plan = plan
        outputs[LOGITS] = logits


def _over_ranks(function: Function) -> Function:
    @functools.wraps(function)
    def loss(gate_logits: Any, *arguments: Any, **keywords: Any) -> Any:
        if not isinstance(gate_logits, RouterLogits):
            return function(gate_logits, *arguments, **keywords)
        return _share(gate_logits, *arguments, **keywords)

    loss._ringfa3 = True  # type: ignore[attr-defined]
    return loss


@uncompiled
def _share(
    logits: RouterLogits, num_experts: int, top_k: int = 2, attention_mask: object = None
) -> torch.Tensor:
    """() float32: this rank's share of the loss of all tokens. A plan has no padding to mask."""
    del attention_mask
    plan = logits.plan
    counts, probabilities = _statistics(logits, num_experts, top_k)
    if plan.world > 1:
        ranks = plan_context(plan.world, plan.group, "contiguous")  # one token stands for one rank
        counts = ranks.unshard(counts[None]).sum(0)
    return _balance(counts, probabilities, top_k) * _factor.get()


def _statistics(
    logits: tuple[torch.Tensor, ...], num_experts: int, top_k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(experts,) int64 tokens of each expert, and float32 sums of their probabilities, over the
    tokens of all layers."""
    device = logits[0].device
    counts = torch.zeros(num_experts, dtype=torch.int64, device=device)
    probabilities = torch.zeros(num_experts, dtype=torch.float32, device=device)
    for of_layer in logits:
        weights = of_layer.to(device).flatten(0, -2).softmax(-1)
        chosen = weights.topk(top_k, dim=-1).indices.flatten()
        counts = counts + chosen.bincount(minlength=num_experts)
        probabilities = probabilities + weights.float().sum(0)
    return counts, probabilities


def _balance(counts: torch.Tensor, probabilities: torch.Tensor, top_k: int) -> torch.Tensor:
    rows = counts.sum() / top_k  # tokens of all layers and ranks
    return len(counts) * (counts / rows * (probabilities / rows)).sum()


def _is_known(function: Function) -> bool:
    """Whether a function computes `_balance`, by its result for random logits."""
    if hasattr(function, "_ringfa3"):
        return True
    generator = torch.Generator().manual_seed(0)
    shape = 2, 7, 5
    logits = tuple(torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu"))
    try:
        found = function(logits, 5, 2)
    except (TypeError, ValueError, IndexError, RuntimeError):  # of other arguments
        return False
    expected = _balance(*_statistics(logits, 5, 2), 2)
    return isinstance(found, torch.Tensor) and bool((found - expected).abs() < 1e-5)
