"""If this fails, tokens are trained on twice, or never. Packing: every token of an epoch once,
boundaries, labels."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from train.data.samples import (
    IGNORED,
    AtLeast,
    Sample,
    TrainingSamples,
    choose_documents,
    concatenate,
    evaluation_documents,
    evaluation_samples,
    pack,
)

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=12)


@given(
    lengths=LENGTHS,
    seq_len=st.integers(2, 64),
    max_doc_len=st.integers(1, 70),
    seed=st.integers(0, 9),
)
@settings(deadline=None, max_examples=60)
def test_every_epoch_holds_every_token_once(make_documents, lengths, seq_len, max_doc_len, seed):
    samples = TrainingSamples(make_documents(lengths), seq_len, max_doc_len, seed)
    total = sum(lengths)
    stream = np.concatenate([samples[i].tokens for i in range(-(-3 * total // seq_len))])
    for epoch in range(3):
        assert sorted(stream[epoch * total : (epoch + 1) * total]) == list(range(total))


@given(
    lengths=LENGTHS,
    seq_len=st.integers(2, 64),
    max_doc_len=st.integers(1, 70),
    index=st.integers(0, 50),
)
@settings(deadline=None, max_examples=60)
def test_labels_and_boundaries(make_documents, lengths, seq_len, max_doc_len, index):
    """Token i is the number i, so its label is i + 1, or ``IGNORED`` where a document ends."""
    sample = TrainingSamples(make_documents(lengths), seq_len, max_doc_len, seed=1)[index]
    assert len(sample.tokens) == len(sample.labels) == sample.cu_seqlens[-1] == seq_len
    last_tokens = np.cumsum(lengths) - 1
    expected = np.where(np.isin(sample.tokens, last_tokens), IGNORED, sample.tokens + 1)
    np.testing.assert_array_equal(sample.labels, expected)
    document_of = np.repeat(np.arange(len(lengths)), lengths)
    for start, stop in zip(sample.cu_seqlens, sample.cu_seqlens[1:], strict=False):
        part = sample.tokens[start:stop]
        assert 0 < stop - start <= max_doc_len
        np.testing.assert_array_equal(part, np.arange(part[0], part[0] + len(part)))
        assert len(set(document_of[part])) == 1


def test_a_sample_depends_on_seed_and_index_alone(make_documents):
    documents = make_documents([50, 3, 1, 120, 70])
    forward = TrainingSamples(documents, 32, 40, seed=5)
    ahead = [forward[i].tokens for i in range(30)]
    again = TrainingSamples(documents, 32, 40, seed=5)
    for index in reversed(range(30)):
        np.testing.assert_array_equal(again[index].tokens, ahead[index])
    other = TrainingSamples(documents, 32, 40, seed=6)
    assert any((other[i].tokens != ahead[i]).any() for i in range(30))


def test_samples_side_by_side_keep_their_documents_labels_and_bytes(make_documents):
    """Slices of each sample, by ``cu_seqlens``, are those of the samples apart, in order."""
    samples = TrainingSamples(make_documents([61, 1, 2, 40, 300]), 50, None, seed=0)
    apart = [samples[n] for n in range(5)]
    whole = concatenate(apart)

    def slices(sample: Sample) -> list[tuple[list[int], list[int]]]:
        return [
            (sample.tokens[start:stop].tolist(), sample.labels[start:stop].tolist())
            for start, stop in pairwise(sample.cu_seqlens)
        ]

    assert slices(whole) == [part for sample in apart for part in slices(sample)]
    assert len(whole.tokens) == whole.cu_seqlens[-1] == 250
    assert whole.n_bytes == sum(sample.n_bytes for sample in apart) > 0
    assert concatenate(apart[:1]) is apart[0]


def test_epochs_differ_in_order(make_documents):
    samples = TrainingSamples(make_documents([8] * 30), 240, None, seed=0)
    assert (samples[0].tokens != samples[1].tokens).any()


def test_a_document_of_one_token_predicts_nothing(make_documents):
    samples = TrainingSamples(make_documents([1, 1, 1]), 3, None, seed=0)
    assert (samples[0].labels == IGNORED).all()
    assert samples[0].cu_seqlens == [0, 1, 2, 3]


@given(lengths=LENGTHS, seq_len=st.integers(2, 64), data=st.data())
@settings(deadline=None, max_examples=60)
def test_evaluation_predicts_every_token_once(make_documents, lengths, seq_len, data):
    window = data.draw(st.integers(1, seq_len))
    documents = make_documents(lengths)
    samples = evaluation_samples(documents, list(range(len(lengths))), seq_len, window)
    packed = [pack(documents, slices) for slices in samples]
    assert all(0 < len(sample.tokens) <= seq_len for sample in packed)
    assert all(stop - start <= window for slices in samples for _, start, stop in slices)
    tokens = np.concatenate([sample.tokens for sample in packed])
    labels = np.concatenate([sample.labels for sample in packed])
    assert sorted(tokens) == list(range(sum(lengths)))
    first_tokens = np.cumsum(lengths) - lengths
    expected = sorted(set(range(sum(lengths))) - set(first_tokens))
    assert sorted(labels[labels != IGNORED]) == expected


def test_evaluation_samples_are_filled_to_the_last_token(make_documents):
    samples = evaluation_samples(make_documents([4, 4, 9, 7]), [0, 1, 2, 3], seq_len=8, window=8)
    assert [[stop - start for _, start, stop in slices] for slices in samples] == [
        [4, 4],
        [8],
        [1, 7],
    ]


def test_evaluation_documents_reach_the_budget(make_documents):
    documents = make_documents([10, 20, 30])  # 30, 60 and 90 bytes
    assert evaluation_documents(documents, None) == [0, 1, 2]
    assert evaluation_documents(documents, 30) == [0]
    assert evaluation_documents(documents, 31) == [0, 1]
    assert evaluation_documents(documents, 10_000) == [0, 1, 2]


def test_a_budget_at_least_covers_tokens_and_the_length_that_is_trained(make_documents):
    """Hashes are in the order of the numbers; each token has 3 bytes."""
    documents = make_documents([10, 10, 10, 10, 60, 50, 90])
    assert evaluation_documents(documents, AtLeast(31, 1, 1)) == [0, 1]
    assert evaluation_documents(documents, AtLeast(31, 25, 1)) == [0, 1, 2]
    assert evaluation_documents(documents, AtLeast(31, 25, 50)) == [0, 1, 2, 4]
    assert evaluation_documents(documents, AtLeast(31, 25, 61)) == [0, 1, 2, 6]
    assert evaluation_documents(documents, AtLeast(31, 25, 500)) == [0, 1, 2, 6]  # the longest
    assert evaluation_documents(documents, AtLeast(500, 25, 61)) == list(range(7))


@given(lengths=LENGTHS, seq_len=st.integers(2, 64), max_doc_len=st.integers(1, 70))
@settings(deadline=None, max_examples=60)
def test_the_labels_of_an_epoch_have_the_bytes_of_its_documents(
    make_documents, lengths, seq_len, max_doc_len
):
    """Rounded in each sample; a document of BOS alone has no label. Each has 3 bytes per token."""
    documents = make_documents(lengths)
    stream = TrainingSamples(documents, seq_len, max_doc_len, seed=0)
    expected = 3 * sum(length for length in lengths if length > 1)
    samples = [stream[index] for index in range(sum(lengths))]  # seq_len epochs
    assert abs(sum(s.n_bytes for s in samples) - seq_len * expected) <= len(samples) / 2
    for sample in samples:
        share = [3 * n / max(1, n - 1) for n in lengths]
        assert sample.n_bytes <= max(share) * (sample.labels != IGNORED).sum() + 0.5


def test_documents_are_chosen_by_hash_wherever_they_stand(make_documents):
    """The same ones from any order of the files, and after documents of larger hash were added."""
    documents = make_documents([10] * 40)
    hashes = np.random.default_rng(0).permutation(40) * 7
    whole = replace(documents, hash=hashes)
    chosen = evaluation_documents(whole, 300)  # of 30 bytes each
    assert chosen == sorted(chosen)
    assert sorted(hashes[chosen]) == [7 * n for n in range(10)]
    assert choose_documents(whole, whole.lengths, 100) == chosen
    order = np.random.default_rng(1).permutation(40)
    moved = replace(documents, hash=hashes[order])
    assert sorted(order[evaluation_documents(moved, 300)]) == chosen
    added = replace(make_documents([10] * 41), hash=np.append(hashes, 71))
    assert evaluation_documents(added, 300) == chosen


def test_a_budget_is_divided_by_weight(make_documents):
    """Of 120 bytes, 90 are for the first source (30, 60, 90 bytes), 30 for the second (3 x 15)."""
    documents = make_documents([10, 20, 30, 5, 5, 5])
    documents = replace(documents, sources={"a": 3.0, "b": 1.0}, bounds=(0, 3, 6))
    assert evaluation_documents(documents, 120) == [0, 1, 3, 4]
    assert evaluation_documents(documents, None) == [0, 1, 2, 3, 4, 5]
    assert choose_documents(documents, documents.lengths, 4) == [0, 3]


def test_without_a_document_mask_a_sample_is_one_document(make_documents):
    """The same tokens; each predicts the next of the sample, the last the next of its document."""
    documents = make_documents([61, 1, 2, 40, 300])
    packed = TrainingSamples(documents, 64, 90, seed=0)
    joined = TrainingSamples(documents, 64, 90, seed=0, document_mask=False)
    for index in range(8):
        sample, whole = packed[index], joined[index]
        assert whole.cu_seqlens == [0, 64]
        assert whole.tokens.tolist() == sample.tokens.tolist()
        assert whole.labels.tolist() == [*sample.tokens[1:], sample.labels[-1]]
    assert any(len(packed[index].cu_seqlens) > 2 for index in range(8))
