"""What a model has to beat: gzip, and unigram and bigram counts over the same tokens.

All figures are nats per UTF-8 byte of the evaluated documents.
"""

from __future__ import annotations

import gzip
import math
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from train.documents import Documents
from train.samples import first_documents

FIT_TOKENS = 20_000_000  # training tokens that the counts are taken from, at most
PRIOR = 8.0  # weight of the unigram distribution in a bigram estimate, in counts


def gzip_nats_per_byte(texts: Iterable[str]) -> float:
    """Size of ``gzip -9`` of all texts together, in nats per byte of text."""
    data = "".join(texts).encode()
    return len(gzip.compress(data, compresslevel=9)) * 8 * math.log(2) / len(data)


def count_nats_per_byte(
    train: Documents, held_out: Documents, chosen: list[int], vocab_size: int
) -> tuple[float, float]:
    """Nats per byte of a unigram and of a bigram model of the ``chosen`` held-out documents.

    Like the transformer they predict every token but BOS, which only serves as context.
    """
    fit = _transitions(train, first_documents(train, train.lengths, FIT_TOKENS))
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
    """P(following | context) of each pair, from fitted pairs and ``PRIOR`` counts of unigram.

    ``(count(context, following) + PRIOR * unigram[following]) / (count(context) + PRIOR)``
    """
    vocab_size = len(unigram)
    pairs, counts = np.unique(fit_context * vocab_size + fit_following, return_counts=True)
    wanted = context * vocab_size + following
    place = np.minimum(np.searchsorted(pairs, wanted), len(pairs) - 1)
    pair_count = np.where(pairs[place] == wanted, counts[place], 0)
    context_count = np.bincount(fit_context, minlength=vocab_size)[context]
    return (pair_count + PRIOR * unigram[following]) / (context_count + PRIOR)


def _transitions(
    documents: Documents, chosen: Iterable[int]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Every token but BOS with the token before it: (context, following), each (n,) int64."""
    texts = [documents.tokens(document, 0, int(documents.lengths[document])) for document in chosen]
    return np.concatenate([t[:-1] for t in texts]), np.concatenate([t[1:] for t in texts])
