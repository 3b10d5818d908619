"""The input of the predictions: a job's shapes on one rank, and what cannot be predicted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from ringfa3 import plan_context
from ringfa3.planning.context_plan import ContextPlan
from train.compile_choice import compiles
from train.config import Config, ConfigError, ModelConfig
from train.hf.names import shapes

COVERED = (
    "predictions cover bfloat16 on GPUs under engine=ddp and engine=fsdp2, with "
    "data.packing=stream, layers without windows, and rings over the NVLink of a host"
)
STATISTIC_DIMS = (64, 128, 256)  # head dims of the kernels


class UnpredictableError(ConfigError):
    """An option whose memory or time cannot be predicted; the message names its key."""


@dataclass(frozen=True)
class Job:
    """A job: ``config`` on ``gpus`` GPUs, ``per_host`` of them on each host.

    Embedding and head have ``rows`` rows. ``cu_seqlens`` bounds the documents of the samples that a
    CP group shares in a micro-batch, each of ``config.data.seq_len`` tokens. ``here``: the job runs
    on this machine, so its compilers and its host memory count.
    """

    config: Config
    gpus: int
    per_host: int
    rows: int
    cu_seqlens: Sequence[int]
    here: bool

    @cached_property
    def plan(self) -> ContextPlan:
        """The plan of a micro-batch on the first rank of a CP group, which has the most tokens.

        Jobs with the same documents and as many ranks share it: ``plan_context`` caches plans.
        """
        parallel = self.config.parallel
        given = list(self.cu_seqlens), (0, parallel.cp), parallel.layout
        return plan_context(*given, kv_budget=parallel.kv_budget if parallel.cp > 1 else None)

    @property
    def tokens(self) -> int:
        """Tokens of the rank that has most."""
        return max(self.plan.tokens_per_rank)

    @property
    def micro_batches(self) -> int:
        """Micro-batches per step."""
        return self.config.accumulation_over(self.dp)

    @property
    def dp(self) -> int:
        """Number of data-parallel ranks."""
        return self.gpus // self.config.parallel.cp

    @property
    def compiled(self) -> bool:
        """Whether blocks are compiled, on a GPU."""
        return compiles(self.config, cuda=True, here=self.here)

    @property
    def ranks_per_host(self) -> int:
        """Number of ranks on a host."""
        return min(self.gpus, self.per_host)

    @property
    def sharded_over(self) -> int:
        """Number of ranks over which a weight is sharded."""
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
    """Numbers of elements: a block, the embedding, and an untied head (0 if it is tied)."""
    sizes = {name: math.prod(shape) for name, shape in shapes(model, rows).items()}
    block = sum(size for name, size in sizes.items() if name.startswith("blocks.0."))
    return block, sizes["embedding.weight"], sizes.get("output.weight", 0)
