"""If this fails, text of a folder is left out without notice. What a corpus reads of a folder:
token ids as their text, long files, and what is left out."""

from __future__ import annotations

import gzip
import json
import os
import re
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from tests.train.text.megatron import write_megatron
from train.config import Config, ConfigError, DataConfig
from train.data.corpus import find_files
from train.data.encoder import DocumentEncoder
from train.data.manifest import read_manifest
from train.data.shards import cache_key, open_corpus
from train.data.tokenizer import load_tokenizer
from train.probes.text import tokenised
from train.sections.data import SourceConfig

TEXTS = [f"the ring keeps token {number} λ of a tale\n" * (1 + number % 3) for number in range(24)]


@pytest.fixture
def own(config: Config, tokenizer_file: Path, tmp_path: Path) -> Config:
    """A config over an empty folder, with a tokenizer."""
    (tmp_path / "own").mkdir()
    config.data.path, config.data.tokenizer = str(tmp_path / "own"), str(tokenizer_file)
    return config


def documents_of(corpus) -> dict[str, dict[int, tuple]]:
    """Of each split: the tokens and bytes of a document by its hash."""
    return {
        name: {
            int(split.hash[n]): (
                split.tokens(n, 0, int(split.lengths[n])).tolist(),
                int(split.n_bytes[n]),
            )
            for n in range(len(split))
        }
        for name, split in (("train", corpus.train), ("held_out", corpus.held_out))
    }


def test_a_corpus_of_token_ids_is_that_of_their_texts(own, tmp_path):
    """The same tokens, bytes, hashes and splits, from every format; also for ``eval.path``."""
    folder = Path(own.data.path)
    encoder = DocumentEncoder(load_tokenizer(Path(own.data.tokenizer)), own.data)
    ids = encoder.texts(TEXTS)
    eos = encoder.eos

    def write(name: str) -> None:
        if name == "a.txt":
            for number, text in enumerate(TEXTS):
                (folder / f"{number}.txt").write_text(text)
        elif name == "a.npy":
            np.save(folder / name, np.concatenate([[*d, eos] for d in ids]).astype(np.uint16))
        elif name == "a.bin":
            write_megatron(folder / name, ids, range(len(ids) + 1), 8)
        elif name == "a.parquet":
            table = pyarrow.table({"text": [[encoder.bos, *d, eos] for d in ids]})
            pyarrow.parquet.write_table(table, folder / name)
        else:
            (folder / name).write_text(json.dumps([{"text": d} for d in ids]))

    write("a.txt")
    expected = documents_of(open_corpus(own.data))
    assert len(expected["held_out"]) > 2
    for name in ("a.npy", "a.bin", "a.parquet", "a.json"):
        for path in folder.iterdir():
            path.unlink()
        write(name)
        corpus = open_corpus(own.data)
        assert documents_of(corpus) == expected
        assert corpus.train.name(0).startswith(f"{name}:")
        probed = tokenised(own.data, encoder.tokenizer)
        assert sorted(probed.lengths) == sorted(
            len(tokens) for split in expected.values() for tokens, _ in split.values()
        )
        if name == "a.bin":  # the .idx belongs to it
            before = cache_key(own.data, find_files(own.data))
            os.utime(folder / "a.idx", ns=(1, 1))
            assert cache_key(own.data, find_files(own.data)) != before
    own.data.tokenizer = None
    with pytest.raises(ConfigError, match=r"has token ids, and data\.tokenizer=null"):
        open_corpus(own.data)


def test_token_ids_stay_where_the_tokenizer_would_merge_them(own):
    """A token per byte: no text is encoded anew, and bytes per token follow from the ids."""
    encoder = DocumentEncoder(load_tokenizer(Path(own.data.tokenizer)), own.data)
    ids = [[encoder.tokenizer.token_to_id(letter) for letter in word] for word in ("ring", "tale")]
    assert ids != encoder.texts(["ring", "tale"])
    (Path(own.data.path) / "a.jsonl").write_text("".join(f'{{"text": {d}}}\n' for d in ids * 9))
    corpus = tokenised(own.data, encoder.tokenizer)
    assert [corpus.text(n).tolist() for n in range(18)] == ids * 9
    assert set(corpus.n_bytes.tolist()) == {4}


