"""Two steps of torchtitan's trainer on CPUs, in float32.

    torchrun --nproc-per-node N tests/support/titan_steps.py MODEL CP TP FILE

With CP 1 the layers compute dense attention over whole documents, the reference. Otherwise they
run examples/torchtitan_cp.py. FILE receives the losses, and the gradients of the first step.
torchtitan has no path for CPUs: what asks for a GPU is replaced here.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch_on_cpu  # noqa: F401  before torchtitan asks for the type of device
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from torchtitan.components import metrics
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import override
from torchtitan.models.common.attention import FlexAttention
from torchtitan.models.llama3 import config_registry as llama3
from torchtitan.models.qwen3 import config_registry as qwen3
from torchtitan.protocols.module import Module

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import torchtitan_cp

CONFIGS = {"llama3": llama3.llama3_debugmodel, "qwen3": qwen3.qwen3_debugmodel}
ROWS, LENGTH, LAYERS = 4, 128, 2
# The lengths of the documents in each row; torchtitan's rows do not share a document.
DOCUMENTS = ((40, 1, 23, 64), (128,), (1, 1, 126), (100, 28))


class Tokenizer(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **_: object) -> None:
        super().__init__()

    def encode(self, *_: object, **__: object) -> list[int]:
        return []

    def decode(self, *_: object, **__: object) -> str:
        return ""

    def get_vocab_size(self) -> int:
        return 0


class Data(BaseDataLoader):
    """Random tokens of packed documents; a rank has the rows of its data-parallel group."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config: Config, *, dp_world_size: int, dp_rank: int, **_: object) -> None:
        rows = ROWS // dp_world_size
        self.rows = slice(dp_rank * rows, (dp_rank + 1) * rows)

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        generator = torch.Generator().manual_seed(1)
        positions = torch.stack([torch.cat([torch.arange(n) for n in d]) for d in DOCUMENTS])
        while True:
            ids = torch.randint(2048, (ROWS, LENGTH + 1), generator=generator)
            labels = ids[:, 1:].clone()
            labels[:, ::7] = -100
            inputs = {"input": ids[self.rows, :-1], "positions": positions[self.rows]}
            yield inputs, labels[self.rows]

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class DenseAttention(Module):
    """Causal attention of all rows of DOCUMENTS, with a mask of every pair."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        pass

    def __init__(self, config: Config) -> None:
        super().__init__()

    def forward(
        self, q_BLNH: torch.Tensor, k_BLNH: torch.Tensor, v_BLNH: torch.Tensor,
        *, attention_masks: None, scale: float | None, enable_gqa: bool,
    ) -> torch.Tensor:  # fmt: skip
        q, k, v = (x.transpose(1, 2) for x in (q_BLNH, k_BLNH, v_BLNH))
        numbers = [torch.arange(len(d)).repeat_interleave(torch.tensor(d)) for d in DOCUMENTS]
        document = torch.stack(numbers)
        allowed = (document[:, :, None] == document[:, None]).tril()[:, None]
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=allowed, scale=scale, enable_gqa=enable_gqa
        )
        return out.transpose(1, 2)


@override(target=FlexAttention.Config)
def dense(given: FlexAttention.Config) -> DenseAttention.Config:
    return DenseAttention.Config(sharding_config=given.sharding_config)


def config_of(model: str, cp: int, tp: int) -> Any:
    config = CONFIGS[model]()
    config.tokenizer, config.dataloader = Tokenizer.Config(), Data.Config()
    config.validator.enable = config.checkpoint.enable = False
    config.model_spec.model.layers = config.model_spec.model.layers[:LAYERS]
    training, parallelism = config.training, config.parallelism
    training.local_batch_size = ROWS * cp * tp // int(os.environ["WORLD_SIZE"])
    training.seq_len, training.steps, training.disable_cuda_graphs = LENGTH, 2, True
    training.mixed_precision_param, training.max_norm = "float32", 1e9
    parallelism.context_parallel_degree, parallelism.spmd_backend = cp, "full_dtensor"
    parallelism.tensor_parallel_degree = tp
    if cp == 1:
        config.override.imports.append(f"{__name__}.dense")
    else:
        torchtitan_cp.plug_in(config)
    return config


def whole(x: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor, of all ranks' parts."""
    return (x.full_tensor() if isinstance(x, DTensor) else x).clone()


def steps_of(config: Any) -> dict[str, torch.Tensor]:
    """The loss of both steps, and the gradients of the first, whole."""
    trainer = config.build()
    (model,) = trainer.model_parts
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():  # the same for any number of ranks
            values = torch.randn(p.shape, generator=generator) * 0.05 + (p.dim() == 1)
            p.copy_(distribute_tensor(values, p.device_mesh, p.placements))
    for module in model.modules():
        if isinstance(module, FSDPModule):  # gloo has no other reduction
            module.set_force_sum_reduction_for_comms(True)
    found: dict[str, torch.Tensor] = {}

    run = trainer.forward_backward_step

    def noted(**batch: Any) -> torch.Tensor:
        loss = run(**batch)
        found[f"loss {trainer.step}"] = whole(loss.detach())
        return loss

    trainer.forward_backward_step = noted
    trainer.metrics_processor.log = lambda *_, **__: None
    batches = trainer.batch_generator(trainer.dataloader)
    for trainer.step in (1, 2):
        trainer.train_step(batches)
        if trainer.step == 1:
            for name, p in model.named_parameters():
                found[name] = whole(p.grad)
    trainer.close()
    return found


def main() -> None:
    model, cp, tp, file = sys.argv[1:]
    stats = metrics.DeviceMemStats(*[0] * len(metrics.DeviceMemStats._fields))
    monitor = SimpleNamespace(
        device_name="cpu", get_peak_stats=lambda: stats, reset_peak_stats=lambda: None
    )
    metrics.build_device_memory_monitor = lambda: monitor
    results = steps_of(config_of(model, int(cp), int(tp)))
    if dist.get_rank() == 0:
        torch.save(results, file)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
