"""Tokenizer files: nothing in them changes tokens unseen; training is linear and shows progress."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import processors

from train.config import SourceConfig
from train.data import shards
from train.data.shards import open_corpus
from train.data.tokenizer import encode, load_tokenizer, train_tokenizer

BOS = "<s>"
TEXT = "the ring keeps every token of every text, and attends to all of them; " * 3


@pytest.fixture
def plain():
    """A tokenizer of 300 tokens that never truncates, pads or drops a merge."""
    return train_tokenizer([TEXT], 300, BOS)


def write(path: Path, tokenizer, **model) -> Path:
    content = json.loads(tokenizer.to_str())
    content["model"] |= model
    path.write_text(json.dumps(content))
    return path


ALTERED = {
    "truncation": lambda t: t.enable_truncation(4),
    "padding": lambda t: t.enable_padding(length=500, pad_id=1),
    "dropout": lambda t: None,
}


@pytest.fixture(params=ALTERED)
def altered(request, plain, config, tmp_path) -> str:
    """A setting of the tokenizer file that changes tokens; ``config`` names the file."""
    config.data.bos_token = BOS
    ALTERED[request.param](plain)
    dropout = {"dropout": 0.5} if request.param == "dropout" else {}
    config.data.tokenizer = str(write(tmp_path / "tokenizer.json", plain, **dropout))
    return request.param


def test_truncation_padding_and_dropout_of_a_file_are_ignored(altered, config, text_folder):
    before = train_tokenizer([TEXT], 300, BOS)
    assert encode(load_tokenizer(Path(config.data.tokenizer)), [TEXT, "a"]) == encode(
        before, [TEXT, "a"]
    )
    corpus = open_corpus(config.data)
    texts = {
        p.relative_to(text_folder).as_posix(): p.read_text() for p in text_folder.rglob("*.txt")
    }
    for split in (corpus.train, corpus.held_out):
        for number in range(len(split)):
            (ids,) = encode(before, [texts[split.name(number)]])
            assert split.tokens(number, 1, int(split.lengths[number])).tolist() == ids


def test_a_start_names_what_it_ignores(altered, config, capsys, monkeypatch):
    values = {"truncation": "max_length 4", "padding": "{'Fixed': 500}", "dropout": "(0.5)"}
    for _ in range(2):  # the second start finds the cache
        open_corpus(config.data)
        (line,) = [x for x in capsys.readouterr().out.splitlines() if "switched off" in x]
        assert line.startswith(f"data.tokenizer={config.data.tokenizer}: switched off")
        assert f"{altered} (" in line
        assert values[altered] in line
    monkeypatch.setenv("RANK", "1")
    open_corpus(config.data)
    assert not capsys.readouterr().out


def former_key(data) -> str:
    """The key of versions that obeyed the settings of a file, for no text files."""
    content = Path(data.tokenizer).read_bytes()
    settings = [3, "", shards.hashlib.sha256(content).hexdigest(), None, data.bos_token]
    settings += [data.held_out, data.held_out_salt]
    return shards.hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:20]


def test_a_cache_of_a_version_that_obeyed_the_file_is_not_opened(altered, config, monkeypatch):
    monkeypatch.setattr(shards.corpus, "fingerprint", lambda files: "")
    assert shards.cache_key(config.data, []) != former_key(config.data)


def test_the_cache_of_a_file_without_such_settings_is_kept(config, plain, tmp_path, monkeypatch):
    config.data.tokenizer = str(write(tmp_path / "tokenizer.json", plain))
    monkeypatch.setattr(shards.corpus, "fingerprint", lambda files: "")
    assert shards.cache_key(config.data, []) == former_key(config.data)


def test_a_post_processor_changes_no_token_and_stays(plain, tmp_path):
    expected = encode(plain, [TEXT])
    plain.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A $A", special_tokens=[(BOS, 0)]
    )
    loaded = load_tokenizer(write(tmp_path / "tokenizer.json", plain))
    before = loaded.to_str()
    assert encode(loaded, [TEXT]) == expected
    assert loaded.to_str() == before == plain.to_str()


def test_a_run_goes_on_with_the_tokenizer_that_it_trained(config):
    first = open_corpus(config.data)
    (stored,) = Path(config.data.cache_dir).glob("*/tokenizer.json")
    config.data.tokenizer = str(stored)
    assert open_corpus(config.data).digest == first.digest


def test_unusual_bytes_per_token_are_named_for_each_source(config, tmp_path, capsys, plain):
    config.data.bos_token = BOS
    config.data.tokenizer = str(write(tmp_path / "tokenizer.json", plain))
    config.data.path = None
    for name, text in (("known", TEXT), ("other", "λόγος " * 40)):
        (tmp_path / name).mkdir()
        for number in range(20):
            (tmp_path / name / f"{number}.txt").write_text(f"{text}{number}")
        config.data.sources[name] = SourceConfig(path=str(tmp_path / name))
    open_corpus(config.data)
    (line,) = [x for x in capsys.readouterr().out.splitlines() if "bytes per token" in x]
    assert line.startswith("data.sources.other: 1.")
    assert "bytes per token, usual are 1.5 to 16; check that data.tokenizer fits" in line
