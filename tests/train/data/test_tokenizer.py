"""If this fails, a tokenizer file gives other tokens than its text has, or its training takes
hours. Tokenizer files: settings that change no token. Training is linear, and shows progress."""

from __future__ import annotations

import json
import random
import string
import time
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from train.config import ConfigError
from train.data import shards, tokenizer
from train.data.encoder import DocumentEncoder
from train.data.shards import open_corpus
from train.data.tokenizer import encode, load_tokenizer, train_tokenizer
from train.sections.data import SourceConfig
from train.tasks.baselines import measure_baselines
from train.tasks.generate import never_generated

BOS = "<|endoftext|>"
TEXT = "the ring keeps every token of every text, and attends to all of them; " * 3


@pytest.fixture
def plain():
    """A tokenizer of at most 300 tokens that never truncates, pads or drops a merge."""
    return train_tokenizer([TEXT], 300, BOS)


def write(path: Path, of: Tokenizer, **model) -> Path:
    content = json.loads(of.to_str())
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
            assert split.text(number).tolist() == ids


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
    config.data.eos_token = "none"
    monkeypatch.setattr(shards.corpus, "fingerprint", lambda files: "")
    assert shards.cache_key(config.data, []) == former_key(config.data)


def test_a_tokenizer_that_is_trained_has_caches_of_its_own(config, monkeypatch):
    """Earlier versions trained without a cut, so the same text may have given other tokens."""
    monkeypatch.setattr(shards.corpus, "fingerprint", lambda files: "")
    key = shards.cache_key(config.data, [])
    monkeypatch.setattr(shards, "LONGEST_PRE_TOKEN", 512)
    assert shards.cache_key(config.data, []) != key


def test_a_file_without_tokens_is_named(config, tmp_path):
    config.data.tokenizer = str(write(tmp_path / "tokenizer.json", Tokenizer(models.BPE())))
    with pytest.raises(ConfigError, match=r"is not a token of data\.tokenizer"):
        open_corpus(config.data)


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


def test_training_is_linear_in_runs_without_spaces():
    """Four times the letters take at most eight times as long; without the cut, 16 times."""
    longest = max(map(len, train_tokenizer(["a" * 10_000], 300, BOS).get_vocab()))
    assert longest == tokenizer.LONGEST_PRE_TOKEN
    letters = "".join(random.Random(0).choices(string.ascii_lowercase, k=60_000))

    def seconds(count):
        begin = time.process_time()
        assert train_tokenizer([letters[:count]], 1000, BOS).get_vocab_size() == 1000
        return time.process_time() - begin

    assert seconds(60_000) < 8 * min(seconds(15_000) for _ in range(2))


def test_a_tokenizer_of_ordinary_text_is_that_of_training_without_a_cut(text_folder):
    texts = [path.read_text() for path in sorted(text_folder.rglob("*.txt"))]
    texts += [Path(__file__).read_text(), "#" * 200 + " " * 200 + "\n"]
    texts += ["一二三四五六七八九十" * 8 + "。", "环形注意力" * 17 + "\n"]  # 240 and 255 bytes
    plain = Tokenizer(models.BPE())
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=[BOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    plain.train_from_iterator(texts, trainer)
    assert train_tokenizer(texts, 600, BOS).to_str() == plain.to_str()


def test_a_cut_run_is_encoded_without_loss():
    trained = train_tokenizer(["ab" * 1000, TEXT], 300, BOS)
    text = "ab" * 700 + " the ring\n"
    (ids,) = encode(trained, [text])
    assert trained.decode(ids) == text
    assert len(ids) < 40


def test_training_logs_its_progress(monkeypatch):
    monkeypatch.setattr(tokenizer, "PROGRESS_S", 0.02)

    def slowly():
        for _ in range(4):
            time.sleep(0.05)
            yield "".join(random.Random(0).choices(string.ascii_lowercase, k=20_000))

    lines = []
    train_tokenizer(slowly(), 2000, BOS, lines.append)
    assert any("reads text: 0.0 million characters" in line for line in lines)
    assert any("merges pairs of tokens: 0.1 million characters" in line for line in lines)
    n_lines = len(lines)
    time.sleep(0.06)
    assert len(lines) == n_lines


@pytest.mark.parametrize("last", [350, 70_000])  # the second needs more than 16 bits
def test_ids_with_holes_have_rows_up_to_the_largest(config, plain, tmp_path, last):
    content = json.loads(plain.to_str())
    vocabulary = content["model"]["vocab"]
    n_tokens = len(vocabulary)
    vocabulary["e"] = last  # a frequent letter
    path = write(tmp_path / "tokenizer.json", plain, vocab=vocabulary)
    config.data.tokenizer, config.data.bos_token = str(path), BOS
    corpus = open_corpus(config.data)
    assert corpus.tokenizer.get_vocab_size() == n_tokens
    ids = [corpus.train.tokens(n, 0, 10**6) for n in range(len(corpus.train))]
    assert max(map(max, ids)) == last
    assert corpus.train.vocab_size == tokenizer.vocabulary_size(corpus.tokenizer) == last + 1
    assert measure_baselines(corpus, None)["unigram"] > 0
    holes = set(range(last)) - set(vocabulary.values())
    encoder = DocumentEncoder(corpus.tokenizer, config.data)
    assert set(never_generated(config, encoder)) == holes  # BOS ends documents too
    config.model.vocab_size = n_tokens
    with pytest.raises(ConfigError, match=rf"ids go up to {last}; .*model.vocab_size={last + 1}"):
        never_generated(config, encoder)
