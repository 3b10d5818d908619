"""If this fails, a model that mixes tokens outside of attention trains wrongly without an error.
Under a ring a model is right or refused by name: whatever mixes tokens must be attention."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn

from ringfa3 import ContextPlan, plan_context
from ringfa3.hf import register
from tests.support.hf_models import SIZES, model_of, results, tokens, worst_difference
from tests.support.ranks import Ranks, sacrifice

MIXED = ["linear_attention", "full_attention"]
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 12, "mamba_d_state": 8, "mamba_n_groups": 1}
HYBRIDS: dict[str, tuple[str, dict[str, Any], str]] = {  # config, changes, what is named
    "LFM2": (
        "Lfm2Config",
        {"layer_types": ["full_attention", "conv"]},
        "model.layers.1.conv (Lfm2ShortConv) mixes tokens",
    ),
    "Bamba": ("BambaConfig", MAMBA, "model.layers.0.mamba (BambaMixer) mixes tokens"),
    "Falcon-H1": (
        "FalconH1Config",
        {**MAMBA, "mamba_d_ssm": 48, "head_dim": 8},
        "model.layers.0.mamba (FalconH1Mixer) mixes tokens",
    ),
    "MiniMax": (
        "MiniMaxConfig",
        {"head_dim": 8, "num_local_experts": 2, "layer_types": MIXED},
        "model.layers.0.self_attn (MiniMaxLightningAttention) mixes tokens",
    ),
    "Mamba": ("MambaConfig", {}, "backbone.layers.0.mixer (MambaMixer) mixes tokens"),
    "RWKV": (
        "RwkvConfig",
        {"attention_hidden_size": 24},
        "rwkv.blocks.0.attention (RwkvSelfAttention) mixes tokens",
    ),
    "a decoder whose positions count tokens": (
        "BartConfig",
        {"d_model": 24, "decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 32},
        "BartAttention gets tokens that depend on the index of a token",
    ),
    "attention of its own": (
        "OpenAIGPTConfig",
        {},
        "transformer.h.0.attn (Attention) mixes tokens",
    ),
}


def tiny(config: str, changes: dict[str, Any], attention: str = "ringfa3") -> nn.Module:
    settings = {**SIZES, **changes}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = getattr(transformers, config)(**copy.deepcopy(settings))
        return transformers.AutoModelForCausalLM.from_config(made, attn_implementation=attention)


def forward(model: nn.Module, plan: ContextPlan, **changes: Any) -> torch.Tensor:
    given = {"position_ids": plan.positions[None], "use_cache": False, "ringfa3_plan": plan}
    ids = plan.shard(tokens(1, plan.total_tokens), 1)
    return model(ids, **{**given, **changes}).logits


@pytest.mark.parametrize("name", HYBRIDS)
def test_refused_by_name(name: str) -> None:
    config, changes, named = HYBRIDS[name]
    model = tiny(config, changes).train()
    with pytest.raises(ValueError, match="would be wrong under a ring") as raised:
        forward(model, plan_context([0, 5, 12]))
    assert named in str(raised.value)
    assert "without ringfa3_plan, on whole documents" in str(raised.value)
    assert all(module.training for module in model.modules())
    assert not model.get_input_embeddings()._forward_hooks


def messages(group: dist.ProcessGroup) -> str:
    config, changes, _ = HYBRIDS["LFM2"]
    try:
        forward(tiny(config, changes), plan_context([0, 5, 12], group))
    except ValueError as problem:
        return str(problem)
    return "no error"


def test_refused_on_every_rank(ranks: Ranks) -> None:
    """The pool, whose ranks must agree, is whole afterwards."""
    assert all("Lfm2ShortConv" in text for text in ranks.run(2, messages))


class Shift(nn.Module):
    """Half of a token's channels come from the token before; a weight of zero hides that."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x + 0.0 * x.roll(1, dims=1))


class Mean(Shift):
    """Statistics of all tokens."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x - x.mean(1, keepdim=True))


@pytest.mark.parametrize("mixer", [Shift, Mean])
def test_a_layer_of_ones_own(mixer: type[Shift]) -> None:
    """A model that passed, and then gets another layer, has to pass again."""
    model, plan = model_of("llama", "ringfa3"), plan_context(12)
    forward(model, plan)
    model.model.layers[1].mlp = mixer(model.model.layers[1].mlp)
    with pytest.raises(ValueError, match=rf"model.layers.1.mlp \({mixer.__name__}\) mixes"):
        forward(model, plan)


class Index(Shift):
    """A table of embeddings by the index of a token."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + torch.linspace(-1, 1, 32, dtype=x.dtype)[: x.shape[1], None]


