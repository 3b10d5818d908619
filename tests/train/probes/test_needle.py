"""If this fails, the needle test reports a wrong share. Needles: what a trial contains, what counts
as a match, and the same over two ranks."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from torch.nn import functional as F

from tests.support.ranks import Ranks
from tests.train.model.test_transformer import build, packed_sample
from train.config import Config, ConfigError, DataConfig, NeedleConfig
from train.data.batches import make_batch
from train.data.encoder import DocumentEncoder
from train.data.samples import IGNORED
from train.data.shards import open_corpus
from train.data.tokenizer import train_tokenizer
from train.engine.parallel import ParallelLayout
from train.log.plots import plot_needle
from train.model.transformer import LanguageModel, Transformer
from train.probes.haystack import Haystack, Trial, all_trials
from train.probes.needle import cells_of, find

BOS = "<|endoftext|>"
ALONE = ParallelLayout(rank=0, world=1, cp=1, device=torch.device("cpu"))


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["The value of a ring is 12345\n" * 9], 290, BOS)


@pytest.fixture
def haystack(make_documents, tokenizer):
    """Its running text are the tokens 100 to 199."""
    documents = make_documents([101, 100])
    documents.shards[0][:] = 100 + np.arange(201) % 100
    needle = NeedleConfig(lengths=[300, 400], digits=4, trials=2)
    return Haystack(documents, DocumentEncoder(tokenizer, DataConfig()), needle)


def test_running_text_has_no_ends_of_documents(config):
    config.data.eos_token = "</s>"
    corpus = open_corpus(config.data)
    encoder = DocumentEncoder(corpus.tokenizer, config.data)
    needle = NeedleConfig(lengths=[2000])
    haystack = Haystack(corpus.held_out, encoder, needle)
    tokens = haystack.sample(Trial("single", 2000, 0.5, 0)).tokens.tolist()
    assert (tokens.count(encoder.bos), tokens.count(encoder.eos)) == (1, 0)
    assert tokens[0] == encoder.bos


def text_of(haystack: Haystack, trial: Trial) -> str:
    sample = haystack.sample(trial)
    answer = sample.labels[sample.labels != IGNORED]
    assert len(sample.tokens) == len(sample.labels) == trial.length - 1 == sample.cu_seqlens[-1]
    assert (sample.labels[: -len(answer)] == IGNORED).all()
    assert sample.tokens[-len(answer) + 1 :].tolist() == answer[:-1].tolist()
    assert sample.tokens[0] == haystack.encoder.bos
    whole = [*sample.tokens[1:].tolist(), int(answer[-1])]
    return haystack.encoder.tokenizer.decode(whole, skip_special_tokens=False)


def test_a_trial_holds_its_fact_and_ends_with_its_answer(haystack):
    for depth in (0.0, 0.5, 1.0):
        text = text_of(haystack, Trial("single", 300, depth, 0))
        before, _, rest = text.partition("\nThe value of ")
        name, number = rest[:5], rest[9:13]
        assert rest.startswith(f"{name} is {number}\n")
        assert text.endswith(f"\nThe value of {name} is {number}")
        assert text.count("\nThe value of ") == 2
        between = rest.partition("\n")[2].partition("\nThe value of ")[0]
        share = len(before) / (len(before) + len(between))
        assert share == pytest.approx(depth, abs=0.05)


def test_other_keys_have_other_numbers(haystack):
    text = text_of(haystack, Trial("multi_key", 400, 0.5, 1))
    *needles, question = text.split("\nThe value of ")[1:]
    values = {needle[:5]: needle[9:13] for needle in needles}
    assert len(values) == 1 + haystack.needle.others
    assert question == f"{question[:5]} is {values[question[:5]]}"


def test_a_variable_is_passed_on_from_name_to_name(haystack):
    for depth in (0.3, 1.0):
        text = text_of(haystack, Trial("variable", 400, depth, 0))
        first, *others, question = text.split("\nThe value of ")[1:]
        name, number = first[:5], first[9:13]
        for needle in others:
            assert needle[9:14] == name
            name = needle[:5]
        assert len(others) == haystack.needle.hops
        assert question == f"{name} is {number}"


def test_trials_differ_and_are_repeated_by_the_seed(haystack, make_documents, tokenizer):
    trials = all_trials(haystack.needle)
    assert len(trials) == len(set(trials)) == 3 * 2 * 5 * 2
    texts = [text_of(haystack, trial) for trial in trials]
    assert len(set(texts)) == len(texts)
    assert [text_of(haystack, trial) for trial in trials] == texts
    haystack.needle.seed = 1
    assert text_of(haystack, trials[0]) != texts[0]


def test_a_length_without_room_is_refused(haystack):
    with pytest.raises(ConfigError) as raised:
        haystack.sample(Trial("variable", 20, 0.5, 0))
    least = int(str(raised.value).rpartition("[")[2].rstrip("]"))
    haystack.sample(Trial("variable", least, 0.5, 0))
    with pytest.raises(ConfigError):
        haystack.sample(Trial("variable", least - 1, 0.5, 0))


def test_a_match_needs_every_token_of_the_answer(haystack):
    """A model that is right except for the second of four digits in every third trial."""
    config, trials = Config(), all_trials(haystack.needle)[:12]
    calls = iter(range(len(trials)))

    def hits(batch):
        right = torch.ones_like(batch.labels, dtype=torch.bool)
        if next(calls) % 3 == 0:
            right[-2] = False
        return right

    matches = find(hits, haystack, trials, config, ALONE)
    assert matches == [number % 3 != 0 for number in range(12)]
    cells = cells_of(trials, matches)
    assert [cell["matches"] for cell in cells] == [1, 1, 2, 1, 1, 2]
    assert all(cell["trials"] == 2 for cell in cells)


def _hits(group: dist.ProcessGroup | None, labels: torch.Tensor | None) -> torch.Tensor:
    """Hits on every token; without ``labels``, the most probable tokens themselves."""
    transformer = Transformer(build().transformer.config, 97, 3, group=group)
    model = LanguageModel(transformer, torch.float32, loss_chunk=20)
    sample = packed_sample([150, 41])
    if labels is not None:
        sample.labels[:] = labels.numpy()
    batch = make_batch(sample, group, "zigzag")
    with torch.no_grad():
        if labels is None:
            hidden = transformer(batch.tokens, batch.positions, batch.plan)
            return F.linear(hidden, transformer.head).argmax(-1)
        return batch.plan.unshard(model.hits(batch))


def test_two_ranks_find_exactly_what_one_process_finds(ranks: Ranks):
    """Labels: the most probable token at even positions, another at odd ones, none at every 5th."""
    labels = _hits(None, None)
    expected = torch.arange(len(labels)) % 2 == 0
    labels = torch.where(expected, labels, (labels + 1) % 97)
    labels[::5], expected[::5] = IGNORED, False
    assert torch.equal(_hits(None, labels), expected)
    for found in ranks.run(2, _hits, labels):
        assert torch.equal(found, expected)


def test_the_plot_has_a_panel_a_task(tmp_path: Path, drawn: list[Figure]):
    """Shares by depth and length: each panel's image is that of its task."""
    needle = NeedleConfig(lengths=[64, 128], depths=[0.0, 0.5, 1.0], trials=2)
    trials = all_trials(needle)
    found = [trial.task == "single" and trial.length == 64 for trial in trials]
    plot_needle(tmp_path / "needle.png", cells_of(trials, found))
    (figure,) = drawn
    panels = {axes.get_title(): axes.get_images()[0].get_array() for axes in figure.axes[:-1]}
    assert list(panels) == needle.tasks
    assert panels["single"].tolist() == [[1, 0]] * 3
    assert panels["variable"].tolist() == [[0, 0]] * 3
    cells = [text.get_text() for text in figure.axes[0].texts]
    assert cells == ["2/2", "2/2", "2/2", "0/2", "0/2", "0/2"]
    assert (tmp_path / "needle.png").exists()


@pytest.mark.soak
def test_a_job_writes_the_same_result_on_two_ranks(pretrain, trained_run):
    """On the command line: needle.json of one process and of two that share each trial."""
    common = ["mode=needle", f"run.dir={trained_run}", "needle.lengths=[150,250]"]
    results = []
    for processes in (None, 2):
        done = pretrain(*common, "parallel.cp=all", processes=processes)
        assert done.returncode == 0, done.stderr
        results.append(json.loads((trained_run / "needle.json").read_text()))
    assert results[0] == results[1]
    assert len(results[0]["cells"]) == 3 * 2 * 5
    assert (trained_run / "needle.png").stat().st_size > 10_000
