"""Names of a model's tensors in transformers and here, and their shapes."""

from __future__ import annotations

import re

from train.config import ModelConfig

WHOLE = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
IN_BLOCK = {
    "attention_norm": "input_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}


def hf_name(name: str) -> str:
    """The name in transformers of the parameter ``name`` of our ``Transformer``."""
    if name in WHOLE:
        return WHOLE[name]
    found = re.fullmatch(r"blocks\.(\d+)\.(.+)\.(weight|bias)", name)
    if found is None:
        raise ValueError(f"{name} is not a parameter of a Transformer")
    block, module, suffix = found.groups()
    return f"model.layers.{block}.{IN_BLOCK[module]}.{suffix}"


def shapes(model: ModelConfig, rows: int) -> dict[str, tuple[int, ...]]:
    """The shape of every parameter of a ``Transformer`` of ``model``, by its name here.

    ``rows`` is the number of rows of embedding and head.
    """
    width = model.resolved_head_dim()
    q, k = model.n_heads * width, model.n_kv_heads * width
    found: dict[str, tuple[int, ...]] = {"embedding.weight": (rows, model.dim)}
    for number in range(model.n_layers):
        block: dict[str, tuple[int, ...]] = {"attention_norm.weight": (model.dim,)}
        for name, height in (("wq", q), ("wk", k), ("wv", k)):
            block[f"attention.{name}.weight"] = (height, model.dim)
            if model.qkv_bias:
                block[f"attention.{name}.bias"] = (height,)
        block["attention.wo.weight"] = (model.dim, q)
        if model.qk_norm:
            block |= {f"attention.{name}_norm.weight": (width,) for name in "qk"}
        block["mlp_norm.weight"] = (model.dim,)
        block |= {f"mlp.{name}.weight": (model.ffn_dim, model.dim) for name in ("gate", "up")}
        block["mlp.down.weight"] = (model.dim, model.ffn_dim)
        found |= {f"blocks.{number}.{name}": shape for name, shape in block.items()}
    found["norm.weight"] = (model.dim,)
    if not model.tied_embeddings:
        found["output.weight"] = (rows, model.dim)
    return found
