"""Files to texts: every format, and the errors for files that cannot be used."""

from __future__ import annotations

import gzip
import json
import random
import sys
from pathlib import Path

import pytest

from train.config import ConfigError
from train.text import json_records
from train.text.formats import read_texts, require_readers
from train.text.reading import WHOLE_FILE, Reading

TEXTS = ["one", "", "λ", None, "\nthree lines\n"]
EXPECTED = [(1, "one", 3), (3, "λ", 2), (5, "\nthree lines\n", 13)]


def read(path: Path, text_field: str = "text") -> list[tuple]:
    return [tuple(text[:3]) for text in read_texts(path, Reading(text_field))]


def lines_of(texts) -> bytes:
    return "".join(json.dumps({"id": 1, "text": text}) + "\n" for text in texts).encode()


def write_parquet(path: Path, texts, row_group_size=2, **columns) -> Path:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = pyarrow.table({"id": list(range(len(texts))), "text": texts, **columns})
    parquet.write_table(table, path, row_group_size=row_group_size, write_page_checksum=True)
    return path


def test_the_same_texts_from_every_format_with_rows(tmp_path):
    plain, zipped = tmp_path / "a.jsonl", tmp_path / "a.jsonl.gz"
    plain.write_bytes(lines_of(TEXTS) + b"\n")
    zipped.write_bytes(gzip.compress(lines_of(TEXTS[:2])) + gzip.compress(lines_of(TEXTS[2:])))
    table = write_parquet(tmp_path / "a.parquet", TEXTS)
    assert read(plain) == read(zipped) == read(table) == EXPECTED


def test_whole_files_are_one_text(tmp_path):
    (tmp_path / "a.md").write_bytes("λ\r\n".encode())
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress("λ\r\n".encode()))
    (tmp_path / "empty.txt").write_bytes(b"")
    assert read(tmp_path / "a.md") == read(tmp_path / "b.txt.gz") == [(WHOLE_FILE, "λ\r\n", 4)]
    assert read(tmp_path / "empty.txt") == []


def test_the_progress_ends_at_the_size_of_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(json_records, "PER_REPORT", 1)
    noise = [random.Random(n).randbytes(100).hex() for n in range(5000)]
    (tmp_path / "a.jsonl").write_bytes(lines_of(noise))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines_of(noise)))
    write_parquet(tmp_path / "c.parquet", noise, row_group_size=3000)
    for path in tmp_path.iterdir():
        heard: list[int] = []
        for _ in read_texts(path, Reading(), heard.append):
            pass
        assert heard == sorted(heard)
        assert heard[-1] == path.stat().st_size
        assert any(0 < n < heard[-1] for n in heard)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"body": "x"}', r"data\.text_field=text: .*bad\.jsonl:2 has no .*; it has: body"),
        (b'{"text": 3}', r"data\.text_field=text: .*bad\.jsonl:2"),
        (b"[1]", r"bad\.jsonl:2 .*it has: list"),
        (b"{", r"data\.path: .*bad\.jsonl:2 is not JSON"),
        (b"[" * 10**6, r"bad\.jsonl:2 is not JSON"),
        (b'{"text": "caf\xe9"}', r"data\.path: .*bad\.jsonl:2 is not UTF-8"),
        (b'{"text": "\\ud800"}', r"data\.path: .*bad\.jsonl:2 is not valid text: .*surrogates"),
    ],
    ids=["field", "number", "list", "syntax", "depth", "bytes", "surrogate"],
)
def test_a_wrong_line_is_named(tmp_path, line, message):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"text": "good"}\n' + line + b'\n{"text": "good"}\n')
    with pytest.raises(ConfigError, match=message):
        read(path)


def test_a_truncated_gzip_file_names_the_line(tmp_path):
    path = tmp_path / "bad.jsonl.gz"
    path.write_bytes(gzip.compress(lines_of(["good"] * 3))[:-9])
    with pytest.raises(ConfigError, match=r"data\.path: .*bad\.jsonl\.gz:\d cannot be read"):
        read(path)
    path = tmp_path / "bad.txt.gz"
    path.write_bytes(gzip.compress(b"good" * 99)[:-9])
    with pytest.raises(ConfigError, match=r"data\.path: .*bad\.txt\.gz cannot be read"):
        read(path)


def test_a_bad_row_group_is_named_after_the_good_ones_are_read(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", [f"row {n} of text" for n in range(6)])
    content = bytearray(path.read_bytes())
    place = content.index(b"row 4 of text")
    content[place + 4] ^= 8
    path.write_bytes(content)
    found = []
    with pytest.raises(ConfigError, match=r"data\.path: .*a\.parquet:5 \(row group 2\) cannot"):
        found += [text.row for text in read_texts(path, Reading())]
    texts = read_texts(path, Reading())
    assert [next(texts).row for _ in range(4)] == [1, 2, 3, 4]
    path.write_bytes(content[:-20])
    with pytest.raises(ConfigError, match=r"a\.parquet:1 .*cannot be read"):
        read(path)


def test_a_parquet_file_without_the_column_lists_its_columns(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", ["x"])
    with pytest.raises(ConfigError, match=r"data\.text_field=body: .*it has: id \(int64\), text"):
        read(path, "body")
    with pytest.raises(ConfigError, match=r"data\.text_field=id: "):
        read(path, "id")


def test_only_a_few_rows_of_one_column_are_in_memory(tmp_path):
    """The row group has 20 MB of text, and another column of 40 MB."""
    pyarrow = pytest.importorskip("pyarrow")
    import numpy as np

    noise = np.random.default_rng(0).integers(32, 127, (20_000, 3000), np.uint8)
    other = [row.tobytes() for row in noise[:, :2000]]
    texts = [row.tobytes().decode() for row in noise[:, 2000:]]
    path = write_parquet(tmp_path / "a.parquet", texts, row_group_size=20_000, other=other)
    assert path.stat().st_size > 55e6
    del noise, other
    before, most = pyarrow.total_allocated_bytes(), 0
    for text, expected in zip(read_texts(path, Reading()), texts, strict=True):
        assert text.text == expected
        most = max(most, pyarrow.total_allocated_bytes() - before)
    assert most < 10e6


def test_a_missing_reader_is_named_with_its_remedy(tmp_path, monkeypatch):
    paths = [tmp_path / "a.txt", tmp_path / "a.parquet"]
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    require_readers(paths[:1])
    with pytest.raises(ConfigError, match=r"a\.parquet needs pyarrow: pip install -e '\.\[parq"):
        require_readers(paths)
