"""Under a ring a model is right or refused by name: whatever mixes tokens must be attention."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn

from ringfa3 import ContextPlan, plan_context
from tests.support.hf_models import SIZES, model_of, results, tokens, worst_difference
from tests.support.ranks import Ranks, sacrifice

MIXED = ["linear_attention", "full_attention"]
LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
           "shared_expert_intermediate_size": 16}  # fmt: skip
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 12, "mamba_d_state": 8, "mamba_n_groups": 1}
HYBRIDS: dict[str, tuple[str, dict[str, Any], str]] = {  # config, changes, what is named
    "Qwen3-Next": (
        "Qwen3NextConfig",
        {**LINEAR, **EXPERTS, "head_dim": 8, "layer_types": MIXED},
        "model.layers.0.linear_attn (Qwen3NextGatedDeltaNet) mixes tokens",
    ),
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
        "BartAttention gets positions that do not come from position_ids",
    ),
    "attention of its own": (
        "OpenAIGPTConfig",
        {},
        "transformer.h.0.attn (Attention) mixes tokens",
    ),
    "balance of experts": (
        "MixtralConfig",
        {"num_local_experts": 2, "output_router_logits": True},
        "its output aux_loss of shape () is one of all tokens",
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
    """In a model that passed before, the changed module is a new one and has to pass itself."""
    model = model_of("llama", "ringfa3")
    model.model.layers[1].mlp = mixer(model.model.layers[1].mlp)
    with pytest.raises(ValueError, match=rf"model.layers.1.mlp \({mixer.__name__}\) mixes"):
        forward(model, plan_context(12))


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


def test_a_loss_of_the_model_is_refused() -> None:
    plan, model = plan_context([0, 5, 12]), model_of("llama", "ringfa3")
    labels = plan.shard(tokens(1, 12), 1)
    with pytest.raises(ValueError, match=r"labels beside ringfa3_plan.*shift_labels"):
        forward(model, plan, labels=labels)
    assert forward(model, plan, labels=labels, shift_labels=labels).shape == (1, 12, 97)
    with pytest.raises(ValueError, match="output_router_logits=True beside ringfa3_plan"):
        forward(model, plan, output_router_logits=True)


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
