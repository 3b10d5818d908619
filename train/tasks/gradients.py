"""The gradients of an optimiser step, and its figures over all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from train.config import Config
from train.data.batches import Batch
from train.data.position_buckets import mean_by_bucket, n_buckets, sum_by_bucket
from train.data.samples import IGNORED
from train.engine.engine import Engine
from train.engine.parallel import ParallelLayout, sum_over_ranks
from train.engine.spike_filter import SpikeFilter
from train.engine.time_split import TimeSplit
from train.log.speed import counts_of


@dataclass(frozen=True)
class StepFigures:
    """A step before its update, over all ranks.

    ``loss`` is in nats per token with a label. ``nats_per_byte`` is the same sum over the bytes of
    the labels, NaN without any. ``grad_norm`` is the norm before clipping. ``skip_votes`` is the
    number of ranks whose spike filter skips the update. ``tokens`` and ``pairs`` are as in
    ``step_flops``; ``loss_by_bucket`` is in nats per token, NaN for a bucket without tokens.
    """

    loss: float
    nats_per_byte: float
    grad_norm: float
    skip_votes: int
    tokens: int
    pairs: int
    loss_by_bucket: list[float]


def compute_gradients(
    engine: Engine,
    batches: list[Batch],
    config: Config,
    parallel: ParallelLayout,
    spike_filter: SpikeFilter,
    times: TimeSplit | None,
    meanwhile: Callable[[], None],
) -> StepFigures:
    """Compute, reduce and clip the gradients of the micro-batches of this rank.

    The loss is the sum of all token losses over N, the number of valid tokens in all ranks'
    micro-batches. An engine averages gradients over W ranks, hence the factor W / N. ``times`` ends
    a period and begins the next where the host waits. ``meanwhile`` runs after the first
    micro-batch is issued, concurrently with the device. Every rank must call this.
    """
    counts = sum_over_ranks(parallel, counts_of(batches, config.model))
    n_valid = counts[0].clamp(min=1)
    scale = parallel.world / n_valid.float()
    buckets = n_buckets(config.data.seq_len)
    sums = torch.zeros(2, buckets, dtype=torch.float64, device=parallel.device)
    for number, on_host in enumerate(batches, start=1):
        batch = on_host.to(parallel.device)
        losses = engine.backward(batch, scale, last=number == len(batches))
        if number == 1:
            meanwhile()
        sums[0] += sum_by_bucket(losses, batch.buckets, buckets)
        sums[1] += sum_by_bucket((batch.labels != IGNORED).float(), batch.buckets, buckets)
    norm = engine.grad_norm(float("inf") if config.optim.clip is None else config.optim.clip)
    sums = sum_over_ranks(parallel, sums)
    figures = torch.stack([sums[0].sum() / n_valid, norm.double()])
    skip_votes = sum_over_ranks(parallel, spike_filter.should_skip(figures))
    results = torch.cat([figures, skip_votes[None], counts, sums.flatten()])
    if times is not None:
        times.end()
    # The host waits for the device only here. It must not issue the update earlier: a stop during
    # the step saves the weights before the update.
    loss, grad_norm, *rest = results.tolist()
    if times is not None:  # the device has reached `end`
        times.begin()
    skip_votes, valid, n_bytes, tokens, pairs = (round(count) for count in rest[:5])
    losses, counted = rest[5 : 5 + buckets], [round(n) for n in rest[5 + buckets :]]
    return StepFigures(
        loss=loss,
        nats_per_byte=loss * valid / n_bytes if n_bytes else math.nan,
        grad_norm=grad_norm,
        skip_votes=skip_votes,
        tokens=tokens,
        pairs=pairs,
        loss_by_bucket=mean_by_bucket(losses, counted),
    )
