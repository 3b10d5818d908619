"""If this fails, files become other text, or a broken one is read. Files to texts: every format,
and the errors for files that cannot be used."""

from __future__ import annotations

import bz2
import codecs
import gzip
import json
import lzma
import random
import sys
from pathlib import Path

import pyarrow
import pytest

from train.config import ConfigError
from train.text import json_records, plain
from train.text.files import NotReadError
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
        (b'{"text": 3}', r"data\.text_field=text: .*bad\.jsonl:2 .*it has: text \(int\)"),
        (b"[1]", r"bad\.jsonl:2 .*it has: list"),
        (b"{", r"data\.path: .*bad\.jsonl:2 is not JSON: .*; repair .* with data\.pattern"),
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
    with pytest.raises(ConfigError, match=r"bad\.txt\.gz cannot be read: .*; repair the file"):
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
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    require_readers([tmp_path / "a.txt", tmp_path / "zst", tmp_path / "a.jsonl.xz"])
    for name in ("a.parquet", "a.PARQUET", "a.txt.zst", "a.jsonl.ZST"):
        with pytest.raises(ConfigError, match=rf"{name} needs pyarrow: pip install -e '\.\[parq"):
            require_readers([tmp_path / "a.txt", tmp_path / name])


def zstd(content: bytes) -> bytes:
    return pyarrow.Codec("zstd").compress(content, asbytes=True)


PACKED = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstd}
BOM = codecs.BOM_UTF8
RECORDS = [{"id": 1, "text": text} for text in TEXTS]
JSON_OF = {  # what a .json may look like
    "lines": lines_of(TEXTS),
    "lines with CRLF": lines_of(TEXTS).replace(b"\n", b"\r\n"),
    "values": json.dumps(RECORDS, indent=12)[1:-1].replace("},", "}").encode(),
    "array": json.dumps(RECORDS).encode(),
    "long array": b" \r\n" + json.dumps(RECORDS, indent=12, ensure_ascii=False).encode() + b"\n\n",
    "with BOM": BOM + json.dumps(RECORDS).encode(),
}


@pytest.mark.parametrize("packed", PACKED)
@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson", "A.JSONL", "a.JsonLines", "a.Json"])
def test_every_name_of_json_lines_gives_the_same_texts(tmp_path, name, packed):
    """With and without a BOM and CRLF, in two compressed parts one after the other."""
    path = tmp_path / (name + (packed.upper() if name.isupper() else packed))
    lines = [lines_of(TEXTS[:2]), lines_of(TEXTS[2:])]
    for parts in (lines, [BOM + lines[0].replace(b"\n", b"\r\n"), lines[1]]):
        path.write_bytes(b"".join(PACKED[packed](part) for part in parts))
        assert read(path) == EXPECTED


@pytest.mark.parametrize("form", JSON_OF)
@pytest.mark.parametrize("block", [1, 2, 3, 7, 64, 2**24])
def test_json_of_any_form_gives_the_same_records(tmp_path, monkeypatch, form, block):
    """Also if blocks end inside of a value, a number, an escape or a character."""
    monkeypatch.setattr(json_records, "BLOCK", block)
    path = tmp_path / "a.json"
    path.write_bytes(JSON_OF[form])
    assert read(path) == EXPECTED


def test_a_json_of_one_object_or_of_none(tmp_path):
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"text": "one", "deep": [{"[": 1}]}, indent=2))
    assert read(path) == [(1, "one", 3)]
    for content in (b"", BOM, b" \n", b"[]", b"[ ]\n"):
        path.write_bytes(content)
        assert read(path) == []


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ('[{"text": "a"}, {"text": "b"}', "the array has no end"),
        ('[{"text": "a"}] {"text": "b"}', "text follows the array"),
        ('{"text": "a"}\n{"text": "b"', "Expecting ',' delimiter"),
        ('{"text": "a"}\n{"text": b}' + " " * 99, "Expecting value"),
        ('{"text": "a"}\n' + "[" * 10**5, "recursion"),
    ],
)
def test_a_damaged_json_names_the_record(tmp_path, content, problem):
    path = tmp_path / "a.json"
    path.write_text(content)
    with pytest.raises(
        ConfigError, match=rf"^data\.path: .*a\.json:[23] is not a record.*{problem}"
    ):
        read(path)
    path.write_text('[{"text": "a"}, {"body": "b", "id": 1}]')
    with pytest.raises(ConfigError, match=r"text_field=text: .*a\.json:2 .*: body \(str\), id"):
        read(path)


@pytest.mark.parametrize("content", ['{"name": 1}', "// no JSON", "[1, 2]", '"text"', "[[]]", "{"])
def test_a_json_without_texts_is_left_out(tmp_path, content):
    path = tmp_path / "package.json"
    path.write_text(content)
    is_json = content not in ("// no JSON", "{")
    reason = r"no text in data\.text_field=text; " if is_json else "beginning is not JSON; "
    with pytest.raises(NotReadError, match=reason + r".*data\.pattern"):
        read(path)


