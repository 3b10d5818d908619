"""A row of the results of `python -m ringfa3.bench cluster`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """A strategy on a number of GPUs: means over the batches.

    tokens_per_gpu  of the mix
    documents       of a batch
    longest         tokens of the longest document of all batches
    worst           the largest `step` of a batch

    The others as in `Prediction`, times and bytes of all layers; buffers serve one layer after the
    other. `limit` is that of most batches.
    """

    mix: str
    gpus: int
    strategy: str
    tokens_per_gpu: int
    documents: float
    longest: int
    step: float
    worst: float
    forward: float
    backward: float
    ms: float
    ideal_ms: float
    parts: dict[str, list[float]]
    limit: str
    work: float
    tokens: float
    inflation: float
    nvlink_gb: float
    nic_gb: float
    held_gb: float
