"""Tiny random encoder-decoder models of transformers."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import transformers

import ringfa3.hf

ringfa3.hf.register()

BART: dict[str, Any] = {
    "vocab_size": 97, "d_model": 24, "encoder_layers": 1, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 2, "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32, "max_position_embeddings": 64, "init_std": 0.3, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "forced_eos_token_id": None,
    "dropout": 0.0,
}  # fmt: skip
GEMMA = {
    "vocab_size": 97, "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 4,
    "attn_logit_softcapping": None, "final_logit_softcapping": None, "dropout_rate": 0.0,
    "query_pre_attn_scalar": 8, "initializer_range": 0.3,
}  # fmt: skip
MOONSHINE = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "encoder_num_hidden_layers": 1,
    "decoder_num_hidden_layers": 2, "encoder_num_attention_heads": 4, "pad_token_id": 0,
    "decoder_num_attention_heads": 4, "initializer_range": 0.3, "bos_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip
T5 = {"vocab_size": 97, "d_model": 24, "d_ff": 32, "num_layers": 1, "num_heads": 2, "d_kv": 8}
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {  # by class: config
    "BartForConditionalGeneration": ("BartConfig", BART),
    "MarianMTModel": ("MarianConfig", BART),
    **{
        f"{name}ForConditionalGeneration": (f"{name}Config", BART)
        for name in ("M2M100", "MBart", "Pegasus", "Blenderbot", "BlenderbotSmall", "PLBart")
    },
    "T5GemmaForConditionalGeneration": (
        "T5GemmaConfig",
        {"encoder": GEMMA, "decoder": GEMMA, "vocab_size": 97, **IDS},
    ),
    "T5ForConditionalGeneration": ("T5Config", T5),
    "MvpForConditionalGeneration": ("MvpConfig", BART),
    "WhisperForConditionalGeneration": ("WhisperConfig", BART),
    "MoonshineForConditionalGeneration": ("MoonshineConfig", MOONSHINE),
}


@lru_cache(None)
def model_of(name: str, attention: str) -> Any:
    """The same for each test, with the same weights for every implementation."""
    return new_model(name, attention)


def new_model(name: str, attention: str, **changes: Any) -> Any:
    config_class, settings = MODELS[name]
    config = getattr(transformers, config_class)(**{**settings, **changes})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = getattr(transformers, name)._from_config(config, attn_implementation=attention)
    return model.double().eval()


def reference_of(name: str) -> str:
    return "eager" if name.startswith("T5") else "sdpa"