class ExpertChoice(Shift):
    """Half of the tokens get an expert: those with the largest scores, NaN among them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = x.sum(-1).topk(x.shape[1] // 2).indices[..., None].expand(-1, -1, x.shape[2])
        return torch.zeros_like(x).scatter(1, chosen, self.inner(x).gather(1, chosen))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("layer_type", [Index, ExpertChoice])
def test_equal_tokens_differ(layer_type: type[Shift], layer: int, dtype: torch.dtype) -> None:
    """NaN does not come through an index or a choice; equal tokens that end unequal do."""
    model = model_of("llama", "ringfa3", dtype)
    model.model.layers[layer].mlp = layer_type(model.model.layers[layer].mlp)
    with pytest.raises(ValueError, match=r"the index of a token.*or on a choice among tokens"):
        forward(model, plan_context(12))


def patch_layer(model: Any) -> None:
    mlp = model.model.layers[0].mlp
    inner = mlp.forward
    mlp.forward = lambda x: inner(x + 0.0 * x.roll(1, dims=1))


CHANGES: dict[str, Callable[[Any], object]] = {
    "attention": lambda model: model.set_attn_implementation("sdpa"),
    "hook": lambda model: model.model.layers[0].mlp.register_forward_pre_hook(
        lambda _, x: (x[0] - x[0].mean(1, keepdim=True),)
    ),
    "forward": patch_layer,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_changes_after_it_passed(change: str) -> None:
    model, plan = model_of("llama", "ringfa3"), plan_context(12)
    forward(model, plan)
    CHANGES[change](model)
    with pytest.raises(ValueError, match="mixes tokens"):
        forward(model, plan)


@pytest.mark.parametrize("name", ["llama", "gpt-oss", "gemma3", "deepseek-v3"])
def test_attention_alone_passes_once(name: str) -> None:
    """In training mode, with noise of dropout outside of attention; gradients stay as they are."""
    model = model_of(name, "ringfa3").train()
    calls: list[tuple[int, ...]] = []
    model.lm_head.register_forward_hook(lambda *x: calls.append(tuple(x[1][0].shape)))
    plan = plan_context([0, 5, 12])
    for _ in range(2):
        forward(model, plan).sum()
    assert [shape[1] for shape in calls] == [13, 13, 12, 12]
    assert all(p.grad is None for p in model.parameters())
    assert model.training


MEAN = r"labels with ringfa3_plan.*shift_labels=plan.shard\(shifted\) and num_items_in_batch"


@pytest.mark.parametrize("given", [(), ("shift_labels",), ("num_items_in_batch",)])
@pytest.mark.parametrize("called", ["by keyword", "by position", "forward"])
def test_a_loss_of_this_rank_alone_is_refused(given: tuple[str, ...], called: str) -> None:
    """A wrapper such as PEFT's calls forward, which skips the checks of a call."""
    plan, model = plan_context([0, 5, 12]), model_of("llama", "ringfa3")
    ids = plan.shard(tokens(1, 12), 1)
    whole = {"shift_labels": ids, "num_items_in_batch": 12}
    keywords = {"use_cache": False, "ringfa3_plan": plan, **{name: whole[name] for name in given}}
    positions = plan.positions[None]
    inputs = (ids, None, positions, None, None, ids) if called == "by position" else (ids,)
    if called != "by position":
        keywords |= {"position_ids": positions, "labels": ids}
    with pytest.raises(ValueError, match=MEAN):
        (model.forward if called == "forward" else model)(*inputs, **keywords)


def refusals_of_a_loss(group: dist.ProcessGroup) -> str:
    """Of `forward`, where rank 1 alone leaves num_items_in_batch out."""
    plan, model = plan_context([0, 5, 12], group), model_of("llama", "ringfa3")
    ids = plan.shard(tokens(1, 12), 1)
    given = {"position_ids": plan.positions[None], "use_cache": False, "ringfa3_plan": plan}
    count = 12 if dist.get_rank(group) == 0 else None
    try:
        model.forward(ids, labels=ids, shift_labels=ids, num_items_in_batch=count, **given)
        plan.unshard(ids[0])
    except ValueError as problem:
        return str(problem)
    return "no error"


