"""If this fails, the model is compared with wrong baselines. The baselines on examples computed by
hand."""

from __future__ import annotations

import dataclasses
import gzip
import math

import numpy as np
import pytest

from train.data.corpus import find_files, is_held_out, read_documents
from train.data.documents import Documents
from train.data.samples import evaluation_documents
from train.data.shards import open_corpus
from train.tasks.baselines import (
    PRIOR_COUNTS,
    baseline_documents,
    count_nats_per_byte,
    gzip_nats_per_byte,
    measure_baselines,
)


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
        hash=np.arange(len(texts)),
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
    after_bos = (1 + PRIOR_COUNTS * one) / (2 + PRIOR_COUNTS)  # 0 -> 1 once of two
    after_one = (2 + PRIOR_COUNTS * two) / (2 + PRIOR_COUNTS)  # 1 -> 2 twice of two
    assert bigram == pytest.approx(-(math.log(after_bos) + math.log(after_one)) / 2)


def test_unseen_pairs_and_tokens_have_a_probability():
    train = documents_of([[0, 1, 2]], [2])
    held_out = documents_of([[0, 3, 3]], [2])
    unigram, bigram = count_nats_per_byte(train, held_out, [0], vocab_size=4)
    seldom = 1 / 6
    assert unigram == pytest.approx(-math.log(seldom))
    after_bos, after_three = PRIOR_COUNTS * seldom / (1 + PRIOR_COUNTS), seldom
    assert bigram == pytest.approx(-(math.log(after_bos) + math.log(after_three)) / 2)


def test_gzip_counts_utf8_bytes_of_all_texts_together():
    texts = ["λ" * 50, "ring" * 20]
    data = "".join(texts).encode()
    expected = len(gzip.compress(data, 9)) * math.log(256) / len(data)
    assert gzip_nats_per_byte(texts) == pytest.approx(expected)


def test_baselines_use_the_documents_of_least_hash_of_a_large_split():
    documents = documents_of([[0, 1]] * 10, [100] * 10)
    documents = dataclasses.replace(documents, hash=np.array([3, 9, 0, 7, 1, 8, 2, 6, 4, 5]))
    for max_bytes in (1, 250, 1000, None):
        whole = evaluation_documents(documents, max_bytes)
        assert baseline_documents(documents, max_bytes) == whole
        part = baseline_documents(documents, max_bytes, limit=300)
        least = [2, 4, 6]  # hashes 0, 1, 2
        assert part == [n for n in whole if n in least]
    split = dataclasses.replace(documents, sources={"a": 3.0, "b": 1.0}, bounds=(0, 5, 10))
    assert baseline_documents(split, None, limit=400) == [0, 2, 4, 6]
    assert baseline_documents(split, None, limit=1000) == list(range(10))


def test_all_baselines_are_of_the_same_bytes(config):
    """Those of the files, whole and limited; gzip against gzip of the files' contents."""
    corpus = open_corpus(config.data)
    texts = [
        document.text.encode()
        for file in find_files(config.data)
        if file.path.suffix == ".txt"
        for document in read_documents(file)
        if is_held_out(document.hash(0), config.data.held_out)
    ]
    assert len(texts) > 3
    limit = 2 * max(map(len, texts))
    for max_bytes in (None, limit):
        chosen = evaluation_documents(corpus.held_out, max_bytes)
        assert (len(chosen) < len(texts)) == (max_bytes == limit)
        data = b"".join(texts[number] for number in chosen)
        got = measure_baselines(corpus, max_bytes)
        assert got["baseline_bytes"] == len(data)
        assert got["gzip"] == pytest.approx(
            len(gzip.compress(data, 9)) * math.log(256) / len(data), rel=1e-12
        )
        vocab_size = corpus.tokenizer.get_vocab_size()
        counts = count_nats_per_byte(corpus.train, corpus.held_out, chosen, vocab_size)
        assert (got["unigram"], got["bigram"]) == counts
