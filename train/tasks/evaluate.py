"""Nats per byte on held-out documents, and the loss by position."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch

from train.config import Config
from train.data.batches import Batch, make_batch, prefetch
from train.data.documents import Documents
from train.data.position_buckets import mean_by_bucket, n_buckets, sum_by_bucket
from train.data.samples import IGNORED, evaluation_documents, evaluation_samples, pack
from train.engine.parallel import ParallelLayout, sum_over_ranks
from train.model.transformer import LanguageModel


@dataclass(frozen=True)
class Evaluation:
    """Totals over all ranks; ``bucket_losses`` and ``bucket_tokens`` split them by position.

    ``nats_per_byte_by_source`` maps the name of each source to the result on its documents.
    """

    n_bytes: int
    bucket_losses: list[float]
    bucket_tokens: list[int]
    nats_per_byte_by_source: dict[str, float]

    @property
    def tokens(self) -> int:
        """Number of predicted tokens: all except the BOS of each document."""
        return sum(self.bucket_tokens)

    @property
    def nats_per_byte(self) -> float:
        """Negative log likelihood of the documents, divided by their UTF-8 bytes."""
        return sum(self.bucket_losses) / self.n_bytes

    @property
    def by_source(self) -> dict[str, dict[str, float]]:
        """The record's entry with the result of each source; empty for a single source."""
        several = len(self.nats_per_byte_by_source) > 1
        return {"nats_per_byte_by_source": self.nats_per_byte_by_source} if several else {}

    @property
    def loss_by_bucket(self) -> list[float]:
        """Nats per token in each bucket, NaN for a bucket without tokens."""
        return mean_by_bucket(self.bucket_losses, self.bucket_tokens)


@torch.no_grad()
def evaluate(
    model: LanguageModel,
    documents: Documents,
    config: Config,
    parallel: ParallelLayout,
    max_bytes: int | None,
    window_size: tuple[int, int] = (-1, -1),
) -> Evaluation:
    """Predict every token of the first documents that sum to ``max_bytes`` bytes; None means all.

    Documents are read in windows of ``data.piece_len`` tokens (``data.seq_len`` if it is null), as
    in training. Every rank must call this, and gets the same totals. With ``window_size`` (0, 0)
    each token attends to itself alone.
    """
    seq_len = config.data.seq_len
    chosen = evaluation_documents(documents, max_bytes)
    by_source = [
        [document for document in chosen if first <= document < stop]
        for first, stop in pairwise(documents.bounds)
    ]
    window = config.data.piece_len or seq_len
    samples = [
        (source, pieces)
        for source, numbers in enumerate(by_source)
        for pieces in evaluation_samples(documents, numbers, seq_len, window)
    ]
    own = samples[parallel.dp_rank :: parallel.dp]
    buckets = n_buckets(seq_len)
    totals = torch.zeros(len(by_source), 2, buckets, dtype=torch.float64, device=parallel.device)

    def make(index: int) -> Batch:
        sample = pack(documents, own[index][1])
        return make_batch(sample, parallel.cp_group, config.parallel.layout, window_size)

    for (source, _), batch in zip(own, prefetch(make, 0, len(own)), strict=True):
        here = batch.to(parallel.device)
        losses = model(here)
        valid = (here.labels != IGNORED).float()
        totals[source, 0] += sum_by_bucket(losses, here.buckets, buckets)
        totals[source, 1] += sum_by_bucket(valid, here.buckets, buckets)
    totals = sum_over_ranks(parallel, totals).cpu()
    losses, tokens = totals.sum(0).tolist()
    return Evaluation(
        n_bytes=int(documents.n_bytes[chosen].sum()),
        bucket_losses=losses,
        bucket_tokens=[round(n) for n in tokens],
        nats_per_byte_by_source={
            name: float(total[0].sum()) / int(documents.n_bytes[numbers].sum())
            for name, numbers, total in zip(documents.sources, by_source, totals, strict=True)
        },
    )
