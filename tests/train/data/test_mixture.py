"""If this fails, sources are trained on in other shares than their weights. Mixing by weight: exact
shares, no gaps, no repeats, a pure function."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from train.config import ConfigError, DataConfig
from train.data.mixture import MIN_BLOCK, Mixture, short_documents, training_samples
from train.data.samples import TrainingSamples
from train.sections.data import SourceConfig

DATA = DataConfig(
    seq_len=32, max_doc_len=25, sources={"a": SourceConfig("a"), "b": SourceConfig("b")}
)
WEIGHTS = st.lists(st.floats(1e-3, 1.0), min_size=1, max_size=9)


def located(mixture: Mixture, stop: int) -> np.ndarray:
    """``(source, number)`` of the samples before ``stop``, (stop, 2)."""
    return np.array([mixture.locate(index) for index in range(stop)])


@given(weights=WEIGHTS, seed=st.integers(0, 9), scale=st.floats(0.1, 1e6))
@example(weights=[0.5, 0.5, 0.01953125], seed=0, scale=1.0)  # 1.2 samples of the last in 64
@settings(deadline=None, max_examples=60)
def test_shares_streams_and_purity(weights, seed, scale):
    """At the end of each block every source is within one sample of its share, without gaps."""
    mixture = Mixture(weights, seed)
    assert mixture.block >= MIN_BLOCK
    blocks = max(3, 600 // mixture.block)
    found = located(mixture, blocks * mixture.block)
    shares = np.array(weights) / sum(weights)
    for block in range(1, blocks + 1):
        counts = np.bincount(found[: block * mixture.block, 0], minlength=len(weights))
        assert np.abs(counts - shares * block * mixture.block).max() < 1 + 1e-6
        own = found[(block - 1) * mixture.block : block * mixture.block, 0]
        assert set(own) == set(range(len(weights)))  # no source is absent from a block
    for source in range(len(weights)):
        numbers = found[found[:, 0] == source, 1]
        assert numbers.tolist() == list(range(len(numbers)))
    again = Mixture(weights, seed)
    for index in np.random.default_rng(seed).integers(0, len(found), 50):
        assert again.locate(int(index)) == tuple(found[index])


def test_a_small_share_still_gets_samples():
    mixture = Mixture([1e-4, 1.0], seed=0)
    found = located(mixture, 4 * mixture.block)
    assert mixture.block == 20_002
    assert (found[:, 0] == 0).sum() == 8
    assert len(set(found[found[:, 0] == 0, 1])) == 8


def test_the_order_in_a_block_depends_on_seed_and_block():
    orders = {
        (seed, block): tuple(located(Mixture([1, 1], seed), 256)[block * 64 :][:64, 0])
        for seed in (0, 1)
        for block in range(4)
    }
    assert len(set(orders.values())) == len(orders)
    assert all(sorted(order) == [0] * 32 + [1] * 32 for order in orders.values())


def test_large_sample_numbers_are_located_at_once():
    mixture = Mixture([0.7, 0.2, 0.1], seed=3)
    far = 10**12
    counts = [0, 0, 0]
    for index in range(far * mixture.block, (far + 1) * mixture.block):
        source, number = mixture.locate(index)
        assert number == mixture.before(far)[source] + counts[source]
        counts[source] += 1
    assert [n + c for n, c in zip(mixture.before(far), counts, strict=True)] == mixture.before(
        far + 1
    )


@pytest.fixture
def two_sources(make_documents):
    """Documents 0 to 3 are of source "a" (tokens 0 to 99), the others of "b" (weights 3 to 1)."""
    documents = make_documents([10, 20, 30, 40, 5, 5, 300])
    return replace(documents, sources={"a": 3.0, "b": 1.0}, bounds=(0, 4, 7))


@pytest.mark.parametrize(("dp", "accumulation"), [(1, 1), (1, 6), (2, 3), (3, 2), (6, 1)])
def test_the_samples_do_not_depend_on_dp_and_accumulation(two_sources, dp, accumulation):
    """The trainer's numbering: (step * accumulation + m) * dp + dp_rank."""
    whole = training_samples(two_sources, DATA, seed=1)
    expected = [whole[index].tokens for index in range(60)]
    for rank in range(dp):
        own = training_samples(two_sources, DATA, seed=1)
        for turn in range(60 // dp):
            step, m = divmod(turn, accumulation)
            index = (step * accumulation + m) * dp + rank
            np.testing.assert_array_equal(own[index].tokens, expected[index])


def test_a_sample_has_one_source_and_each_stream_is_that_of_its_source_alone(two_sources):
    samples = training_samples(two_sources, DATA, seed=1)
    streams = [
        TrainingSamples(two_sources.of_source(number), 32, 25, seed=1) for number in range(2)
    ]
    mixture = Mixture([3, 1], seed=1)
    for index in range(128):
        source, number = mixture.locate(index)
        sample = samples[index]
        np.testing.assert_array_equal(sample.tokens, streams[source][number].tokens)
        assert ((sample.tokens >= 100) == (source == 1)).all()
    assert samples[0].cu_seqlens[-1] == 32


def test_one_source_gives_the_recorded_stream(make_documents):
    """Samples recorded without mixtures: the same seed must give the same samples."""
    samples = training_samples(
        make_documents([61, 1, 2, 40, 300]), DataConfig(seq_len=257, max_doc_len=90), seed=3
    )
    assert isinstance(samples, TrainingSamples)
    assert [tuple(part) for part in samples.slices(1000)] == [
        *((4, 285, 300), (4, 0, 90), (0, 0, 61), (4, 180, 270), (2, 0, 1)),
    ]
    digest = hashlib.sha256()
    for index in range(50):
        sample = samples[index]
        for values in (sample.tokens, sample.labels, np.array(sample.cu_seqlens)):
            digest.update(values.astype("<i8").tobytes())
    assert digest.hexdigest() == "cff252dbbe32561d81e885c1a1325482471f664610fe6ce0e17eabd7c052eb18"


def test_short_documents_are_left_out_of_a_source(two_sources):
    """A source keeps its share; documents of 5 tokens of "b" and of 10 and 20 of "a" never come."""
    sources = {"a": SourceConfig("a"), "b": SourceConfig("b", min_len=6)}
    data = replace(DATA, min_len=30, sources=sources)
    samples = training_samples(two_sources, data, seed=1)
    assert short_documents(two_sources, data) == (
        ", 2 below data.min_len=30 left out, 2 below data.sources.b.min_len=6 left out"
    )
    assert short_documents(two_sources, DATA) == ""
    seen = set(np.concatenate([samples[index].tokens for index in range(128)]).tolist())
    assert seen == set(range(30, 100)) | set(range(110, 410))
    for least, message in ((301, "b.min_len=300"), (300, None)):
        sources["b"] = SourceConfig("b", min_len=least)
        if message is None:
            training_samples(two_sources, data, seed=1)
            continue
        with pytest.raises(ConfigError, match=rf"valid: data\.sources\.{message}"):
            training_samples(two_sources, data, seed=1)
    with pytest.raises(ConfigError, match=r"data\.min_len=41: .* valid: data\.min_len=40"):
        training_samples(two_sources, replace(data, min_len=41), seed=1)
