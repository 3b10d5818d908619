"""The baselines on examples small enough to work out by hand."""

from __future__ import annotations

import gzip
import math

import numpy as np
import pytest

from train.baselines import PRIOR, count_nats_per_byte, gzip_nats_per_byte
from train.documents import Documents


def documents_of(texts: list[list[int]], n_bytes: list[int]) -> Documents:
    lengths = np.array([len(text) for text in texts])
    tokens = np.array([token for text in texts for token in text], np.uint16)
    zeros = np.zeros(len(texts), np.int64)
    return Documents(
        shards=(tokens,),
        shard=zeros,
        start=np.cumsum(lengths) - lengths,
        lengths=lengths,
        n_bytes=np.array(n_bytes),
        origin=zeros,
        row=zeros,
        files=["numbers"],
        sources={"": 1.0},
        bounds=(0, len(texts)),
        vocab_size=4,
    )


def test_unigram_and_bigram_by_hand():
    """Vocabulary 0 (BOS), 1, 2, 3. Fitted on [0 1 2 1 2] and [0 2]: tokens 1 1 2 2 2."""
    train = documents_of([[0, 1, 2, 1, 2], [0, 2]], [4, 1])
    held_out = documents_of([[0, 3], [0, 1, 2]], [1, 2])
    one, two = 3 / 9, 4 / 9  # (count + 1) / (5 + 4)
    unigram, bigram = count_nats_per_byte(train, held_out, [1], vocab_size=4)
    assert unigram == pytest.approx(-(math.log(one) + math.log(two)) / 2)
    after_bos = (1 + PRIOR * one) / (2 + PRIOR)  # 0 -> 1 once of two
    after_one = (2 + PRIOR * two) / (2 + PRIOR)  # 1 -> 2 twice of two
    assert bigram == pytest.approx(-(math.log(after_bos) + math.log(after_one)) / 2)


def test_pairs_and_tokens_never_seen_have_a_probability():
    train = documents_of([[0, 1, 2]], [2])
    held_out = documents_of([[0, 3, 3]], [2])
    unigram, bigram = count_nats_per_byte(train, held_out, [0], vocab_size=4)
    seldom = 1 / 6
    assert unigram == pytest.approx(-math.log(seldom))
    after_bos, after_three = PRIOR * seldom / (1 + PRIOR), seldom
    assert bigram == pytest.approx(-(math.log(after_bos) + math.log(after_three)) / 2)


def test_gzip_counts_utf8_bytes_of_all_texts_together():
    texts = ["λ" * 50, "ring" * 20]
    data = "".join(texts).encode()
    expected = len(gzip.compress(data, 9)) * math.log(256) / len(data)
    assert gzip_nats_per_byte(texts) == pytest.approx(expected)
