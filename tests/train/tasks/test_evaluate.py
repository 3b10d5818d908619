"""If this fails, held-out losses are wrong. Evaluation: every byte and token counts once; in a
window of one token nothing else counts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from train.data.batches import Batch, make_batch
from train.data.samples import IGNORED, DocumentSlice, evaluation_documents, pack
from train.data.shards import open_corpus
from train.engine.parallel import join
from train.model.transformer import build_model
from train.tasks import evaluate as evaluation
from train.tasks.evaluate import budget_of, evaluate
from train.tasks.trainer import SELF_ONLY


@pytest.fixture
def corpus(config):
    return open_corpus(config.data)


def model_of(config, corpus):
    parallel = join(config.parallel, torch.device("cpu"))
    return build_model(config, corpus.tokenizer.get_vocab_size(), parallel.device), parallel


@pytest.mark.parametrize("max_doc_len", [None, 50])
def test_a_uniform_model_costs_log_vocabulary_per_token(config, corpus, max_doc_len):
    """Zero initialisation predicts uniformly, so the total counts the predicted tokens: 1e-6."""
    config.data.max_doc_len = max_doc_len
    model, parallel = model_of(config, corpus)
    held_out = corpus.held_out
    result = evaluate(model, held_out, config, parallel, budget=None)
    tokens = int(held_out.lengths.sum()) - len(held_out)
    assert result.tokens == tokens
    assert result.n_bytes == int(held_out.n_bytes.sum())
    log_vocabulary = math.log(corpus.tokenizer.get_vocab_size())
    expected = tokens * log_vocabulary / result.n_bytes
    assert result.nats_per_byte == pytest.approx(expected, rel=1e-6)
    filled = [loss for loss in result.loss_by_bucket if not math.isnan(loss)]
    assert filled == pytest.approx([log_vocabulary] * len(filled), rel=1e-6)


def test_more_tokens_at_once_are_fewer_forwards_with_the_same_totals(config, corpus):
    """Within 1e-6."""
    config.model.zero_init = False
    model, parallel = model_of(config, corpus)
    found, calls = [], []
    for tokens in (None, 3 * config.data.seq_len):
        config.data.tokens_per_rank = tokens
        sizes: list[int] = []
        losses_of = lambda batch: sizes.append(len(batch.tokens)) or model(batch)  # noqa: E731, B023
        found.append(evaluate(losses_of, corpus.held_out, config, parallel, None))
        calls.append(sizes)
    assert max(calls[0]) <= config.data.seq_len < max(calls[1]) <= 3 * config.data.seq_len
    assert len(calls[1]) <= len(calls[0]) / 2
    assert found[1].bucket_tokens == found[0].bucket_tokens
    assert found[1].bucket_losses == pytest.approx(found[0].bucket_losses, rel=1e-6)


@pytest.mark.parametrize("dp", [1, 3, 99])
def test_each_source_has_its_own_nats_per_byte(config, corpus, dp, monkeypatch):
    """Each is that of its source alone (1e-6); the total is their mean by bytes."""
    config.model.zero_init = False
    model, parallel = model_of(config, corpus)
    documents = corpus.held_out
    half = len(documents) // 2
    mixed = replace(documents, sources={"a": 1.0, "b": 5.0}, bounds=(0, half, len(documents)))
    parts = [evaluate(model, mixed.of_source(k), config, parallel, None) for k in range(2)]
    monkeypatch.setattr(evaluation, "sum_over_ranks", lambda parallel, values: values)
    ranks = [replace(parallel, rank=rank, world=dp) for rank in range(dp)]
    forwards = [0] * dp

    def counting(rank: int) -> Callable[[Batch], torch.Tensor]:
        def losses_of(batch: Batch) -> torch.Tensor:
            forwards[rank] += 1
            return model(batch)

        return losses_of

    whole = [evaluate(counting(r.rank), mixed, config, r, None) for r in ranks]  # not summed
    assert len(set(forwards)) == 1  # a sharded model is gathered in each: all ranks take part
    by_source = {
        name: sum(result.nats_per_byte_by_source[name] for result in whole) for name in ("a", "b")
    }
    assert by_source == pytest.approx(
        {"a": parts[0].nats_per_byte, "b": parts[1].nats_per_byte}, rel=1e-6
    )
    assert by_source["a"] != pytest.approx(by_source["b"], rel=1e-3)
    mean = sum(part.nats_per_byte * part.n_bytes for part in parts) / whole[0].n_bytes
    assert sum(result.nats_per_byte for result in whole) == pytest.approx(mean, rel=1e-6)
    assert sum(result.tokens for result in whole) == sum(part.tokens for part in parts)


@pytest.mark.parametrize("length", [None, 40])
def test_the_last_tokens_are_those_at_the_end_of_full_windows(config, corpus, length):
    """Losses of each window by itself, 1e-6; windows of 70 tokens, or of a shorter length."""
    config.model.zero_init = False
    config.data.max_doc_len, config.train.final_eval_last = 70, 9
    model, parallel = model_of(config, corpus)
    documents = corpus.held_out
    result = evaluate(model, documents, config, parallel, 2500, length=length)
    window, total, count = length or 70, 0.0, 0
    for document in evaluation_documents(documents, 2500):
        end = int(documents.lengths[document])
        for start in range(0, end, window):
            part = DocumentSlice(document, start, min(start + window, end))
            batch = make_batch(pack(documents, [part]), None, "zigzag")
            last = (batch.labels != IGNORED)[window - 9 :]
            total += float(model(batch).detach()[window - 9 :][last].double().sum())
            count += int(last.sum())
    assert count > 50
    assert result.last_tokens == count
    assert result.last_loss == pytest.approx(total, rel=1e-6)


def test_the_default_covers_four_samples_and_the_length_of_training(config, make_documents):
    """Documents of 10 tokens, 30 bytes, have the least hashes, three of 700 tokens the largest."""
    documents = make_documents([10] * 9000 + [700] * 3)
    chosen = evaluation_documents(documents, budget_of(config, "eval_bytes"))
    assert chosen == [*range(3334), 9000]  # 100 kB, and seq_len = 256 tokens
    config.data.seq_len = 20_000
    chosen = evaluation_documents(documents, budget_of(config, "eval_bytes"))
    assert chosen == [*range(8000), 9000]  # 80,000 tokens
    config.train.eval_bytes = 100
    chosen = evaluation_documents(documents, budget_of(config, "eval_bytes"))
    assert chosen == [0, 1, 2, 3]  # as given


def test_a_budget_counts_whole_documents(config, corpus):
    model, parallel = model_of(config, corpus)
    least = corpus.held_out.hash.argmin()
    result = evaluate(model, corpus.held_out, config, parallel, budget=1)
    assert result.n_bytes == int(corpus.held_out.n_bytes[least])
    assert result.tokens == int(corpus.held_out.lengths[least]) - 1


def test_in_a_window_of_one_token_no_other_token_counts(config, corpus):
    """With the window (0, 0), replacing a document's first words changes no later loss by a bit."""
    config.model.zero_init = False
    model, parallel = model_of(config, corpus)
    results = [
        evaluate(model, corpus.held_out, config, parallel, None, w) for w in [(-1, -1), SELF_ONLY]
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
