"""Files to documents, and the split that depends on names alone."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path

import pytest

from train.config import ConfigError, DataConfig
from train.corpus import Document, Source, find_sources, is_held_out, read_documents


def data_at(path: Path, **changes) -> DataConfig:
    return DataConfig(path=str(path), **changes)


def test_a_folder_gives_its_visible_files_by_name(text_folder):
    names = [source.name for source in find_sources(data_at(text_folder))]
    assert names == sorted(names)
    assert len(names) == 41
    assert "deep/0.txt" in names
    assert ".hidden" not in names
    only = find_sources(data_at(text_folder, pattern="deep/*.txt"))
    assert len(only) == 20
    with pytest.raises(ConfigError, match=r"data\.path=.*\*\.md"):
        find_sources(data_at(text_folder, pattern="*.md"))


def test_a_single_file_is_a_corpus(text_folder):
    path = text_folder / "1.txt"
    assert find_sources(data_at(path)) == [Source(path, "1.txt")]


def test_a_hidden_folder_above_the_corpus_does_not_matter(tmp_path):
    folder = tmp_path / ".notes"
    folder.mkdir()
    (folder / "a.txt").write_text("a")
    assert len(find_sources(data_at(folder))) == 1


def test_jsonl_lines_are_documents(tmp_path):
    path = tmp_path / "two.jsonl"
    lines = [{"text": "one", "id": 1}, {"text": ""}, {"text": "λ"}]
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    found = list(read_documents(Source(path, "two.jsonl"), "text"))
    assert found == [Document("two.jsonl:1", "one"), Document("two.jsonl:3", "λ")]
    assert [document.n_bytes for document in found] == [3, 2]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"body": "x"}', r"data\.text_field=text: .*bad\.jsonl:1 .* it has: body"),
        ('{"text": 3}', r"data\.text_field=text"),
        ("[1]", r"it has: list"),
        ("{", r"bad\.jsonl:1 is not JSON"),
    ],
)
def test_a_wrong_jsonl_line_is_named(tmp_path, line, message):
    path = tmp_path / "bad.jsonl"
    path.write_text(line)
    with pytest.raises(ConfigError, match=message):
        list(read_documents(Source(path, "bad.jsonl"), "text"))


def test_the_split_depends_on_the_name_and_meets_its_share():
    names = [f"folder/{number}.py" for number in range(4000)]
    held_out = [name for name in names if is_held_out(name, 0.05)]
    assert 150 < len(held_out) < 250  # 200 expected, standard deviation 14
    assert all(is_held_out(name, 0.1) for name in held_out)
    assert is_held_out("json/encoder.py", 1.0)


def test_the_default_corpus_leaves_out_what_installations_differ_in():
    sources = find_sources(DataConfig(path=None))
    names = [source.name for source in sources]
    assert len(names) > 300
    assert {"argparse.py", "json/decoder.py"} <= set(names)
    folders = {part for name in names for part in name.split("/")[:-1]}
    assert not folders & {"test", "tests", "site-packages", "dist-packages", "idlelib", "tkinter"}
    assert all(str(source.path).startswith(sysconfig.get_paths()["stdlib"]) for source in sources)
