"""A row of the results of `python -m ringfa3.bench cluster`."""

from __future__ import annotations

from dataclasses import dataclass

from ringfa3.bench.cluster.time_model import Prediction


@dataclass(frozen=True, kw_only=True)
class Row(Prediction):
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
    worst: float
