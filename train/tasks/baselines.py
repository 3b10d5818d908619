"""Baselines for a model: gzip, and unigram and bigram counts over the same tokens.

All results are in nats per byte of the same documents: those of the model's evaluation, or about
``BASELINE_BYTES`` of them, because one process computes the baselines while the others wait.
"""

from __future__ import annotations

import gzip
import math
import sys
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from train.data.documents import Documents
from train.data.samples import Budget, choose_documents, evaluation_documents
from train.data.shards import Corpus
from train.data.tokenizer import vocabulary_size

BASELINES = {"gzip": "gzip -9", "unigram": "unigram", "bigram": "bigram"}  # keys and names
BASELINE_BYTES = 16_000_000  # held-out bytes, at most
FIT_TOKENS = 20_000_000  # training tokens that are counted, at most
PRIOR_COUNTS = 8.0  # weight of the unigram distribution in a bigram estimate


def measure_baselines(corpus: Corpus, budget: Budget) -> dict[str, Any]:
    """``gzip``, ``unigram`` and ``bigram`` of held-out documents, and their ``baseline_bytes``.

    ``budget`` is that of the model's evaluation.
    """
    held_out, tokenizer = corpus.held_out, corpus.tokenizer
    chosen = baseline_documents(held_out, budget)
    unigram, bigram = count_nats_per_byte(
        corpus.train, held_out, chosen, vocabulary_size(tokenizer)
    )
    texts = (
        tokenizer.decode(_text(held_out, document).tolist(), skip_special_tokens=False)
        for document in chosen
    )
    return {
        "gzip": gzip_nats_per_byte(texts),
        "unigram": unigram,
        "bigram": bigram,
        "baseline_bytes": int(held_out.n_bytes[chosen].sum()),
    }


def baseline_documents(
    documents: Documents, budget: Budget, limit: int = BASELINE_BYTES
) -> list[int]:
    """The documents of the evaluation, or some of each source if they exceed ``limit``.

    Each source has at least one, and the last of each may exceed its share of the limit.
    """
    evaluated = evaluation_documents(documents, budget)
    if documents.n_bytes[evaluated].sum() <= limit:
        return evaluated
    limit = min(limit, budget) if isinstance(budget, int) else limit
    return choose_documents(documents, documents.n_bytes, limit)


def _text(documents: Documents, document: int) -> NDArray[np.int64]:
    """The tokens of a document that ``n_bytes`` counts the bytes of."""
    if documents.loss is None:
        return documents.text(document)
    return documents.tokens(document, 0, sys.maxsize)[documents.loss_mask(document)]


def gzip_nats_per_byte(texts: Iterable[str]) -> float:
    """Size of ``gzip -9`` of all texts together, in nats per byte of text."""
    data = "".join(texts).encode()
    return len(gzip.compress(data, compresslevel=9)) * 8 * math.log(2) / len(data)


def count_nats_per_byte(
    train: Documents, held_out: Documents, chosen: list[int], vocab_size: int
) -> tuple[float, float]:
    """Nats per byte of a unigram and of a bigram model of the ``chosen`` held-out documents.

    Like the transformer, they predict every token with loss; the others are only context.
    """
    fit = _transitions(train, choose_documents(train, train.lengths, FIT_TOKENS))
    unigram = unigram_probabilities(fit[1], vocab_size)
    context, following = _transitions(held_out, chosen)
    bigram = bigram_probabilities(*fit, context, following, unigram)
    n_bytes = int(held_out.n_bytes[chosen].sum())
    return (
        float(-np.log(unigram[following]).sum() / n_bytes),
        float(-np.log(bigram).sum() / n_bytes),
    )


def unigram_probabilities(tokens: NDArray[np.int64], vocab_size: int) -> NDArray[np.float64]:
    """Probability of each token, (vocab_size,): counts plus one, normalised."""
    counts = np.bincount(tokens, minlength=vocab_size) + 1.0
    return counts / counts.sum()


def bigram_probabilities(
    fit_context: NDArray[np.int64],
    fit_following: NDArray[np.int64],
    context: NDArray[np.int64],
    following: NDArray[np.int64],
    unigram: NDArray[np.float64],
) -> NDArray[np.float64]:
    """P(following | context) of each pair, from fitted pairs and a prior of ``PRIOR_COUNTS``.

    ``(count(context, following) + prior * unigram[following]) / (count(context) + prior)``
    """
    vocab_size = len(unigram)
    pairs, counts = np.unique(fit_context * vocab_size + fit_following, return_counts=True)
    query = context * vocab_size + following
    found = np.minimum(np.searchsorted(pairs, query), len(pairs) - 1)
    pair_count = np.where(pairs[found] == query, counts[found], 0)
    context_count = np.bincount(fit_context, minlength=vocab_size)[context]
    return (pair_count + PRIOR_COUNTS * unigram[following]) / (context_count + PRIOR_COUNTS)


def _transitions(
    documents: Documents, chosen: Iterable[int]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(context, following), each (n,) int64: every token with loss, and the token before it."""
    pairs = []
    for document in chosen:
        ids = documents.tokens(document, 0, sys.maxsize)
        labelled = documents.loss_mask(document)[1:]
        pairs.append((ids[:-1][labelled], ids[1:][labelled]))
    context, following = (np.concatenate(tokens) for tokens in zip(*pairs, strict=True))
    return context, following