def test_a_loss_is_refused_on_every_rank(ranks: Ranks) -> None:
    """The rank with a loss learns it at the next exchange."""
    assert all("num_items_in_batch" in text for text in ranks.run(2, refusals_of_a_loss))


def test_registration_wraps_a_call_that_others_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another library's wrapper does not end the checks, and a second registration adds none."""
    owner = transformers.PreTrainedModel
    monkeypatch.setattr(owner, "__call__", lambda self, *x, **y: nn.Module.__call__(self, *x, **y))
    register()
    with pytest.raises(ValueError, match="Lfm2ShortConv"):
        forward(tiny(*HYBRIDS["LFM2"][:2]), plan_context([0, 5, 12]))
    before = owner.__call__, owner.loss_function.fget
    register()
    assert (owner.__call__, owner.loss_function.fget) == before


def test_balance_of_experts_is_asked_for() -> None:
    """By the flag of the call or else of the config; as without a plan, to 1e-6."""
    plan = plan_context(12)
    ids = tokens(1, 12)
    given = {"position_ids": plan.positions[None], "use_cache": False}
    for in_config, flag in ((True, None), (False, True), (True, False)):
        model = tiny("MixtralConfig", {"num_local_experts": 2, "output_router_logits": in_config})
        keywords = given if flag is None else {**given, "output_router_logits": flag}
        found = model(ids, ringfa3_plan=plan, **keywords).aux_loss
        expected = model(ids, **keywords).aux_loss
        assert (found is None) == (expected is None) == (flag is False)
        assert found is None or found.item() == pytest.approx(expected.item(), rel=1e-6)


def test_a_result_of_all_tokens_is_refused() -> None:
    model = model_of("llama", "ringfa3")
    model.register_forward_hook(lambda *x: {**x[2], "balance": x[2].logits.mean()})
    with pytest.raises(ValueError, match=r"its output balance of shape \(\) has no row per token"):
        forward(model, plan_context(12))


class Failing(nn.Module):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise self.error


def failure(group: dist.ProcessGroup | None, error: Exception) -> Exception:
    """What a forward raises, on rank 0 of whose model a layer fails."""
    model, plan = model_of("llama", "ringfa3"), plan_context(12, group)
    if group is None or dist.get_rank(group) == 0:
        model.model.layers[0].mlp = Failing(error)
    try:
        forward(model, plan)
    except Exception as raised:
        return raised
    raise AssertionError("no error")


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), dist.DistBackendError("lost")])
def test_no_failure_of_a_device_is_a_verdict(error: Exception) -> None:
    assert failure(None, error) is error


def test_a_failure_is_the_cause() -> None:
    error = IndexError("layer 3")
    raised = failure(None, error)
    assert isinstance(raised, ValueError)
    assert raised.__cause__ is error
    assert "cannot be checked for a ring: a forward with position_ids raises" in str(raised)


def compiled_results(group: dist.ProcessGroup | None, layers: bool) -> float:
    """The largest difference to the uncompiled model, of logits and gradients of this rank."""
    torch._dynamo.reset()
    plan = plan_context([0, 5, 12], group)
    model = model_of("llama", "ringfa3", torch.float64, num_hidden_layers=1)
    given = {"position_ids": plan.positions[None], "ringfa3_plan": plan}
    ids = plan.shard(tokens(1, 12), 1)
    expected = results(copy.deepcopy(model), ids, **given)
    for part in model.model.layers if layers else [model]:
        part.compile(backend="aot_eager")
    return worst_difference(results(model, ids, **given), expected)


@pytest.mark.parametrize("layers", [False, True], ids=["model", "layers"])
def test_compiled(layers: bool) -> None:
    """The ring of one process runs between graphs; float64, 1e-12."""
    assert compiled_results(None, layers) <= 1e-12


@pytest.mark.soak
def test_compiled_on_two_ranks() -> None:
    """Two new processes, which compile first; float64, 1e-12."""
    made = sacrifice(2, 100.0, compiled_results, True, limit=120.0)
    assert max(made) <= 1e-12


def test_one_graph_with_a_ring_names_the_remedy() -> None:
    torch._dynamo.reset()
    model = torch.compile(model_of("llama", "ringfa3"), fullgraph=True, backend="aot_eager")
    with pytest.raises(RuntimeError, match=r"call torch.compile without fullgraph=True"):
        forward(model, plan_context([0, 5, 12]))
