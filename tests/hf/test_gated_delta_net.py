"""If this fails, models with recurrent layers lose their state at the borders of ranks. Models with
gated delta nets under a ring, against each document alone on one process."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch import nn

from ringfa3 import keep_attention, plan_context
from ringfa3.hf.models.gated_delta_net import let_run
from tests.support.double import in_double, recomputed_in_double
from tests.support.hf_models import EXPERTS, SIZES, difference, tokens
from tests.support.ranks import Ranks

pytestmark = pytest.mark.usefixtures("in_float64")
BOUND = 1e-11  # relative to the largest number of a gradient
CU = [0, 1, 9, 88, 100]  # the third document is on each of three ranks
LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 6, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen3NextConfig": {
        "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    },
    "Qwen3_5TextConfig": {"head_dim": 8},
    "OlmoHybridConfig": {"linear_num_key_heads": 4},
}  # fmt: skip


def tiny(name: str, attention: str) -> Any:
    settings = copy.deepcopy({**SIZES, "initializer_range": 0.2, **LINEAR, **CONFIGS[name]})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = getattr(transformers, name)(**settings)
        model = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation=attention, **EXPERTS
        )
    return model.train()


def loss_of(model: nn.Module, ids: torch.Tensor, labels: torch.Tensor, **inputs: Any) -> Any:
    """The sum over the tokens of (1, t) ids whose label is not -100."""
    logits = model(ids, use_cache=False, **inputs).logits
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def labels_of(ids: torch.Tensor) -> torch.Tensor:
    labels = ids.roll(-1, 1)
    labels[0, [end - 1 for end in CU[1:]]] = -100
    return labels


def one_process(name: str) -> dict[str, torch.Tensor]:
    """The loss and the gradients by parameter, with transformers' own layers."""
    model, ids = tiny(name, "eager"), tokens(1, CU[-1])
    labels = labels_of(ids)
    parts = [slice(*ends) for ends in itertools.pairwise(CU)]
    loss = sum(loss_of(model, ids[:, part], labels[:, part]) for part in parts)
    loss.backward()
    return {"loss": loss.detach(), **{n: p.grad for n, p in model.named_parameters()}}


def _shared(group: dist.ProcessGroup, name: str, layout: str, checkpointing: bool) -> Any:
    plan, model, ids = plan_context(CU, group, layout), tiny(name, "ringfa3"), tokens(1, CU[-1])
    if checkpointing:
        model.gradient_checkpointing_enable(
            {"use_reentrant": False, "context_fn": recomputed_in_double(keep_attention)}
        )
    given = {"position_ids": plan.positions[None], "ringfa3_plan": plan}
    labels = plan.shift(plan.shard(ids[0]), -1, fill=-100)
    loss = loss_of(model, plan.shard(ids, 1), labels, **given)
    loss.backward()
    sums = {"loss": loss.detach(), **{n: p.grad for n, p in model.named_parameters()}}
    for value in sums.values():
        dist.all_reduce(value, group=group)
    return sums


@pytest.mark.parametrize(
    ("name", "world", "layout", "checkpointing"),
    [
        ("Qwen3NextConfig", 2, "zigzag", False),
        ("Qwen3NextConfig", 3, "zigzag", True),
        ("Qwen3_5TextConfig", 3, "contiguous", False),
        ("OlmoHybridConfig", 2, "zigzag", True),
    ],
)
def test_gradients_are_those_of_one_process(
    ranks: Ranks, name: str, world: int, layout: str, checkpointing: bool
) -> None:
    """The sum of losses, and every summed gradient on each rank."""
    expected = one_process(name)
    for found in ranks.run(world, in_double, _shared, name, layout, checkpointing):
        errors = {n: difference(found[n], expected[n]) for n in expected}
        assert max(errors.values()) <= BOUND, max(errors.items(), key=lambda item: item[1])


