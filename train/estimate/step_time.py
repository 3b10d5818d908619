"""Seconds of a step on GPUs, by category of work, from measured speeds of kernels and links."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from train.config import Config, HardwareConfig
from train.estimate.job import Job, UnpredictableError, parameters
from train.estimate.memory import FULL, HALF, offloaded_bytes
from train.model.flops import (
    AGAIN_PER_PAIR,
    BACKWARD_PER_PAIR,
    FORWARD_PER_PAIR,
    StepFlops,
    step_flops,
)

LONG = 8192  # tokens; attention on such documents reaches the speeds of ``hardware``
LONG_SHARE = 0.9  # share of all pairs that must lie in documents of that length
ADAM_BYTES = 28  # a fused AdamW reads 16 bytes of a parameter and writes 12


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step by category, and the FLOPs of all ranks in it."""

    seconds: dict[str, float]
    flops: StepFlops
    ranks: int
    peak_tflops: float

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return sum(self.seconds.values())

    @property
    def utilisation(self) -> dict[str, float]:
        """``mfu`` and ``hfu``."""
        return self.flops.utilisation(self.total, self.ranks, self.peak_tflops)


def estimate_time(job: Job) -> StepTime:
    """The time of a step: that of its slowest rank.

    Raises ``UnpredictableError``, also if ``hardware`` has no speed for the job: its documents are
    too short, its head dim is not listed, or its model is too narrow.
    """
    job.require_predictable()
    _require_long(job.cu_seqlens)
    config, hardware, memory = job.config, job.config.hardware, job.config.memory
    model, micro_batches = config.model, job.micro_batches
    pairs = sum(job.plan.work_per_rank) * model.n_layers * micro_batches * job.dp
    tokens = job.plan.total_tokens * micro_batches * job.dp
    flops = step_flops(model, memory, job.rows, tokens, pairs)
    forward, backward = _attention_speeds(config)
    slowest = max(job.plan.work_per_rank) * micro_batches
    each = slowest * model.n_heads * model.resolved_head_dim() * model.n_layers
    linear = (flops.linear + flops.repeated_linear) / job.gpus
    elements = job.tokens * micro_batches * model.dim * model.n_layers
    repeated = memory.recomputed(model.n_layers) / model.n_layers
    attention = FORWARD_PER_PAIR * each / forward
    attention *= 1 + repeated if memory.recompute == "full" else 1
    attention += (BACKWARD_PER_PAIR + AGAIN_PER_PAIR) * each / backward
    matmul = linear / _matmul_speed(config)
    of_element = hardware.compiled_bytes if job.compiled else hardware.elementwise_bytes
    # Recomputation repeats the forward of a block, which is a third of this work.
    elementwise = (1 + repeated / 3) * elements * of_element / (hardware.memory_gb_s * 1e9)
    block, embedding, head = parameters(model, job.rows)
    total = model.n_layers * block + embedding + head
    update = ADAM_BYTES * total / job.sharded_over / (hardware.memory_gb_s * 1e9)
    busy = attention + matmul + elementwise
    seconds = {
        "attention": attention,
        "matrix products": matmul,
        "elementwise": elementwise,
        "optimiser": update,
        "exposed communication": _exposed(job, hardware, total, embedding, busy),
        "exposed offload": _exposed_offload(job, hardware, busy),
    }
    return StepTime(seconds, flops, job.gpus, hardware.peak_tflops)


def _require_long(cu_seqlens: Sequence[int]) -> None:
    lengths = [stop - start for start, stop in pairwise(cu_seqlens)]
    pairs = sum(n * n for n in lengths)
    if sum(n * n for n in lengths if n >= LONG) < LONG_SHARE * pairs:
        raise UnpredictableError(
            f"the time of attention on documents below {LONG} tokens cannot be predicted"
        )


def _attention_speeds(config: Config) -> tuple[float, float]:
    """FLOP/s of the forward and of the backward, which computes the scores again."""
    hardware, head_dim = config.hardware, config.model.resolved_head_dim()
    if head_dim not in hardware.head_dims:
        raise UnpredictableError(
            f"the time of attention with head dim {head_dim} cannot be predicted: hardware="
            f"{hardware.name} has {', '.join(map(str, hardware.head_dims))}"
        )
    index = hardware.head_dims.index(head_dim)
    return hardware.forward_tflops[index] * 1e12, hardware.backward_tflops[index] * 1e12


def _matmul_speed(config: Config) -> float:
    """FLOP/s of matrix products; above the largest of ``widths`` they get no faster."""
    hardware, dim = config.hardware, config.model.dim
    if dim < hardware.widths[0]:
        raise UnpredictableError(
            f"the time of matrix products with model.dim={dim} cannot be predicted: hardware="
            f"{hardware.name} has widths {', '.join(map(str, hardware.widths))}"
        )
    return float(np.interp(dim, hardware.widths, hardware.matmul_tflops)) * 1e12


def _exposed(job: Job, hardware: HardwareConfig, total: int, embedding: int, busy: float) -> float:
    """Seconds of the collectives of weights and gradients that computation does not hide.

    The backward, two thirds of the computation, hides them. Per micro-batch fsdp2 gathers twice. It
    reduces as often, or with ``engine.reduce=step`` once. ddp all-reduces once per step.
    """
    engine = job.config.engine
    if engine.name == "ddp":
        return max(0.0, 2 * _collective(job, hardware, FULL * total, job.gpus) - 2 / 3 * busy)
    gathered = HALF * (total - embedding) + FULL * embedding
    reductions = 1 if engine.reduce == "step" else job.micro_batches
    seconds = 2 * job.micro_batches * _collective(job, hardware, gathered, job.sharded_over)
    seconds += reductions * _collective(job, hardware, FULL * total, job.sharded_over)
    if job.sharded_over < job.gpus:  # HSDP: hosts all-reduce the shards once per step
        shard = FULL * total / job.sharded_over
        hosts = job.gpus // job.sharded_over
        seconds += 2 * shard * (hosts - 1) / hosts / (hardware.network_gb_s * 1e9)
    return max(0.0, seconds - 2 / 3 * busy)


def _collective(job: Job, hardware: HardwareConfig, n_bytes: float, ranks: int) -> float:
    """Seconds of an all-gather or reduce-scatter of ``n_bytes`` over ``ranks`` ranks.

    Over several hosts NCCL gives each GPU's network card its share of the bytes.
    """
    speed = hardware.link_gb_s
    if ranks > job.ranks_per_host:
        speed = min(speed, hardware.network_gb_s * job.ranks_per_host)
    return n_bytes * (ranks - 1) / ranks / (speed * 1e9)


def _exposed_offload(job: Job, hardware: HardwareConfig, busy: float) -> float:
    """Seconds of the copies to the host and back that computation does not hide.

    A quarter of the computation hides the copies out, half of it the copies back.
    """
    one_way = offloaded_bytes(job) * job.micro_batches / (hardware.host_link_gb_s * 1e9)
    return max(0.0, one_way - busy / 4) + max(0.0, one_way - busy / 2)
