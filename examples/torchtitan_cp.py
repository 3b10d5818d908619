"""torchtitan with RingFA3 as its context parallelism: packed documents under FSDP2.

    torchrun --nproc-per-node 8 examples/torchtitan_cp.py --module llama3 --config llama3_8b \
        --training.disable_cuda_graphs --parallelism.context_parallel_degree 8 \
        --training.local_batch_size 1 --training.seq_len 131072

The arguments are those of torchtitan 0.3. With PyTorch 2.13 add --parallelism.spmd_backend
full_dtensor, because its FSDP2 refuses the weights of the default. Documents begin where the data
loader sets `positions` to 0. Without RingFA3, torchtitan gathers all keys and values on every rank
before attention.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torchtitan import trainer as titan
from torchtitan.components import validate
from torchtitan.config import ConfigManager, override
from torchtitan.models.common.attention import FlexAttention
from torchtitan.protocols.module import Module
from torchtitan.protocols.sharding import LocalMapConfig
from torchtitan.tools.logging import init_logger

from ringfa3 import ContextPlan, plan_context, ring_attn_func

MODELS = ("llama3", "qwen3")  # every layer is causal attention over documents; tested


class RingAttention(Module):
    """The inner attention of a layer. q, k and v are the tokens of this rank, (1, t, h, d)."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        pass

    def __init__(self, config: Config) -> None:
        super().__init__()

    def forward(
        self,
        q_BLNH: torch.Tensor,  # the names that torchtitan's sharding declares
        k_BLNH: torch.Tensor,
        v_BLNH: torch.Tensor,
        *,
        attention_masks: ContextPlan,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        q, k, v = q_BLNH[0], k_BLNH[0], v_BLNH[0]
        return ring_attn_func(q, k, v, attention_masks, softmax_scale=scale)[None]


@override(target=FlexAttention.Config)
def ring_attention(given: FlexAttention.Config) -> RingAttention.Config:
    """Replaces FlexAttention, the default. K and V stay sharded: the ring exchanges them."""
    sharded = given.sharding_config.in_dst_shardings["q_BLNH"]
    layouts = dict.fromkeys(("q_BLNH", "k_BLNH", "v_BLNH"), sharded)
    sharding = dataclasses.replace(
        given.sharding_config,
        in_src_shardings=layouts,
        in_dst_shardings=layouts,
        local_map=LocalMapConfig(in_grad_placements=(sharded,) * 3),
    )
    return RingAttention.Config(sharding_config=sharding)


def shard_input(
    inputs: torch.Tensor,
    labels: torch.Tensor,
    extra: dict[str, Any],
    cp_mesh: DeviceMesh,
    *_: object,
) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """In place of torchtitan's `prepare_context_parallel_input`: this rank's tokens, (1, t).

    inputs, labels, extra["positions"]: (batch, seq_len), the same on all ranks of the CP group.
    The rows of a batch are documents, too. The plan takes the place of the attention masks.
    """
    starts = extra["positions"] == 0
    starts[:, 0] = True
    cumulative = [*starts.flatten().nonzero().flatten().tolist(), inputs.numel()]
    plan = plan_context(cumulative, group=cp_mesh)
    inputs, labels, positions = (
        plan.shard(x.flatten())[None] for x in (inputs, labels, extra["positions"])
    )
    return inputs, labels, {**extra, "positions": positions, "attention_masks": plan}


def plug_in(config: titan.Trainer.Config) -> None:
    """Makes RingFA3 the context parallelism of a run. Raises ValueError: it would not be exact."""
    spec, parallelism = config.model_spec, config.parallelism
    if spec.name not in MODELS:
        raise ValueError(f"{spec.name}: this example is tested with {', '.join(MODELS)} only")
    if parallelism.context_parallel_degree < 2 or parallelism.spmd_backend == "partial_dtensor":
        raise ValueError(
            f"context_parallel_degree={parallelism.context_parallel_degree}, "
            f"spmd_backend={parallelism.spmd_backend}: use at least 2, and "
            "spmd_types or full_dtensor"
        )
    if not config.training.disable_cuda_graphs:
        raise ValueError("every batch has a plan of its own: add --training.disable_cuda_graphs")
    config.override.imports.append(f"{__name__}.{ring_attention.__name__}")
    for module in (titan, validate):  # both import it by name
        module.prepare_context_parallel_input = shard_input


def main() -> None:
    init_logger()
    config = ConfigManager().parse_args()
    plug_in(config)
    trainer = config.build()
    try:
        trainer.train()
    finally:
        trainer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
