"""The figures of a step's speed: FLOPs, MFU, HFU and the split of its time."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from train.config import Config, ModelConfig
from train.data.batches import Batch
from train.engine.time_split import CATEGORIES, TimeSplit
from train.model.flops import step_flops
from train.model.window import allowed_pairs

SPEEDS = (
    *("seconds", "tokens_per_s", "flops", "mfu", "hfu"),
    *(f"{category}_s" for category in CATEGORIES),
)

MEMORY = ("memory", "device_memory")  # bytes so far


def counts_of(batches: Iterable[Batch], model: ModelConfig) -> torch.Tensor:
    """Counts of this rank's batches, (4,) int64.

    They are: tokens with a label, ``n_bytes`` as in ``Batch``, tokens, (query, key) pairs of all
    layers.
    """
    counts = [
        [batch.n_valid, batch.n_bytes, len(batch.tokens), allowed_pairs(model, batch.plan)]
        for batch in batches
    ]
    return torch.tensor(counts, dtype=torch.int64, device="cpu").sum(0)


class Timing(NamedTuple):
    """The seconds of a step on ``world`` ranks; ``split`` is None on CPUs."""

    seconds: float
    world: int
    split: TimeSplit | None


def speed_of(
    config: Config, rows: int, tokens: int, pairs: int, timing: Timing
) -> dict[str, float]:
    """FLOPs of a step; on GPUs also ``mfu`` and ``hfu`` and the split of the time.

    ``mfu`` and ``hfu`` are shares of ``hardware.peak_tflops``. The split is of the period that
    ended when the step's loss was read. ``rows`` is the number of rows of the head; ``tokens`` and
    ``pairs`` are as in ``step_flops``.
    """
    flops = step_flops(config.model, config.memory, rows, tokens, pairs)
    if timing.split is None:
        return {"flops": flops.model}
    shares = flops.utilisation(timing.seconds, timing.world, config.hardware.peak_tflops)
    split = {f"{category}_s": part for category, part in timing.split.seconds().items()}
    return {"flops": flops.model, **shares, **split}


def typical(lines: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Medians of the speeds of the steps with these lines, and their largest memory.

    Means of the steps would have the pauses of a single one. A key that a line lacks is left out.
    """
    found = {key: [line[key] for line in lines if key in line] for key in SPEEDS}
    medians = {key: statistics.median(values) for key, values in found.items() if values}
    memory = {key: max(line[key] for line in lines) for key in MEMORY if lines}
    return {**medians, **memory}


def own_seconds(line: dict[str, Any], cpu_seconds: float, cp: int) -> float:
    """The seconds of a step in which this rank does not wait for others.

    On a GPU: all but communication, and all but attention where ``cp`` ranks share a sample, since
    a ring waits inside of it. On a CPU: the seconds of the process on all its cores.
    """
    waiting = {"communication"} if cp == 1 else {"communication", "attention"}
    own = [line[f"{part}_s"] for part in CATEGORIES if part not in waiting and f"{part}_s" in line]
    return sum(own) if own else cpu_seconds
