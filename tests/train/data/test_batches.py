"""If this fails, ranks train on wrong tokens, labels or positions. A rank's shard of a sample, its
micro-batches, and the thread that prefetches them."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch

from train.data.batches import make_batch, prefetch
from train.data.samples import TrainingSamples, concatenate
from train.engine.parallel import ParallelLayout
from train.sections.machine import ALL
from train.tasks.trainer import Trainer


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_the_shards_of_all_ranks_are_the_sample(make_documents, world, layout):
    """Every token once, each with the label and the position that it has in the whole sample."""
    samples = TrainingSamples(make_documents([61, 1, 2, 40, 300]), 257, 90, seed=0)
    sample = samples[1]
    expected = []
    for start, stop in zip(sample.cu_seqlens, sample.cu_seqlens[1:], strict=False):
        tokens, labels = sample.tokens[start:stop], sample.labels[start:stop]
        expected += zip(tokens.tolist(), labels.tolist(), range(stop - start), strict=True)
    found, n_bytes = [], 0
    for rank in range(world):
        batch = make_batch(sample, (rank, world), layout)
        tokens, labels, positions = batch.tokens, batch.labels, batch.positions
        found += zip(tokens.tolist(), labels.tolist(), positions.tolist(), strict=True)
        assert batch.n_valid == int((batch.labels >= 0).sum())
        assert batch.plan.local_tokens == len(batch.tokens)
        n_bytes += batch.n_bytes
    assert sorted(found) == sorted(expected)
    assert n_bytes == sample.n_bytes > 0


@pytest.mark.parametrize(
    ("cp", "tokens_per_rank"),
    [(1, None), (2, None), (1, 96), (2, 96), (ALL, 24), (ALL, 48), (ALL, 96)],
)
def test_ranks_share_the_samples_of_a_step(config, make_documents, cp, tokens_per_rank):
    """4 ranks: samples 8 to 15 of the stream once, in a step of 8, in any micro-batches.

    With ``tokens_per_rank`` each rank has exactly these tokens in each.
    """
    config.data.seq_len, config.data.tokens_per_rank = 48, tokens_per_rank
    config.parallel.cp, config.train.global_batch_size = cp, 8
    config, found = config.on(4), []
    samples = TrainingSamples(make_documents([5, 100, 7, 300, 41, 1, 1, 90]), 48, None, seed=0)
    for rank in range(4):
        group = (rank % config.parallel.cp, config.parallel.cp)
        parallel = ParallelLayout(rank, 4, config.parallel.cp, torch.device("cpu"), group)
        of_rank = SimpleNamespace(
            config=config,
            parallel=parallel,
            samples=samples,
            accumulation=config.accumulation_over(parallel.dp),
            specs=(),
        )
        batches = Trainer._batches(of_rank, 8)
        if tokens_per_rank is not None:
            assert {len(batch.tokens) for batch in batches} == {tokens_per_rank}
        for batch in batches:
            found += zip(batch.tokens.tolist(), batch.labels.tolist(), strict=True)
    expected = concatenate([samples[n] for n in range(8, 16)])
    labelled = zip(expected.tokens.tolist(), expected.labels.tolist(), strict=True)
    assert sorted(found) == sorted(labelled)


def test_the_next_item_is_made_while_one_is_in_use():
    second_made = threading.Event()

    def make(index: int) -> int:
        if index == 1:
            second_made.set()
        return index * index

    items = prefetch(make, 0, 4)
    assert next(items) == 0
    assert second_made.wait(timeout=10)
    assert list(items) == [1, 4, 9]
    assert list(prefetch(make, 3, 3)) == []


def test_an_error_is_raised_when_its_item_is_requested():
    def make(index: int) -> float:
        return 1 / (2 - index)

    items = prefetch(make, 0, 5)
    assert [next(items), next(items)] == [0.5, 1.0]
    with pytest.raises(ZeroDivisionError):
        next(items)