@pytest.mark.parametrize("packed", PACKED)
@pytest.mark.parametrize("suffix", ["", ".txt", ".TXT", ".md"])
def test_text_is_read_without_its_bom(tmp_path, suffix, packed):
    path = tmp_path / f"a{suffix}{packed.upper() if suffix.isupper() else packed}"
    for content in ("λ\r\n", "\ufeffλ\r\n"):
        path.write_bytes(PACKED[packed](content.encode()))
        assert read(path) == [(WHOLE_FILE, "λ\r\n", 4)]
    for content in (PACKED[packed](b""), PACKED[packed](BOM)):
        path.write_bytes(content)
        assert read(path) == []


@pytest.mark.parametrize("packed", [name for name in PACKED if name])
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.json"])
def test_truncated_and_damaged_compression_is_named(tmp_path, name, packed):
    path = tmp_path / f"{name}{packed}"
    whole = PACKED[packed](lines_of([str(n) for n in range(999)]))
    for content in (whole[:-9], b"x" + whole):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=rf"^data\.path: .*{name}{packed}\S* cannot be read"):
            read(path)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        *[(name, "UTF-16") for name in ("a.txt", "a", "a.JSON")],
        *[("a.md.gz", "not UTF-8"), ("a.parquet.gz", "a compressed"), ("a.bin", "a .bin without")],
    ],
)
def test_what_is_no_text_is_left_out(tmp_path, name, reason):
    path = tmp_path / name
    path.write_text("text" * 999, "utf-16")
    if name.endswith(".gz"):
        path.write_bytes(gzip.compress(b"text\0" * 999))
    with pytest.raises(NotReadError, match=f"^{reason}"):
        read(path)


def split(path: Path, **keys) -> list[tuple]:
    return [tuple(text[:2]) for text in read_texts(path, Reading(**keys))]


@pytest.mark.parametrize("block", [3, 4, 5, 2**24])
def test_a_long_file_is_cut_at_a_separator(tmp_path, monkeypatch, block):
    """On the command line a line end is written \\n; a separator at an end leaves nothing."""
    monkeypatch.setattr(plain, "BLOCK", block)
    path = tmp_path / "a.txt.gz"
    for end in ("\n", "\r\n"):
        path.write_bytes(gzip.compress(f"\ufeffλ{end}b{end}{end}c{end}{end}{end}{end}d".encode()))
        for separator in ("\n\n", r"\n\n"):
            parts = [(1, f"λ{end}b"), (2, "c"), (4, "d")]
            assert split(path, split_on=separator) == parts
    path.write_bytes(gzip.compress("a<|end|>.λ<|end|>".encode()))
    assert split(path, split_on="<|end|>") == [(1, "a"), (2, ".λ")]
    assert split(path, split_on=".") == [(1, "a<|end|>"), (2, "λ<|end|>")]
    assert split(path, split_on="absent") == [(1, "a<|end|>.λ<|end|>")]


@pytest.mark.parametrize("block", [3, 100, 2**24])
@pytest.mark.parametrize("most", [4, 10, 64, 10_000])
def test_a_long_file_is_cut_by_size(tmp_path, monkeypatch, block, most):
    """The parts are the text, and end with a line, a word or a character."""
    monkeypatch.setattr(plain, "BLOCK", block)
    words = random.Random(most).choices(["λ", "ring", "\n", " ", "naïve🙂"], k=999)
    path = tmp_path / "a.txt"
    path.write_bytes("".join(words).encode())
    parts = list(plain._cut(iter([path.read_bytes()]), most))
    assert b"".join(parts).decode() == "".join(words)
    assert all(len(part) <= most and part.decode() for part in parts)
    assert all(len(part) >= most // 2 - 3 for part in parts[:-1])
    found = [text for _, text in split(path, split_bytes=most)]
    assert found == [part.decode() for part in parts if part.strip()]
    path.write_text("a b\nc\n" * 999)
    assert {text for _, text in split(path, split_bytes=8)} <= {"a b\nc\n", "a b\n", "c\n"}


def test_a_long_file_is_cut_at_separators_and_then_by_size(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one two;three four five")
    expected = [(1, "one two"), (2, "three "), (3, "four "), (4, "five")]
    assert split(path, split_on=";", split_bytes=7) == expected


def test_what_is_not_utf8_after_the_first_part_is_refused(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"one;t\xe9o")
    with pytest.raises(ConfigError, match=r"^data\.path: .*a\.txt:2 is not UTF-8"):
        split(path, split_on=";")
    path.write_bytes(b"t\xe9o;one")
    with pytest.raises(NotReadError, match="not UTF-8"):
        split(path, split_on=";")
    path.write_bytes(b"word " * 2000 + b"\0;one\0")
    for keys in ({}, {"split_on": ";"}):
        with pytest.raises(NotReadError, match="not UTF-8"):
            split(path, **keys)
    path.write_bytes(b"word " * 2000 + b";one\0")
    with pytest.raises(ConfigError, match=r"a\.txt:2 is not UTF-8: it has a NUL byte; repair"):
        split(path, split_on=";")
