"""The gradients of an optimiser step, and its figures over all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from train.config import Config
from train.data.batches import Batch, make_batch
from train.data.documents import Documents
from train.data.position_buckets import mean_by_bucket, n_buckets, sum_by_bucket
from train.data.samples import IGNORED, DocumentSlice, pack
from train.engine.engine import Engine
from train.engine.parallel import ParallelLayout, sum_over_ranks
from train.engine.spike_filter import SpikeFilter
from train.engine.time_split import TimeSplit
from train.engine.train_state import TrainState
from train.log.metrics import device_memory, peak_memory
from train.log.speed import counts_of
from train.log.units import all_units

PRIMING_TOKENS = 256


@dataclass(frozen=True)
class StepFigures:
    """A step before its update, over all ranks.

    ``loss`` is in nats per token with a label. ``nats_per_byte`` is the same sum over the bytes of
    the labels, NaN without any. ``grad_norm`` is the norm before clipping. ``skip_votes`` is the
    number of ranks whose spike filter skips the update. ``tokens`` and ``pairs`` are as in
    ``step_flops``; ``loss_by_bucket`` is in nats per token, NaN for a bucket without tokens.
    ``rank_seconds`` are the seconds of each rank's own work in the step before, 0 if unknown.
    """

    loss: float
    nats_per_byte: float
    grad_norm: float
    skip_votes: int
    tokens: int
    pairs: int
    loss_by_bucket: list[float]
    rank_seconds: list[float]

    def record(
        self, state: TrainState, lr: float, seconds: float, device: torch.device
    ) -> dict[str, Any]:
        """The line of metrics of a step that took ``seconds`` and left ``state``."""
        record = {
            "step": state.step,
            **all_units(self.loss, self.nats_per_byte),
            "grad_norm": self.grad_norm,
            "lr": lr,
            "tokens_per_s": self.tokens / seconds,
            "memory": peak_memory(device),
            "device_memory": device_memory(device),
            "skipped": state.spike_filter.skipped,
        }
        if len(self.rank_seconds) > 1 and any(self.rank_seconds):
            record["rank_s"] = [round(own, 4) for own in self.rank_seconds]
            record["slowest_rank"] = self.rank_seconds.index(max(self.rank_seconds))
        return record


def prime(engine: Engine, documents: Documents, config: Config, parallel: ParallelLayout) -> None:
    """Run one backward pass and drop its gradients.

    DDP rebuilds its buckets after its first backward. This pass makes it do so before the first
    step of every run, so a resumed run sums in the same order as an uninterrupted one. The pass
    also opens connections and compiles kernels. Blocks run uncompiled here: no step could use
    graphs for so few tokens.
    """
    length = min(PRIMING_TOKENS, config.data.seq_len, int(documents.lengths[0]))
    sample = pack(documents, [DocumentSlice(0, 0, length)])
    batch = make_batch(sample, parallel.cp_group, config.parallel.layout)
    one = torch.ones((), dtype=torch.float32, device=parallel.device)
    with torch.compiler.set_stance("force_eager"):
        engine.backward(batch.to(parallel.device), one, last=True)
    engine.discard()


def compute_gradients(
    engine: Engine,
    batches: list[Batch],
    config: Config,
    parallel: ParallelLayout,
    spike_filter: SpikeFilter,
    times: TimeSplit | None,
    meanwhile: Callable[[], float],
) -> StepFigures:
    """Compute, reduce and clip the gradients of the micro-batches of this rank.

    The loss is the sum of all token losses over N, the number of valid tokens in all ranks'
    micro-batches. An engine averages gradients over W ranks, hence the factor W / N. ``times`` ends
    a period and begins the next where the host waits. ``meanwhile`` runs after the first
    micro-batch is issued, concurrently with the device; it returns the seconds of this rank's own
    work in the step before. Every rank must call this.
    """
    counts = sum_over_ranks(parallel, counts_of(batches, config.model))
    n_valid = counts[0].clamp(min=1)
    scale = parallel.world / n_valid.float()
    buckets = n_buckets(config.data.seq_len)
    # Losses and tokens by bucket, and an entry of each rank: their sum gathers these.
    shared = torch.zeros(2 * buckets + parallel.world, dtype=torch.float64, device=parallel.device)
    sums = shared[: 2 * buckets].view(2, buckets)
    for number, on_host in enumerate(batches, start=1):
        batch = on_host.to(parallel.device)
        losses = engine.backward(batch, scale, last=number == len(batches))
        if number == 1:
            shared[2 * buckets + parallel.rank] = meanwhile()
        sums[0] += sum_by_bucket(losses, batch.buckets, buckets)
        sums[1] += sum_by_bucket((batch.labels != IGNORED).float(), batch.buckets, buckets)
    norm = engine.grad_norm(float("inf") if config.optim.clip is None else config.optim.clip)
    shared = sum_over_ranks(parallel, shared)
    figures = torch.stack([shared[:buckets].sum() / n_valid, norm.double()])
    skip_votes = sum_over_ranks(parallel, spike_filter.should_skip(figures))
    results = torch.cat([figures, skip_votes[None], counts, shared])
    if times is not None:
        times.end()
    # The host waits for the device only here. It must not issue the update earlier: a stop during
    # the step saves the weights before the update.
    loss, grad_norm, *rest = results.tolist()
    if times is not None:  # the device has reached `end`
        times.begin()
    skip_votes, valid, n_bytes, tokens, pairs = (round(count) for count in rest[:5])
    losses, counted = rest[5 : 5 + buckets], rest[5 + buckets : 5 + 2 * buckets]
    return StepFigures(
        loss=loss,
        nats_per_byte=loss * valid / n_bytes if n_bytes else math.nan,
        grad_norm=grad_norm,
        skip_votes=skip_votes,
        tokens=tokens,
        pairs=pairs,
        loss_by_bucket=mean_by_bucket(losses, [round(n) for n in counted]),
        rank_seconds=rest[5 + 2 * buckets :],
    )
