"""ring-flash-attn as an attention of transformers, like its own adapter, on FlashAttention-3.

Its adapter replaces a private function of transformers 4. This module registers the same attention
under a separate name. Ranks hold consecutive tokens. Each gathers the keys and values of all ranks
for its queries, `heads_k_stride` KV heads at a time. It is causal, without sinks or windows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface

from ringfa3 import ContextPlan
from ringfa3.bench.ring.peers import ring_flash_attn_functions
from ringfa3.custom_op import autocast_inputs

NAME = "ring_attention_of_the_peer"  # no name with "flash" in it: transformers replaces those
MODULE = "llama3_flash_attn_varlen"
FUNCTIONS = "llama3_flash_attn_varlen_func", "llama3_flash_attn_prepare_cu_seqlens"


def functions() -> list[Callable[..., Any]]:
    """The two functions of ring-flash-attn that `register` needs.

    Raises ImportError: ring-flash-attn is missing. LoadError: it or FlashAttention-3 does not load.
    """
    found = ring_flash_attn_functions(MODULE, *FUNCTIONS)
    if found is None:
        raise ImportError("ring-flash-attn is not installed: pip install --no-deps ring-flash-attn")
    return found


def register(plan: ContextPlan, device: torch.device, heads_k_stride: int | None = None) -> None:
    """Registers `attn_implementation=NAME` for the documents and the ranks of a plan.

    plan            its layout must be contiguous, with equally many tokens on each rank
    heads_k_stride  KV heads gathered at a time; None: all

    Raises ValueError, on every rank: the plan distributes tokens otherwise. Others as `functions`.
    """
    if plan.layout != "contiguous" or len(set(plan.tokens_per_rank)) > 1:
        raise ValueError(
            f"plan: layout {plan.layout!r}, {plan.tokens_per_rank} tokens on the ranks: it must be "
            '"contiguous", with as many tokens on each rank'
        )
    attend, prepare = functions()
    cumulative = torch.tensor(
        [0, *plan.lengths.cumsum().tolist()], dtype=torch.int32, device=device
    )
    cu_q, cu_k, longest_q, longest_k, keys = prepare(cumulative, True, plan.rank, plan.world)

    def attention_forward(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        """query (1, h, t, d), key and value (1, h_kv, t, d) to (1, t, h, d)."""
        # Under autocast RoPE makes q and k float32, for which there is no kernel.
        query, key, value = autocast_inputs(query, key, value)
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        out = attend(
            q, k, v, cu_q, cu_k, longest_q, longest_k,
            heads_k_stride=heads_k_stride or k.shape[1],
            local_k_slice=keys,
            softmax_scale=scaling,
            causal=True,
            group=plan.group,
        )  # fmt: skip
        return out[None], None

    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, lambda *_, **__: None)
