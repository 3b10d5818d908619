"""If this fails, a rank's shard lacks tokens, has them twice, or has more work than others. Shards:
token counts, completeness, order, and balance of work."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfa3.planning.sharding import Segments, pairs_before, partition, whole_sequences
from tests.support.dense import mask
from tests.support.strategies import layouts, lengths, windows

worlds = st.integers(1, 9)


def held(segments: Segments) -> list[tuple[int, int]]:
    """(document, position) of each local row."""
    return [
        (int(d), int(p) + i)
        for d, p, n in zip(segments.sequence, segments.position, segments.length, strict=True)
        for i in range(n)
    ]


@given(documents=lengths, world=worlds, layout=layouts, window=windows)
def test_every_token_lies_on_one_rank_and_counts_are_equal(
    documents: list[int], world: int, layout: str, window: tuple[int, int]
) -> None:
    """Counts differ by one at most, and earlier ranks have more; local rows have no gaps."""
    shards = partition(np.array(documents, np.int64), world, layout, *window)
    total = sum(documents)
    counts = [s.tokens for s in shards]
    assert counts == [total // world + (r < total % world) for r in range(world)]
    tokens = list(itertools.chain.from_iterable(held(s) for s in shards))
    assert sorted(tokens) == [(d, p) for d, n in enumerate(documents) for p in range(n)]
    for s in shards:
        assert (s.length > 0).all()
        np.testing.assert_array_equal(s.row, np.cumsum(s.length) - s.length)


@given(documents=lengths, world=worlds, layout=layouts, window=windows)
def test_segments_are_in_order_and_as_long_as_they_can_be(
    documents: list[int], world: int, layout: str, window: tuple[int, int]
) -> None:
    """By document, then position; no two segments are adjacent tokens."""
    for s in partition(np.array(documents, np.int64), world, layout, *window):
        starts = list(zip(s.sequence.tolist(), s.position.tolist(), strict=True))
        assert starts == sorted(starts)
        for i in range(len(s) - 1):
            touching = s.position[i] + s.length[i] == s.position[i + 1]
            assert not (s.sequence[i] == s.sequence[i + 1] and touching)


@given(documents=lengths, world=worlds)
def test_contiguous_keeps_tokens_in_order(documents: list[int], world: int) -> None:
    shards = partition(np.array(documents, np.int64), world, "contiguous")
    tokens = list(itertools.chain.from_iterable(held(s) for s in shards))
    assert tokens == [(d, p) for d, n in enumerate(documents) for p in range(n)]


@pytest.mark.parametrize("chunk", [32, 64, 192, 256])
@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_one_document_is_the_classic_zigzag(world: int, chunk: int) -> None:
    """2n chunks; rank r has chunks r and 2n-1-r."""
    shards = partition(np.array([2 * world * chunk]), world, "zigzag")
    for r, s in enumerate(shards):
        chunks = [r, 2 * world - 1 - r]
        if r == world - 1:  # its two chunks touch
            assert s.position.tolist() == [chunks[0] * chunk]
        else:
            assert s.position.tolist() == [c * chunk for c in chunks]


@given(
    length=st.integers(0, 40),
    window=st.tuples(st.integers(-1, 45), st.integers(-1, 45)),
    rows=st.integers(0, 40),
)
def test_pairs_before_counts_allowed_pairs(length: int, window: tuple[int, int], rows: int) -> None:
    """Reference: the mask's first rows, exactly."""
    rows = min(rows, length)
    counted = pairs_before(np.array([rows]), np.array([length]), *window)
    assert counted[0] == mask([length], [length], *window)[:rows].sum()


@given(documents=lengths)
def test_whole_sequences_leaves_empty_ones_out(documents: list[int]) -> None:
    s = whole_sequences(np.array(documents, np.int64))
    assert s.sequence.tolist() == [i for i, n in enumerate(documents) if n]
    assert held(s) == [(d, p) for d, n in enumerate(documents) for p in range(n)]


def work_of(shards: list[Segments], documents: list[int], window: tuple[int, int]) -> list[int]:
    """Allowed pairs of each rank, row by row."""
    left, right = window
    pairs = []
    for s in shards:
        n = np.repeat(np.array(documents)[s.sequence], s.length)
        row = np.array([p for _, p in held(s)], np.int64)
        begin = 0 if left < 0 else np.maximum(row - left, 0)
        end = n if right < 0 else np.minimum(row + right + 1, n)
        pairs.append(int((end - begin).sum()))
    return pairs


@pytest.mark.parametrize("window", [(-1, 0), (-1, -1), (1000, 0), (300, 300)])
@pytest.mark.parametrize("world", [2, 3, 5, 8])
@pytest.mark.parametrize("seed", range(3))
def test_zigzag_balances_work_where_documents_are_long(
    seed: int, world: int, window: tuple[int, int]
) -> None:
    """40 documents of log-uniform length: the maximum work of a rank is <= 1.02 of the mean."""
    rng = np.random.default_rng(seed)
    documents = np.exp(rng.uniform(np.log(64), np.log(16384), 40)).astype(np.int64).tolist()
    shards = partition(np.array(documents), world, "zigzag", *window)
    work = work_of(shards, documents, window)
    assert max(work) / np.mean(work) <= 1.02
