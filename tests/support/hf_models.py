"""Tiny random models of transformers, and how far two of them differ."""

from __future__ import annotations

import copy
import os
from functools import lru_cache
from typing import Any

import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import transformers as hf
from torch import nn

import ringfa3.hf

ringfa3.hf.register()

VOCABULARY = 97
WINDOW = 5
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
# The experts that compute in every dtype; transformers 4 has no others.
EXPERTS = {"experts_implementation": "eager"} if hf.__version__ >= "5" else {}
MIXED = ["sliding_attention", "full_attention"]
DEEPSEEK = {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 6,  # beside a head_dim of 12 of q and k
}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": WINDOW,
                              "max_window_layers": 1}),
    "qwen3": ("Qwen3Config", {"head_dim": 8}),
    "mistral": ("MistralConfig", {"sliding_window": WINDOW}),
    "phi3": ("Phi3Config", {}),
    "gemma3": ("Gemma3TextConfig", {"head_dim": 8, "sliding_window": WINDOW, "layer_types": MIXED,
                                    "query_pre_attn_scalar": 6}),
    "gpt-oss": ("GptOssConfig", {"head_dim": 8, "sliding_window": WINDOW, "layer_types": MIXED,
                                 "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3-moe": ("Qwen3MoeConfig", {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2,
                                     "moe_intermediate_size": 16}),
    "deepseek-v3": ("DeepseekV3Config", DEEPSEEK),
}  # fmt: skip


def config_of(name: str, **changes: Any) -> Any:
    kind, special = CONFIGS[name]
    return getattr(hf, kind)(**{**SIZES, **special, **changes})


def model_of(
    name: str, attention: str, dtype: torch.dtype | None = None, **changes: Any
) -> nn.Module:
    """The causal language model of a name, with the same weights for every implementation.

    dtype: default that of new tensors.
    """
    config = copy.deepcopy(config_of(name, **changes))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = hf.AutoModelForCausalLM.from_config(
            config, attn_implementation=attention, **EXPERTS
        )
    generator = torch.Generator().manual_seed(0)
    for which, parameter in model.named_parameters():
        values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        if parameter.dim() > 1:
            parameter.data = 0.2 * values
        elif which.endswith("sinks"):
            parameter.data = values
        else:  # norms, around their identity, and biases
            parameter.data = parameter.data.round() + 0.2 * values
    return model.to(dtype or torch.get_default_dtype()).eval()  # type: ignore[no-any-return]


def shared_model(name: str, attention: str, dtype: torch.dtype | None = None) -> nn.Module:
    """`model_of` for tests that change nothing but gradients."""
    return _shared_model(name, attention, dtype, torch.get_default_dtype())


@lru_cache(None)
def _shared_model(
    name: str, attention: str, dtype: torch.dtype | None, _default: torch.dtype
) -> nn.Module:
    """Models made in `tests.support.double` have other frequencies of RoPE than others."""
    return model_of(name, attention, dtype)


def tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    """Random ids, none of them the padding's."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCABULARY, shape, generator=generator)


Results = tuple[torch.Tensor, dict[str, torch.Tensor]]  # logits, gradients by parameter


def results(
    model: nn.Module, ids: torch.Tensor, rows: torch.Tensor | None = None, **inputs: Any
) -> Results:
    """The results of a random loss over the tokens where `rows` is True."""
    model.zero_grad()
    logits = model(ids, use_cache=False, **inputs).logits
    return backward(model, logits if rows is None else logits[rows])


def backward(model: nn.Module, logits: torch.Tensor) -> Results:
    """The results of a loss whose gradient is random, and the same for equal shapes of logits."""
    generator = torch.Generator().manual_seed(1)
    gradient = torch.randn(logits.shape, generator=generator, dtype=torch.float64)
    logits.backward(gradient.to(logits.dtype))
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return logits.detach(), grads


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference, relative to the largest number of b."""
    a, b = a.detach(), b.detach()
    return float((a - b).abs().max() / b.abs().max())


def worst_difference(a: Results, b: Results) -> float:
    """The largest `difference` of logits and of all gradients together."""
    assert a[1].keys() == b[1].keys()
    grads = [torch.cat([x[name].flatten() for name in a[1]]) for x in (a[1], b[1])]
    return max(difference(a[0], b[0]), difference(*grads))
