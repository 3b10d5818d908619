"""If this fails, `mode=eval` reports a wrong loss. ``mode=eval``: the run's held-out text or a
file, in one process or several."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.train.jobs import run_ranks
from train.config import ConfigError, DataConfig
from train.data import corpus
from train.data.corpus import find_files, read_documents
from train.data.documents import DocumentError
from train.data.encoder import DocumentEncoder
from train.data.tokenizer import encode, load_tokenizer
from train.engine.stored_checkpoint import find_checkpoint
from train.log.units import in_words
from train.probes.text import read_text, require_own_text, tokenised


def result(folder: Path, name: str) -> dict:
    return json.loads((folder / f"eval-{name}.json").read_text())


def test_the_held_out_loss_is_that_of_the_summary(pretrain, trained_run):
    """The final evaluation in ``summary.json``, to 1e-6: the same weights over the same bytes."""
    done = pretrain("mode=eval", f"run.dir={trained_run}")
    assert done.returncode == 0, done.stderr
    got = result(trained_run, "held-out")
    summary = json.loads((trained_run / "summary.json").read_text())
    assert got["nats_per_byte"] == pytest.approx(summary["nats_per_byte"], rel=1e-6)
    assert got["bytes"] == summary["held_out_bytes"]
    assert got["tokens"] == summary["held_out_tokens"]
    rows = got["by_position"]
    assert sum(row["tokens"] for row in rows) == got["tokens"]
    total = sum(row["tokens"] * (row["nats_per_token"] or 0) for row in rows)
    assert total / got["tokens"] == pytest.approx(got["nats_per_token"], rel=1e-9)
    assert got["nats_per_token"] < 5.6  # less than log(300), where training began
    for row in rows:
        assert row["positions"] in done.stdout
    assert in_words(got["nats_per_token"], got["nats_per_byte"]) in done.stdout
    assert (trained_run / "eval-held-out.png").stat().st_size > 10_000


def test_the_loss_of_a_text_is_the_same_over_two_ranks(pretrain, trained_run, tmp_path):
    """A file outside the run's corpus, in one CP group that reads two samples of the run at once:
    every bucket to 1e-5."""
    text = tmp_path / "tale.txt"
    text.write_text("a long tale of λ rings\n" * 60)
    common = ["mode=eval", f"run.dir={trained_run}", f"eval.path={text}"]
    done = pretrain(*common)
    assert done.returncode == 0, done.stderr
    run_ranks(2, *common, "eval.name=spread", "parallel.cp=all", "data.tokens_per_rank=200")
    one, two = result(trained_run, "tale"), result(trained_run, "spread")
    assert one["bytes"] == len(text.read_bytes())
    assert one["nats_per_byte"] == pytest.approx(two["nats_per_byte"], rel=1e-5)
    assert len(one["by_position"]) > 5
    for a, b in zip(one["by_position"], two["by_position"], strict=True):
        assert a["tokens"] == b["tokens"]
        assert a["nats_per_token"] == pytest.approx(b["nats_per_token"], rel=1e-5)


def test_a_tokenised_text_holds_its_documents(text_folder, trained_run):
    """Against encoding each document by itself, for a single file and for a folder."""
    tokenizer = load_tokenizer(trained_run / "tokenizer.json")
    for path in (text_folder / "7.txt", text_folder / "deep"):
        data = DataConfig(path=str(path))
        documents = tokenised(data, tokenizer)
        texts = [d.text for file in find_files(data) for d in read_documents(file)]
        assert len(documents) == len(texts) == (1 if path.is_file() else 20)
        for number, text in enumerate(texts):
            (ids,) = encode(tokenizer, [text])
            length = int(documents.lengths[number])
            assert np.array_equal(documents.tokens(number, 0, length), [0, *ids, 0])
            assert documents.n_bytes[number] == len(text.encode())


def test_a_file_is_tokenised_while_it_is_read(trained_run, tmp_path, monkeypatch):
    """A few documents are in memory as texts, also of one file; errors name their document."""
    path, count, most = tmp_path / "lines.jsonl", 1000, 0
    path.write_text("".join(f'{{"text": "line {number}"}}\n' for number in range(count)))
    read: list[object] = []
    documents_of, encoded = corpus.read_documents, DocumentEncoder.documents

    def counted(*arguments):
        for document in documents_of(*arguments):
            read.append(document)
            yield document

    def watched(encoder, documents):
        nonlocal most
        most = max(most, len(read))
        read.clear()
        if any("line 700" in document.text for document in documents):
            raise RuntimeError("no such token")
        return encoded(encoder, documents)

    monkeypatch.setattr(corpus, "read_documents", counted)
    monkeypatch.setattr(DocumentEncoder, "documents", watched)
    tokenizer = load_tokenizer(trained_run / "tokenizer.json")
    with pytest.raises(DocumentError, match=r"document lines\.jsonl:701: .*no such token"):
        tokenised(DataConfig(path=str(path)), tokenizer)
    assert 0 < most < count / 10


def test_a_text_that_cannot_be_evaluated_is_rejected(text_folder, trained_run, tmp_path, config):
    tokenizer = load_tokenizer(trained_run / "tokenizer.json")
    with pytest.raises(ConfigError, match=r"^eval\.path: 1 left out \(binary\.dat\): UTF-16"):
        tokenised(DataConfig(path=str(text_folder)), tokenizer)
    (tmp_path / "empty.txt").touch()
    with pytest.raises(ConfigError, match=r"empty\.txt holds no text"):
        tokenised(DataConfig(path=str(tmp_path / "empty.txt")), tokenizer)


def test_a_corpus_that_has_changed_is_rejected(config, trained_run, tmp_path):
    tokenizer = load_tokenizer(trained_run / "tokenizer.json")
    documents, _ = read_text(config, tokenizer)
    assert len(documents) > 0
    config.data.path = str(tmp_path / "other")
    (tmp_path / "other").mkdir()
    for number in range(20):
        (tmp_path / "other" / f"{number}.txt").write_text(f"something else, {number} times over")
    with pytest.raises(ConfigError, match=r"data\.path=.*eval\.path="):
        read_text(config, tokenizer)


def test_the_text_of_a_run_must_be_the_same_to_the_byte(config, trained_run, tmp_path):
    """With a given tokenizer, which does not change with the files."""
    own = shutil.copytree(config.data.path, tmp_path / "text")
    config.data.path = str(own)
    config.data.tokenizer = str(trained_run / "tokenizer.json")
    tokenizer = load_tokenizer(trained_run / "tokenizer.json")
    checkpoint = find_checkpoint(trained_run, print)
    _, digest = read_text(config, tokenizer)
    require_own_text(config, digest, checkpoint)
    (own / "7.txt").write_text("something else")
    _, digest = read_text(config, tokenizer)
    with pytest.raises(ConfigError, match=r"data\.path=.* is not what .*step-.*eval\.path="):
        require_own_text(config, digest, checkpoint)


def test_a_changed_text_ends_the_evaluation(pretrain, trained_run, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(trained_run, folder, ignore=shutil.ignore_patterns("eval-*"))
    text = tmp_path / "text"
    text.mkdir()
    for number in range(20):
        (text / f"{number}.txt").write_text(f"something else, {number} times over")
    changed = [f"data.path={text}", f"data.tokenizer={folder}/tokenizer.json"]
    done = pretrain("mode=eval", f"run.dir={folder}", *changed)
    assert done.returncode == 2
    assert f"data.path={text} is not what {folder}" in done.stderr
    assert not (folder / "eval-held-out.json").exists()


def test_errors_about_the_text_name_eval_path(trained_run, tmp_path):
    """The field and the pattern of its files are still those of ``data``."""
    tokenizer = load_tokenizer(trained_run / "tokenizer.json")
    path = tmp_path / "a.jsonl"
    for content, message in (
        ('{"text": 1', r"^eval\.path: .*a\.jsonl:1 is not JSON"),
        ('{"body": "a"}', r"^data\.text_field=text: .*a\.jsonl:1 has no such"),
    ):
        path.write_text(content)
        with pytest.raises(ConfigError, match=message):
            tokenised(DataConfig(path=str(path)), tokenizer)
    with pytest.raises(ConfigError, match=r"^eval\.path=.* contains no file that matches \*\.md"):
        tokenised(DataConfig(path=str(tmp_path), pattern="*.md"), tokenizer)
    with pytest.raises(ConfigError, match=r"^data\.pattern=/\*.* relative to eval\.path"):
        tokenised(DataConfig(path=str(tmp_path), pattern="/*"), tokenizer)
