"""Nats per byte on held-out documents, and how the loss falls with the position."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from train.batches import Batch, ahead, make_batch
from train.config import Config
from train.loss import n_buckets, sum_by_bucket
from train.model import LanguageModel
from train.parallel import Mesh, sum_over_ranks
from train.samples import IGNORED, evaluation_documents, evaluation_samples, pack
from train.shards import Documents


@dataclass(frozen=True)
class Evaluation:
    """Totals over all ranks; ``bucket_losses`` and ``bucket_tokens`` split them by position."""

    n_bytes: int
    bucket_losses: list[float]
    bucket_tokens: list[int]

    @property
    def tokens(self) -> int:
        """Predicted tokens: all of the documents but their BOS."""
        return sum(self.bucket_tokens)

    @property
    def nats_per_byte(self) -> float:
        """Negative log likelihood of the documents over their UTF-8 bytes."""
        return sum(self.bucket_losses) / self.n_bytes

    @property
    def loss_by_bucket(self) -> list[float]:
        """Nats per token in each bucket, NaN where it holds none."""
        return mean_by_bucket(self.bucket_losses, self.bucket_tokens)


def mean_by_bucket(losses: list[float], tokens: list[int]) -> list[float]:
    """``losses / tokens`` of each bucket, NaN where it holds no token."""
    return [loss / n if n else math.nan for loss, n in zip(losses, tokens, strict=True)]


@torch.no_grad()
def evaluate(
    model: LanguageModel,
    documents: Documents,
    config: Config,
    mesh: Mesh,
    max_bytes: int | None,
    window_size: tuple[int, int] = (-1, -1),
) -> Evaluation:
    """Predict every token of the first documents that reach ``max_bytes`` bytes, or of all.

    Documents are read in windows of ``data.piece_len`` tokens (``data.seq_len`` where it is null):
    what the model was trained on. Every rank takes part and gets the same totals.
    ``window_size`` (0, 0) lets each token attend to itself alone.
    """
    seq_len = config.data.seq_len
    chosen = evaluation_documents(documents, max_bytes)
    samples = evaluation_samples(documents, chosen, seq_len, config.data.piece_len or seq_len)
    own = samples[mesh.dp_rank :: mesh.dp]
    buckets = n_buckets(seq_len)
    totals = torch.zeros(2, buckets, dtype=torch.float64, device=mesh.device)

    def make(index: int) -> Batch:
        sample = pack(documents, own[index])
        return make_batch(sample, mesh, config.parallel.layout, window_size)

    for batch in ahead(make, 0, len(own)):
        here = batch.to(mesh.device)
        losses = model(here)
        valid = (here.labels != IGNORED).float()
        totals[0] += sum_by_bucket(losses, here.buckets, buckets)
        totals[1] += sum_by_bucket(valid, here.buckets, buckets)
    losses_and_tokens = sum_over_ranks(mesh, totals).tolist()
    return Evaluation(
        n_bytes=int(documents.n_bytes[chosen].sum()),
        bucket_losses=losses_and_tokens[0],
        bucket_tokens=[round(tokens) for tokens in losses_and_tokens[1]],
    )