def test_a_long_file_is_a_corpus_with_two_splits(own, tmp_path):
    path = Path(own.data.path) / "a.TXT.gz"
    path.write_bytes(gzip.compress("###".join(TEXTS).encode()))
    with pytest.raises(ConfigError, match=r"cut long files with data\.split_on or data\.split_b"):
        open_corpus(own.data)
    own.data.split_on = "###"
    corpus = open_corpus(own.data)
    assert len(corpus.train) + len(corpus.held_out) == len(TEXTS)
    assert corpus.train.name(1).startswith("a.TXT.gz:")
    own.data.split_on, own.data.split_bytes = None, 100
    corpus = open_corpus(own.data)
    sizes = [*corpus.train.n_bytes.tolist(), *corpus.held_out.n_bytes.tolist()]
    assert max(sizes) <= 100
    assert sum(sizes) == len("###".join(TEXTS).encode())
    source = SourceConfig(path=own.data.path, split_on="###")
    own.data.path, own.data.sources, own.data.split_bytes = None, {"long": source}, 10**6
    corpus = open_corpus(own.data)
    assert len(corpus.train) + len(corpus.held_out) == len(TEXTS)


def add_unreadable_files(folder: Path) -> None:
    """Writes a file for each reason in ``LEFT_OUT``."""
    (folder / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0")
    (folder / "b.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0")
    (folder / "notes.txt").write_bytes("notes".encode("utf-16"))
    (folder / "package.json").write_text('{"name": "ring"}')
    (folder / "table.csv").write_text("a,b\n")
    (folder / "weights.npy").write_bytes(b"")
    (folder / "z.zip").write_bytes(b"PK\3\4\xff")
    (folder / "lost").symlink_to(folder / "nothing")
    np.save(folder / "features.npy", np.zeros((2, 2)))


LEFT_OUT = [
    r"data\.path: 1 left out \(table\.csv\): CSV is not text; .*",
    r"data\.path: 1 left out \(lost\): a link without a target; .*",
    r"data\.path: 1 left out \(notes\.txt\): UTF-16 or UTF-32; convert .*",
    r"data\.path: 1 left out \(package\.json\): a \.json whose first record .*text_field=text; .*",
    r"data\.path: 1 left out \(weights\.npy\): a \.npy that numpy cannot read.*",
    r"data\.path: 1 left out \(features\.npy\): a \.npy without token ids.*",
    r"data\.path: 1 left out \(z\.zip\): an archive.*",
    r"data\.path: 2 left out \(a\.png, b\.png\): image, not text",
]


def test_every_start_names_what_is_left_out(own, tmp_path, capsys, monkeypatch):
    """Also a start that finds the token files in the cache; other ranks are silent."""
    folder = Path(own.data.path)
    for number, text in enumerate(TEXTS):
        (folder / f"{number}.txt").write_text(text)
    complete = documents_of(open_corpus(own.data))
    assert capsys.readouterr().out.strip() == ""
    add_unreadable_files(folder)
    for tokenizer in (own.data.tokenizer, own.data.tokenizer, None):
        own.data.tokenizer = tokenizer
        corpus = open_corpus(own.data)
        lines = [line for line in capsys.readouterr().out.splitlines() if line]
        assert len(lines) == len(LEFT_OUT)
        assert all(map(re.fullmatch, LEFT_OUT, lines)), lines
        if tokenizer is not None:
            assert documents_of(corpus) == complete
    recorded = [read_manifest(m.parent) for m in Path(own.data.cache_dir).glob("*/manifest.json")]
    counts = [sum(entry[2] for entry in m.metadata.get("left_out", [])) for m in recorded]
    assert sorted(counts) == [0, 7, 7]  # and two that are found without opening a file
    monkeypatch.setenv("RANK", "1")
    open_corpus(own.data)
    assert capsys.readouterr().out == ""


def test_token_files_of_earlier_versions_are_found(tmp_path):
    """The keys of names and settings that mean what they always meant; no other value is right."""
    names = ("a.txt", "b.md", "c.jsonl", "d.jsonl.gz", "e.txt.gz", "f.parquet", "deep/g.py")
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x" * 7)
        os.utime(tmp_path / name, ns=(10**18, 10**18))
    source = SourceConfig(path=str(tmp_path), pattern="*.*", text_field="body")
    for data, key in (
        (DataConfig(path=str(tmp_path)), "85de8c6aacd25aaa0bb4"),
        (DataConfig(path=None, sources={"s": source}), "48669918c3768dc31c87"),
    ):
        assert cache_key(data, find_files(data)) == key


def test_the_error_of_an_empty_split_lists_what_is_left_out(own, tmp_path):
    add_unreadable_files(Path(own.data.path))
    with pytest.raises(ConfigError) as caught:
        open_corpus(own.data)
    first, *lines = str(caught.value).split("; data.path: ")
    assert first == f"data.path={own.data.path} holds no text"
    assert len(lines) == len(LEFT_OUT)
    with pytest.raises(ConfigError, match=r"^eval\.path: .*left out"):
        tokenised(own.data, load_tokenizer(Path(own.data.tokenizer)))
