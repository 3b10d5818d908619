"""A job as the predictions see it: its shapes on one rank, and what cannot be predicted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from ringfa3 import plan_context
from ringfa3.planning.context_plan import ContextPlan
from train.config import Config, ConfigError, ModelConfig
from train.hf.names import shapes

COVERED = (
    "predictions cover bfloat16 on GPUs under engine=ddp and engine=fsdp2, with "
    "train.compile=none, data.packing=stream, layers without windows, and rings over the NVLink "
    "of a host"
)
STATISTIC_DIMS = (64, 128, 256)  # head dims of the kernels


class UnpredictableError(ConfigError):
    """An option whose memory or time no arithmetic here describes; the message names its key."""


@dataclass(frozen=True)
class Job:
    """``config`` on ``gpus`` GPUs, ``per_host`` on each host, with ``rows`` rows of embedding and
    head.

    ``cu_seqlens`` bounds the documents of a sample, all of ``config.data.seq_len`` tokens.
    """

    config: Config
    gpus: int
    per_host: int
    rows: int
    cu_seqlens: Sequence[int]

    @cached_property
    def plan(self) -> ContextPlan:
        """The plan of a sample on the first rank of its group, which has the most tokens.

        Jobs with the same documents on as many ranks share it: ``plan_context`` keeps plans.
        """
        parallel = self.config.parallel
        return plan_context(list(self.cu_seqlens), (0, parallel.cp), parallel.layout)

    @property
    def tokens(self) -> int:
        """Tokens of a rank, the most of any."""
        return max(self.plan.tokens_per_rank)

    @property
    def samples(self) -> int:
        """Samples of a data-parallel rank in a step."""
        return self.config.train.accumulation_over(self.dp)

    @property
    def dp(self) -> int:
        """Data-parallel ranks."""
        return self.gpus // self.config.parallel.cp

    @property
    def ranks_per_host(self) -> int:
        """Ranks of a host."""
        return min(self.gpus, self.per_host)

    @property
    def sharded_over(self) -> int:
        """Ranks that share a weight."""
        engine = self.config.engine
        if engine.name == "ddp":
            return 1
        return self.gpus if engine.shard == "all" else self.ranks_per_host

    def require_predictable(self) -> None:
        """Raise ``UnpredictableError`` for the first option that no prediction covers."""
        config, cp = self.config, self.config.parallel.cp
        head_dim = config.model.resolved_head_dim()
        refused = {
            f"engine={config.engine.name}": config.engine.name == "deepspeed",
            f"train.attention={config.train.attention}": config.train.attention != "ringfa3",
            f"train.compile={config.train.compile}": config.train.compile != "none",
            "train.deterministic=true": config.train.deterministic,
            f"model.windows={config.model.windows}": config.model.windows is not None,
            f"data.packing={config.data.packing}": config.data.packing != "stream",
            f"train.precision={config.train.precision}": config.train.precision == "float32",
            f"model.attention_precision={config.model.attention_precision}": (
                config.model.attention_precision != "native"
            ),
            f"parallel.device={config.parallel.device}": config.parallel.device == "cpu",
            f"parallel.transport={config.parallel.transport}": (
                cp > 1 and config.parallel.transport not in ("auto", "symmetric")
            ),
            f"parallel.cp={cp} on hosts of {self.ranks_per_host} GPUs": bool(
                self.ranks_per_host % cp
            ),
            f"a head dim of {head_dim}": head_dim not in STATISTIC_DIMS,
        }
        for option, is_refused in refused.items():
            if is_refused:
                raise UnpredictableError(f"{option} cannot be predicted; {COVERED}")


def parameters(model: ModelConfig, rows: int) -> tuple[int, int, int]:
    """Elements of a block, of the embedding, and of an untied head (0 if it is tied)."""
    sizes = {name: math.prod(shape) for name, shape in shapes(model, rows).items()}
    block = sum(size for name, size in sizes.items() if name.startswith("blocks.0."))
    return block, sizes["embedding.weight"], sizes.get("output.weight", 0)
