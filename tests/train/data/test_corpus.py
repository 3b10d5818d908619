"""Files to documents, and the split by their names alone."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import pytest

from train.config import ConfigError, DataConfig, SourceConfig
from train.data.corpus import (
    Source,
    find_files,
    fingerprint,
    is_held_out,
    read_documents,
    sources_of,
)


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
        Source("a", str(tmp_path / "two"), "*", "t", 1.0, "data.sources.a.path"),
        Source("z", str(tmp_path / "one"), "*.txt", "body", 2, "data.sources.z.path"),
    ]
    files = find_files(data)
    assert [file.label for file in files] == ["a/a.txt", "a/b.md", "z/a.txt"]
    assert [next(read_documents(file)).name for file in files] == ["a.txt", "b.md", "a.txt"]
    data.sources["z"].pattern = "*.rst"
    with pytest.raises(ConfigError, match=r"data\.sources\.z\.path=.*one holds no .* \*\.rst"):
        find_files(data)


def test_a_name_need_not_be_utf8(tmp_path):
    (tmp_path / os.fsdecode(b"caf\xe9.txt")).write_text("a")
    files = find_files(data_at(tmp_path))
    assert len(fingerprint(files)) == 64
    assert is_held_out(files[0].name, 1.0)


def test_the_split_depends_on_the_name_and_meets_its_share():
    names = [f"folder/{number}.py" for number in range(4000)]
    held_out = [name for name in names if is_held_out(name, 0.05)]
    assert 150 < len(held_out) < 250  # 200 expected, standard deviation 14
    assert all(is_held_out(name, 0.1) for name in held_out)
    assert is_held_out("json/encoder.py", 1.0)


def test_the_default_corpus_excludes_files_that_installations_may_lack():
    files = find_files(DataConfig(path=None))
    names = [file.name for file in files]
    assert len(names) > 300
    assert {"argparse.py", "json/decoder.py"} <= set(names)
    folders = {part for name in names for part in name.split("/")[:-1]}
    assert not folders & {"test", "tests", "site-packages", "dist-packages", "idlelib", "tkinter"}
    assert all(str(file.path).startswith(sysconfig.get_paths()["stdlib"]) for file in files)
