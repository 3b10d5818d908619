"""A rank's shard of a sample, and the thread that prefetches it."""

from __future__ import annotations

import threading

import pytest

from train.data.batches import make_batch, prefetch
from train.data.samples import TrainingSamples


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
