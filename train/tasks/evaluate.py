"""The loss on held-out documents, in nats per byte, and by position in nats per token."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from train.config import Config
from train.data.batches import Batch, make_batch, prefetch
from train.data.documents import Documents
from train.data.position_buckets import mean_by_bucket, n_buckets, sum_by_bucket
from train.data.samples import (
    IGNORED,
    AtLeast,
    Budget,
    evaluation_documents,
    evaluation_samples,
    pack,
)
from train.engine.parallel import ParallelLayout, sum_over_ranks
from train.log.units import all_units
from train.sections.training import AUTO, AUTO_BYTES


@dataclass(frozen=True)
class Evaluation:
    """Totals over all ranks; ``bucket_losses`` and ``bucket_tokens`` split them by position.

    ``nats_per_byte_by_source`` maps the name of each source to the result on its documents.
    ``last_loss`` is the sum over the ``last_tokens`` predicted tokens at the last
    ``train.final_eval_last`` positions of a full window.
    """

    n_bytes: int
    bucket_losses: list[float]
    bucket_tokens: list[int]
    nats_per_byte_by_source: dict[str, float]
    last_loss: float = 0.0
    last_tokens: int = 0

    @property
    def tokens(self) -> int:
        """Number of predicted tokens: all except the BOS of each document."""
        return sum(self.bucket_tokens)

    @property
    def nats_per_token(self) -> float:
        """The mean loss of the predicted tokens; 0 without any."""
        return sum(self.bucket_losses) / max(1, self.tokens)

    @property
    def nats_per_byte(self) -> float:
        """The loss of all documents in nats per byte, as ``train.log.units`` defines it."""
        return sum(self.bucket_losses) / self.n_bytes

    @property
    def units(self) -> dict[str, float]:
        """The record's entries with the loss in all units."""
        return all_units(self.nats_per_token, self.nats_per_byte)

    def record(self, step: int) -> dict[str, Any]:
        """The line of ``eval.jsonl`` after ``step`` optimiser steps."""
        counts = {"bytes": self.n_bytes, "tokens": self.tokens}
        return {"step": step, **self.units, **counts, **self.by_source}

    @property
    def by_source(self) -> dict[str, dict[str, float]]:
        """The record's entry with the result of each source; empty for a single source."""
        several = len(self.nats_per_byte_by_source) > 1
        return {"nats_per_byte_by_source": self.nats_per_byte_by_source} if several else {}

    @property
    def loss_by_bucket(self) -> list[float]:
        """Nats per token in each bucket, NaN for a bucket without tokens."""
        return mean_by_bucket(self.bucket_losses, self.bucket_tokens)


def budget_of(config: Config, key: str) -> Budget:
    """``train.eval_bytes`` or ``train.final_eval_bytes``, named without its section.

    ``auto`` covers four samples, and the longest document of a sample.
    """
    value = getattr(config.train, key)
    if value != AUTO:
        return value
    return AtLeast(AUTO_BYTES[key], 4 * config.data.seq_len, config.data.longest_document())


@torch.no_grad()
def evaluate(
    losses_of: Callable[[Batch], Tensor],
    documents: Documents,
    config: Config,
    parallel: ParallelLayout,
    budget: Budget,
    window_size: tuple[int, int] = (-1, -1),
    length: int | None = None,
) -> Evaluation:
    """Predict every token of the ``evaluation_documents`` of a budget.

    ``losses_of`` is a model or an engine's ``evaluate``. Documents are read in windows of
    ``data.max_doc_len`` tokens (``data.seq_len`` if it is null), as in training, or of ``length``.
    A CP group reads as many tokens at once as in training.
    Every rank must call this, calls ``losses_of`` equally often, and gets the same totals. With
    ``window_size`` (0, 0) each token attends only to itself.
    """
    seq_len, at_once = config.data.seq_len, config.samples_at_once()
    chosen = evaluation_documents(documents, budget)
    by_source = [
        [document for document in chosen if first <= document < stop]
        for first, stop in pairwise(documents.bounds)
    ]
    window = length or config.data.max_doc_len or seq_len
    first_of_last = window - (config.train.final_eval_last or 0)
    samples = [
        (source, slices)
        for source, numbers in enumerate(by_source)
        for slices in evaluation_samples(documents, numbers, at_once * seq_len, window)
    ]
    # In the last round some ranks may have no sample left. They repeat one and do not count it.
    rounds = math.ceil(len(samples) / parallel.dp)
    numbers = [number * parallel.dp + parallel.dp_rank for number in range(rounds)]
    own = [(*samples[min(n, len(samples) - 1)], n < len(samples)) for n in numbers]
    buckets = n_buckets(seq_len)
    # One row is for losses, one for tokens. The column after the buckets is for the last positions.
    shape = len(by_source), 2, buckets + 1
    totals = torch.zeros(shape, dtype=torch.float64, device=parallel.device)

    def make(index: int) -> Batch:
        sample = pack(documents, own[index][1])
        return make_batch(sample, parallel.cp_group, config.parallel.layout, window_size)

    for (source, _, counts), batch in zip(own, prefetch(make, 0, len(own)), strict=True):
        here = batch.to(parallel.device)
        losses = losses_of(here)
        if not counts:
            continue
        valid = (here.labels != IGNORED).float()
        is_last = here.positions >= first_of_last
        for row, values in enumerate((losses, valid)):
            totals[source, row, :-1] += sum_by_bucket(values, here.buckets, buckets)
            totals[source, row, -1] += torch.where(is_last, values.double(), 0).sum()
    totals = sum_over_ranks(parallel, totals).cpu()
    (*losses, last_loss), (*tokens, last_tokens) = totals.sum(0).tolist()
    return Evaluation(
        n_bytes=int(documents.n_bytes[chosen].sum()),
        bucket_losses=losses,
        bucket_tokens=[round(n) for n in tokens],
        nats_per_byte_by_source={
            name: float(total[0, :-1].sum()) / int(documents.n_bytes[of_source].sum())
            for name, of_source, total in zip(documents.sources, by_source, totals, strict=True)
        },
        last_loss=last_loss,
        last_tokens=round(last_tokens),
    )
