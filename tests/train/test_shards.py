"""Tokenised corpora: lossless, made once, made again when something changes, checked when read."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from train import shards
from train.config import ConfigError
from train.corpus import find_sources, is_held_out, read_documents
from train.shards import DamagedShardsError, SplitWriter, open_corpus
from train.tokenizer import encode, load_tokenizer, train_tokenizer

BOS = "<|endoftext|>"


def texts_of(documents, tokenizer):
    for number in range(len(documents)):
        ids = documents.tokens(number, 0, int(documents.lengths[number])).tolist()
        assert ids[0] == tokenizer.token_to_id(BOS)
        yield tokenizer.decode(ids[1:], skip_special_tokens=False)


def test_both_splits_hold_every_text_unchanged(config):
    corpus = open_corpus(config.data)
    expected = {"train": [], "held_out": []}
    for source in find_sources(config.data):
        if source.path.suffix == ".txt":
            for document in read_documents(source, "text"):
                split = "held_out" if is_held_out(document.name, 0.2) else "train"
                expected[split].append(document)
    for split, documents in expected.items():
        stored = getattr(corpus, split)
        assert list(texts_of(stored, corpus.tokenizer)) == [d.text for d in documents]
        assert stored.n_bytes.tolist() == [d.n_bytes for d in documents]
    assert len(expected["held_out"]) > 3


def test_a_corpus_is_made_once_by_one_of_many(config, monkeypatch):
    builds = []
    build = shards._build
    monkeypatch.setattr(shards, "_build", lambda *args: (builds.append(1), build(*args)))
    threads = [threading.Thread(target=open_corpus, args=(config.data,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    open_corpus(config.data)
    assert len(builds) == 1


def test_a_changed_file_or_setting_makes_a_new_corpus(config, tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(20):
        (folder / f"{number}.txt").write_text(f"number {number} " * 20)
    config.data.path = str(folder)
    first = open_corpus(config.data)
    assert open_corpus(config.data).digest == first.digest
    (folder / "3.txt").write_text("something else")
    changed = open_corpus(config.data)
    assert changed.digest != first.digest
    config.data.vocab_size = 270
    assert open_corpus(config.data).tokenizer.get_vocab_size() == 270
    assert len(list(Path(config.data.cache_dir).glob("*/manifest.json"))) == 3


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("vocab_size", 301),
        ("held_out", 0.3),
        ("bos_token", "<s>"),
        ("text_field", "body"),
        ("pattern", "deep/*"),
    ],
)
def test_every_setting_that_changes_tokens_changes_the_key(config, name, value):
    before = shards.cache_key(config.data, find_sources(config.data))
    setattr(config.data, name, value)
    assert shards.cache_key(config.data, find_sources(config.data)) != before


def test_what_a_killed_build_left_is_replaced(config):
    key = shards.cache_key(config.data, find_sources(config.data))
    leftover = Path(config.data.cache_dir) / f"{key}.tmp"
    (leftover / "train").mkdir(parents=True)
    assert len(open_corpus(config.data).train)
    assert not leftover.exists()


def _damage(folder: Path, how: str) -> None:
    path = folder / "train" / "00000.bin"
    content = bytearray(path.read_bytes())
    if how == "truncated":
        path.write_bytes(content[:-2])
    elif how == "missing":
        path.unlink()
    elif how == "flipped bit":
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    elif how == "index":
        index = folder / "train" / "index.npz"
        content = bytearray(index.read_bytes())
        content[-1] ^= 1
        index.write_bytes(content)
    elif how == "manifest":
        (folder / "manifest.json").write_text("{")


@pytest.mark.parametrize("how", ["truncated", "missing", "flipped bit", "index", "manifest"])
def test_a_damaged_corpus_is_refused_with_the_remedy(config, how):
    open_corpus(config.data)
    (folder,) = (p.parent for p in Path(config.data.cache_dir).glob("*/manifest.json"))
    _damage(folder, how)
    with pytest.raises(DamagedShardsError, match=rf"delete {folder}"):
        open_corpus(config.data)


def test_an_empty_split_names_the_share(config, text_folder):
    config.data.path = str(text_folder / "1.txt")
    with pytest.raises(ConfigError, match=r"data\.held_out=0\.2"):
        open_corpus(config.data)
    assert not list(Path(config.data.cache_dir).glob("*/"))


def test_a_split_over_several_files_reads_as_one(tmp_path):
    writer = SplitWriter(tmp_path / "split", np.dtype(np.uint16), bos=9, shard_tokens=5)
    texts = [[1, 2, 3], [4], [], [5, 6, 7, 8], [1]]
    for ids in texts:
        writer.add(ids, n_bytes=len(ids))
    writer.close()
    assert len(list((tmp_path / "split").glob("*.bin"))) == 3
    documents = shards._open_split(tmp_path / "split", np.dtype(np.uint16))
    for number, ids in enumerate(texts):
        assert documents.tokens(number, 0, 99).tolist() == [9, *ids]
    assert documents.tokens(3, 1, 3).tolist() == [5, 6]


def test_a_tokenizer_can_be_loaded_and_must_have_the_bos_token(config, tmp_path):
    path = tmp_path / "tokenizer.json"
    train_tokenizer(["some text to learn from"], 280, "<s>").save(str(path))
    config.data.tokenizer = str(path)
    with pytest.raises(ConfigError, match=r"data\.bos_token=.*special tokens: <s>"):
        open_corpus(config.data)
    config.data.bos_token = "<s>"
    assert open_corpus(config.data).tokenizer.get_vocab_size() <= 280
    path.write_text("{}")
    with pytest.raises(ConfigError, match=r"is not a tokenizer\.json"):
        load_tokenizer(path)


def test_special_tokens_in_a_text_stay_text():
    tokenizer = train_tokenizer([f"a {BOS} b"] * 3, 300, BOS)
    (ids,) = encode(tokenizer, [f"a {BOS} b"])
    assert 0 not in ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == f"a {BOS} b"


def test_the_same_texts_give_the_same_tokenizer():
    texts = ["the ring keeps every token", "λ naïve tokens"] * 5
    one, two = (train_tokenizer(texts, 300, BOS).to_str() for _ in range(2))
    assert one == two
