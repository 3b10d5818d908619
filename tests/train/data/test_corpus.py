"""If this fails, a file is read wrongly, or held-out text is trained on. Files to documents, and
the split by their texts alone."""

from __future__ import annotations

import gzip
import json
import os
import sysconfig
from pathlib import Path

import pyarrow.parquet
import pytest

from train.config import ConfigError, DataConfig
from train.data.corpus import (
    Source,
    find_files,
    fingerprint,
    is_held_out,
    read_documents,
    sources_of,
    text_hash,
)
from train.sections.data import SourceConfig
from train.text.reading import Reading


def data_at(path: Path, **changes) -> DataConfig:
    return DataConfig(path=str(path), **changes)


def test_a_folder_gives_its_visible_files_by_name(text_folder):
    names = [file.name for file in find_files(data_at(text_folder))]
    assert names == sorted(names)
    assert len(names) == 41
    assert "deep/0.txt" in names
    assert ".hidden" not in names
    only = find_files(data_at(text_folder, pattern="deep/*.txt"))
    assert len(only) == 20
    with pytest.raises(ConfigError, match=r"data\.path=.*\*\.md"):
        find_files(data_at(text_folder, pattern="*.md"))


def test_a_single_file_is_a_corpus(text_folder):
    path = text_folder / "1.txt"
    assert [(file.path, file.name) for file in find_files(data_at(path))] == [(path, "1.txt")]


def test_a_hidden_folder_above_the_corpus_does_not_matter(tmp_path):
    folder = tmp_path / ".notes"
    folder.mkdir()
    (folder / "a.txt").write_text("a")
    assert len(find_files(data_at(folder))) == 1


def test_documents_are_named_by_file_and_row(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "a.txt").write_text("a")
    (tmp_path / "b.jsonl").write_text('{"text": "x"}\n\n{"text": "y"}\n')
    documents = [d for file in find_files(data_at(tmp_path)) for d in read_documents(file)]
    assert [d.name for d in documents] == ["b.jsonl:1", "b.jsonl:3", "deep/a.txt"]


def test_sources_have_their_own_keys_or_those_of_data(tmp_path):
    """Sorted by name; a document's split does not depend on its source."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text(name)
        (tmp_path / name / "b.md").write_text(name)
    data = DataConfig(path=None, pattern="*.txt", text_field="body")
    data.sources["z"] = SourceConfig(path=str(tmp_path / "one"), weight=2)
    data.sources["a"] = SourceConfig(path=str(tmp_path / "two"), pattern="*", text_field="t")
    assert sources_of(data) == [
        Source("a", str(tmp_path / "two"), "*", 1.0, Reading("t", "data.sources.a.path")),
        Source("z", str(tmp_path / "one"), "*.txt", 2, Reading("body", "data.sources.z.path")),
    ]
    assert sources_of(data)[0].reading.section == "data.sources.a"
    files = find_files(data)
    assert [file.label for file in files] == ["a/a.txt", "a/b.md", "z/a.txt"]
    assert [next(read_documents(file)).name for file in files] == ["a.txt", "b.md", "a.txt"]
    data.sources["z"].pattern = "*.rst"
    with pytest.raises(ConfigError, match=r"data\.sources\.z\.path=.*one contains no .* \*\.rst"):
        find_files(data)


def test_a_name_need_not_be_utf8(tmp_path):
    (tmp_path / os.fsdecode(b"caf\xe9.txt")).write_text("a")
    files = find_files(data_at(tmp_path))
    assert len(fingerprint(files)) == 64
    assert [document.name for document in read_documents(files[0])] == [files[0].name]


def test_the_split_depends_on_the_text_and_meets_its_share():
    hashes = [text_hash(f"text {number}", 0) for number in range(4000)]
    held_out = [hashed for hashed in hashes if is_held_out(hashed, 0.05)]
    assert 150 < len(held_out) < 250  # 200 expected, standard deviation 14
    assert all(is_held_out(hashed, 0.1) for hashed in held_out)
    assert is_held_out(max(hashes), 1.0)
    assert 0 <= min(hashes) < max(hashes) < 2**63
    assert text_hash("λ", -3) == 8281594314222909340  # another value would split every corpus anew


def test_another_salt_holds_out_other_documents():
    """Independently: of 200 documents, 10 are in both sets of 5%."""
    one, other = (
        {n for n in range(4000) if is_held_out(text_hash(f"text {n}", salt), 0.05)}
        for salt in (0, 1)
    )
    assert len(one & other) < 25


def held_out_texts(data: DataConfig) -> dict[str, bool]:
    """Whether each text is held out."""
    documents = [d for file in find_files(data) for d in read_documents(file)]
    return {d.text: is_held_out(d.hash(data.held_out_salt), 0.3) for d in documents}


def test_the_split_of_a_text_is_the_same_in_every_format_and_place(tmp_path):
    """As files, and in other rows, orders and names: added documents move no other."""
    texts = [f"document {number}\n" for number in range(40)]
    lines = [json.dumps({"text": text}) for text in texts]
    rows = pyarrow.table({"text": texts[::-1]})
    for number, text in enumerate(texts):
        (tmp_path / "files").mkdir(exist_ok=True)
        (tmp_path / "files" / f"{number}.txt").write_text(text)
        (tmp_path / "gz").mkdir(exist_ok=True)
        (tmp_path / "gz" / f"{-number}.txt.gz").write_bytes(gzip.compress(text.encode()))
    for name in ("lines", "lines.gz", "rows"):
        (tmp_path / name).mkdir()
    added = json.dumps({"text": "added"})
    (tmp_path / "lines" / "a.jsonl").write_text("\n".join([added, *reversed(lines)]))
    packed = gzip.compress("\n".join([*lines[20:], *lines[:20]]).encode())
    (tmp_path / "lines.gz" / "a.jsonl.gz").write_bytes(packed)
    pyarrow.parquet.write_table(rows, tmp_path / "rows" / "a.parquet")
    expected = held_out_texts(data_at(tmp_path / "files"))
    assert 3 < sum(expected.values()) < 30
    for name in ("gz", "lines", "lines.gz", "rows"):
        found = held_out_texts(data_at(tmp_path / name))
        found.pop("added", None)
        assert found == expected, name


def test_the_default_corpus_excludes_files_that_installations_may_lack():
    files = find_files(DataConfig(path=None))
    names = [file.name for file in files]
    assert len(names) > 300
    assert {"argparse.py", "json/decoder.py"} <= set(names)
    folders = {part for name in names for part in name.split("/")[:-1]}
    assert not folders & {"test", "tests", "site-packages", "dist-packages", "idlelib", "tkinter"}
    assert all(str(file.path).startswith(sysconfig.get_paths()["stdlib"]) for file in files)
