"""If this fails, training on conversations uses wrong labels in some rank or epoch. Conversations
in a corpus: labels of samples, ranks and epochs, mixtures, tables, probes."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from tests.train.data.chats import (
    ANSWER,
    TEMPLATES,
    TURNS,
    USER,
    chat_tokenizer,
    data_of,
    says,
    tokenizer_folder,
    write_lines,
)
from train.checks.config import check
from train.config import Config, ConfigError
from train.data.batches import make_batch
from train.data.corpus import find_files
from train.data.mixture import training_samples
from train.data.samples import IGNORED
from train.data.shards import Corpus, cache_key, open_corpus
from train.probes.text import tokenised
from train.sections.data import SourceConfig
from train.tasks import check as check_task


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tokenizer_folder(tmp_path)


@pytest.fixture
def chats(config: Config, folder: Path, tmp_path: Path) -> Config:
    """Sixty conversations of one to three turns; in every tenth the assistant says nothing."""
    keys = data_of(folder, "chatml")
    records = []
    for number in range(60):
        turns = [says("user", f"{number}: {USER}"), says("assistant", f"{number}. {ANSWER}")]
        turns = turns[:1] if number % 10 == 9 else turns * (1 + number % 3)
        records.append({"messages": turns})
    config.data = replace(
        keys, path=str(write_lines(tmp_path / "chats.jsonl", records)), held_out=0.2
    )
    config.data.cache_dir, config.data.seq_len = str(tmp_path / "cache"), 64
    return config


def learned(corpus: Corpus, tokens: list[int]) -> str:
    return corpus.tokenizer.decode(tokens, skip_special_tokens=False)


@pytest.mark.parametrize("packing", ["stream", "best_fit"])
@pytest.mark.parametrize("world", [1, 2])
def test_only_answers_are_labels_of_any_rank(chats, packing, world, capsys):
    """In an epoch, over all ranks of a sample: each answer once, and their bytes."""
    chats.data.packing = packing
    check(chats, world=1)
    for _ in range(2):  # every start says so
        corpus = open_corpus(chats.data)
        assert re.search(
            r"data\.path: 6 left out \(chats\.jsonl:10, .*\): a record without an answer",
            capsys.readouterr().out,
        )
    documents = corpus.train
    assert len(documents) + len(corpus.held_out) == 54
    expected = {}
    for number in range(len(documents)):
        mask = documents.loss_mask(number)
        expected[number] = documents.tokens(number, 0, 10**6)[mask].tolist()
        answers = learned(corpus, expected[number]).split("<|im_end|>")
        assert all(answer.endswith(ANSWER) for answer in answers[:-1])
        assert answers[-1] == ""
    samples = training_samples(documents, chats.data, seed=0)
    total = int(documents.lengths.sum())
    count, labels, n_valid, n_bytes = 0, [], 0, 0
    for index in range(10**6):
        if count >= total:
            break
        sample = samples[index]
        count += len(sample.tokens)
        for rank in range(world):
            batch = make_batch(sample, (rank, world) if world > 1 else None, "zigzag")
            n_valid += batch.n_valid
            labels += batch.labels[batch.labels != IGNORED].tolist()
            n_bytes += batch.n_bytes
    if packing == "best_fit":  # a slice at the end of a sample of stream belongs to two epochs
        assert sorted(labels) == sorted(token for own in expected.values() for token in own)
        assert n_valid == len(labels)
        assert abs(n_bytes - documents.n_bytes.sum()) <= index
    end = corpus.tokenizer.token_to_id("<|im_start|>")
    assert end not in labels


def test_samples_without_a_document_mask_learn_answers_alone(chats):
    corpus = open_corpus(chats.data)
    chats.data.document_mask = False
    samples = training_samples(corpus.train, chats.data, seed=0)
    labels = np.concatenate([samples[index].labels for index in range(30)])
    text = learned(corpus, labels[labels != IGNORED].tolist())
    assert "<|im_start|>" not in text
    assert "user" not in text
    assert "<|im_end|>" in text


def test_text_and_conversations_are_mixed(chats, text_folder):
    """A text has loss on all tokens but BOS; without conversations no file of loss is written."""
    data = chats.data
    book = SourceConfig(path=str(text_folder), pattern="*.txt", format="text")
    data.sources = {"book": book, "chat": SourceConfig(path=data.path)}
    data.path = None
    corpus = open_corpus(data)
    text, chat = (corpus.train.of_source(number) for number in range(2))
    for number in range(len(text)):
        assert text.loss_mask(number).tolist() == [False] + [True] * (int(text.lengths[number]) - 1)
    assert all(not chat.loss_mask(number).all() for number in range(len(chat)))
    files = {*Path(data.cache_dir).glob("*/*/*.loss.bin")}
    assert len(files) == 2
    data.sources = {"book": book}
    assert open_corpus(data).train.loss is None
    assert {*Path(data.cache_dir).glob("*/*/*.loss.bin")} == files


def test_the_key_of_a_cache_has_the_template_of_conversations_alone(chats, folder):
    data = replace(chats.data, format="text")
    plain = cache_key(data, [])
    before = cache_key(chats.data, find_files(chats.data))
    (folder / "chat_template.jinja").write_text(TEMPLATES["mistral"][1])
    assert cache_key(data, []) == plain
    assert cache_key(chats.data, find_files(chats.data)) != before


def test_parquet_and_a_probe_read_the_same(chats, tmp_path):
    """The rows of a table give the documents of the lines; ``eval.path`` reads either."""
    lines = tokenised(chats.data, chat_tokenizer())
    records = [json.loads(line) for line in Path(chats.data.path).read_text().splitlines()]
    parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "chats.parquet")
    chats.data.path = str(tmp_path / "chats.parquet")
    rows = tokenised(chats.data, chat_tokenizer())
    assert len(rows) == len(lines) == 54
    for number in range(len(rows)):
        assert rows.tokens(number, 0, 10**6).tolist() == lines.tokens(number, 0, 10**6).tolist()
        assert rows.loss_mask(number).tolist() == lines.loss_mask(number).tolist()
    chats.data.format = "completion"
    with pytest.raises(ConfigError, match=r"parquet has: messages; nearest valid: .*=chat"):
        tokenised(chats.data, chat_tokenizer())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer": None}, r"data\.format=chat needs a tokenizer"),
        ({"format": "chats"}, r"data\.format=chats: .*nearest valid: data\.format=chat"),
        ({"chat_template": "/nowhere"}, r"data\.chat_template=/nowhere does not exist"),
        ({"path": None, "sources": {"a": SourceConfig("/", format="x")}}, r"sources\.a\.format=x"),
    ],
)
def test_settings_of_conversations_are_checked(chats, changes, message):
    chats.data = replace(chats.data, **changes)
    with pytest.raises(ConfigError, match=message):
        check(chats, world=1)


def test_an_empty_split_of_conversations_is_named(chats):
    write_lines(Path(chats.data.path), [{"messages": TURNS[:1]}] * 3)
    with pytest.raises(ConfigError, match=r"holds no text; .*: 3 left out .*without an answer"):
        open_corpus(chats.data)


def test_a_file_without_records_is_named(chats, tmp_path):
    (tmp_path / "all").mkdir()
    (tmp_path / "all" / "README.md").write_text("chats")
    chats.data.path = str(tmp_path / "all")
    (tmp_path / "all" / "package.json").write_text('{"name": "chats"}')
    message = (
        r"package\.json\): a \.json whose first .* data\.format=chat.*README\.md\): no records"
    )
    with pytest.raises(ConfigError, match=message):
        open_corpus(chats.data)


def test_mode_check_needs_the_template_of_conversations(chats, folder):
    check_task.run(chats)
    (folder / "chat_template.jinja").write_text("{% for m in messages %}")
    with pytest.raises(ConfigError, match="the chat template is not valid"):
        check_task.run(chats)
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match="has no chat template in its folder"):
        check_task.run(chats)