def test_a_layer_that_does_not_get_the_plan_is_refused() -> None:
    model, plan = tiny("Qwen3NextConfig", "ringfa3"), plan_context(CU)
    layer = model.model.layers[0].linear_attn
    inner = layer.forward
    layer.forward = lambda hidden_states, **_: inner(hidden_states)
    with pytest.raises(ValueError, match=r"linear_attn \(Qwen3NextGatedDeltaNet\) mixes tokens"):
        model(tokens(1, CU[-1]), position_ids=plan.positions[None], ringfa3_plan=plan)


def _few(group: dist.ProcessGroup) -> tuple[str, str]:
    """Errors of a layer whose plan leaves a rank without tokens, and of a model with a cache."""
    model = tiny("Qwen3NextConfig", "ringfa3")
    let_run(model)
    plan = plan_context(2, group)
    x = torch.zeros(1, plan.local_tokens, SIZES["hidden_size"])
    with pytest.raises(ValueError, match="tokens") as raised:
        model.model.layers[0].linear_attn(x, ringfa3_plan=plan)  # the layer's own check
    few = str(raised.value)
    plan = plan_context(6, group)
    with pytest.raises(ValueError, match="cache") as raised:
        model(tokens(1, 2), position_ids=plan.positions[None], ringfa3_plan=plan, use_cache=True)
    return few, str(raised.value)


def test_errors_on_all_ranks(ranks: Ranks) -> None:
    for few, cached in ranks.run(3, _few):
        assert "has 2 tokens for 3 ranks: a gated delta net needs one on each" in few
        assert "a ring has no cache: pass use_cache=False" in cached


@pytest.mark.parametrize("called", ["model", "layer"])
def test_what_is_no_plan_is_named(called: str) -> None:
    model = tiny("Qwen3NextConfig", "ringfa3")
    let_run(model)
    layer = model.model.layers[0].linear_attn
    x = tokens(1, 9) if called == "model" else torch.zeros(1, 9, SIZES["hidden_size"])
    remedy = r"ringfa3_plan='x' is no plan: pass ringfa3.plan_context\(cu_seqlens\)"
    with pytest.raises(TypeError, match=remedy):
        (model if called == "model" else layer)(x, ringfa3_plan="x")


def test_a_layer_without_a_plan_is_one_graph_after_a_ring() -> None:
    """float32, 1e-6 of the uncompiled model; with a plan the error names the remedy."""
    torch._dynamo.reset()
    model, plan = tiny("Qwen3_5TextConfig", "ringfa3").eval(), plan_context(12)
    ids = tokens(1, 12)
    given = {"position_ids": plan.positions[None], "ringfa3_plan": plan, "use_cache": False}
    model(ids, **given)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    expected = model(ids, use_cache=False).logits
    assert difference(compiled(ids, use_cache=False).logits, expected) <= 1e-6
    reason = "ringfa3_plan and ringfa3_mask break the graph: call torch.compile without fullgraph"
    with pytest.raises(RuntimeError, match=reason):
        compiled(ids, **given)


def _with_nan(group: dist.ProcessGroup) -> torch.Tensor:
    """(tokens, hidden) of a layer whose first document, of two ranks, has a NaN."""
    model, plan = tiny("Qwen3NextConfig", "ringfa3"), plan_context([0, 5, 9], group)
    let_run(model)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((9, SIZES["hidden_size"]), generator=generator)
    x[1] = torch.nan
    out = model.model.layers[0].linear_attn(plan.shard(x)[None], ringfa3_plan=plan)
    return plan.unshard(out[0]).detach()


def test_nan_stays_in_its_document(ranks: Ranks) -> None:
    """The second document begins on a rank that holds the end of the first, and goes on on the
    next: the state of the rank before is not its own. Reference: the document alone."""
    model = tiny("Qwen3NextConfig", "ringfa3")
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((9, SIZES["hidden_size"]), generator=generator)
    expected = model.model.layers[0].linear_attn(x[None, 5:])[0]
    for out in ranks.run(3, in_double, _with_nan):
        assert out[1:5].isnan().all()
        assert difference(out[5:], expected) <= BOUND
