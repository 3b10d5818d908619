"""Evaluation: every byte and token counted once, and what a window of one token means."""

from __future__ import annotations

import math

import pytest
import torch

from train.evaluate import evaluate
from train.parallel import join
from train.shards import open_corpus
from train.trainer import SELF_ONLY, build_model


@pytest.fixture
def corpus(config):
    return open_corpus(config.data)


def model_of(config, corpus):
    mesh = join(config.parallel, torch.device("cpu"))
    return build_model(config, corpus.tokenizer.get_vocab_size(), mesh), mesh


@pytest.mark.parametrize("piece_len", [None, 50])
def test_a_uniform_model_costs_log_vocabulary_per_token(config, corpus, piece_len):
    """Zero initialisation predicts uniformly, so the total counts the predicted tokens: 1e-6."""
    config.data.piece_len = piece_len
    model, mesh = model_of(config, corpus)
    held_out = corpus.held_out
    result = evaluate(model, held_out, config, mesh, max_bytes=None)
    tokens = int(held_out.lengths.sum()) - len(held_out)
    assert result.tokens == tokens
    assert result.n_bytes == int(held_out.n_bytes.sum())
    log_vocabulary = math.log(corpus.tokenizer.get_vocab_size())
    expected = tokens * log_vocabulary / result.n_bytes
    assert result.nats_per_byte == pytest.approx(expected, rel=1e-6)
    filled = [loss for loss in result.loss_by_bucket if not math.isnan(loss)]
    assert filled == pytest.approx([log_vocabulary] * len(filled), rel=1e-6)


def test_a_budget_takes_whole_documents(config, corpus):
    model, mesh = model_of(config, corpus)
    first = int(corpus.held_out.n_bytes[0])
    result = evaluate(model, corpus.held_out, config, mesh, max_bytes=1)
    assert result.n_bytes == first
    assert result.tokens == int(corpus.held_out.lengths[0]) - 1


def test_alone_a_token_sees_nothing_of_the_others(config, corpus):
    """Exchanging a document's first words leaves its other losses bitwise the same, if alone."""
    config.model.zero_init = False
    model, mesh = model_of(config, corpus)
    results = [
        evaluate(model, corpus.held_out, config, mesh, None, w) for w in [(-1, -1), SELF_ONLY]
    ]
    assert results[0].tokens == results[1].tokens
    assert results[0].nats_per_byte != results[1].nats_per_byte
    tokens = torch.from_numpy(corpus.held_out.tokens(0, 0, 40))
    changed = tokens.clone()
    changed[:10] = 7
    from ringfa3 import plan_context

    for window, same in ((SELF_ONLY, True), ((-1, -1), False)):
        plan = plan_context([0, len(tokens)], window_size=window)
        one, two = (model.transformer(t, plan.positions, plan) for t in (tokens, changed))
        assert torch.equal(one[10:], two[10:]) is same
