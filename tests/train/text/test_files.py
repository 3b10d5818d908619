"""If this fails, files of a folder are left out without notice. Which files below a folder are
read: patterns, links, and the reasons for what is left out."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from train.config import ConfigError, DataConfig
from train.data.corpus import find_files
from train.sections.data import SourceConfig
from train.text.files import LeftOut, matching_files, not_text

NAMES = ["a.txt", "b.md", "deep/c.txt", "deep/d.TXT", "deep/er/e.txt", "deep/er/f", "z/a.txt"]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """``NAMES`` in a folder, and hidden ones."""
    root = tmp_path / "tree"
    for name in [*NAMES, ".hidden", "deep/.git/g.txt"]:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    return root


def found(root: Path, pattern: str = "**/*") -> tuple[list[str], dict[str, list[str]]]:
    """The names that are read, and the names that are left out by reason."""
    left_out: dict[str, list[str]] = {}
    files = matching_files(root, pattern, lambda r, name: left_out.setdefault(r, []).append(name))
    return sorted(name for name, _ in files), left_out


@pytest.mark.parametrize(
    "pattern",
    ["**/*", "*", "*.txt", "**/*.txt", "deep/*", "deep/**/*.txt", "**/er/*", "*/a.*", "**/[ab].*"],
)
def test_a_pattern_selects_what_pathlib_selects(tree, pattern):
    expected = [p.relative_to(tree) for p in tree.glob(pattern) if p.is_file()]
    visible = [path.as_posix() for path in expected if "/." not in f"/{path.as_posix()}"]
    assert found(tree, pattern) == (sorted(visible), {})


@pytest.mark.parametrize("pattern", ["", "/etc/*", "../*", "deep/../*"])
def test_a_pattern_outside_of_the_folder_is_refused(tree, pattern):
    with pytest.raises(ConfigError, match=r"^data\.pattern=.*relative to data\.path, for example"):
        find_files(DataConfig(path=str(tree), pattern=pattern))


def test_a_link_gives_a_blob_its_suffix(tmp_path):
    """Caches of hubs hold files by hash, and links with their names."""
    blob = tmp_path / "blobs" / "5f2a"
    link = tmp_path / "snapshots" / "main" / "train.jsonl"
    for path in (blob, link):
        path.parent.mkdir(parents=True)
    blob.write_text('{"text": "hello"}')
    link.symlink_to("../../blobs/5f2a")
    assert found(tmp_path) == (["snapshots/main/train.jsonl"], {})
    (tmp_path / "LICENSE").write_text("free")
    assert found(tmp_path)[0] == ["LICENSE", "snapshots/main/train.jsonl"]


def test_links_are_followed_and_each_real_file_is_read_once(tree, tmp_path):
    """Also if the link comes first by name, and if it points to a parent, itself or a sibling."""
    outside = tmp_path / "outside"
    (outside / "in").mkdir(parents=True)
    (outside / "in" / "o.txt").write_text("o")
    (outside / "up").symlink_to(tree)
    (tree / "0-of-z").symlink_to(tree / "z")
    (tree / "0.txt").symlink_to(tree / "a.txt")
    (tree / "deep" / "loop").symlink_to(tree)
    (tree / "deep" / "self").symlink_to(tree / "deep")
    (tree / "far").symlink_to(outside)
    (tree / "further").symlink_to(outside / "in")
    (tree / "g.txt").symlink_to(tree / "deep" / ".git" / "g.txt")
    names, left_out = found(tree)
    assert names == sorted([*NAMES, "far/in/o.txt", "g.txt"])
    assert left_out == {}
    link = tmp_path / "link"
    link.symlink_to(tree)
    assert found(link)[0] == names


def test_what_cannot_be_read_is_counted_with_its_reason(tree, tmp_path, monkeypatch):
    (tree / "dangling.txt").symlink_to(tree / "nothing")
    (tree / "ring").symlink_to(tree / "ring2")
    (tree / "ring2").symlink_to(tree / "ring")
    os.mkfifo(tree / "pipe")
    scandir = os.scandir

    def denied(path):
        if Path(path).name == "er":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", denied)
    names, left_out = found(tree)
    assert names == sorted(set(NAMES) - {"deep/er/e.txt", "deep/er/f"})
    assert {reason.split(";")[0]: sorted(names) for reason, names in left_out.items()} == {
        "a link without a target": ["dangling.txt", "ring", "ring2"],
        "a socket, pipe or device": ["pipe"],
        "unreadable (Permission denied)": ["deep/er"],
    }
    assert found(tree, "*.md") == (["b.md"], {})  # the pattern selects none of them


def test_the_lines_on_what_is_left_out():
    left_out = LeftOut()
    for number in range(1234):
        left_out.add("data.path", "CSV", f"{number}.csv")
    left_out.add("data.path", "a link", os.fsdecode(b"caf\xe9"))
    left_out.add("data.validation_path", "CSV", "v.csv")
    lines = [
        "data.path: 1,234 left out (0.csv, 1.csv, 2.csv, ...): CSV",
        "data.path: 1 left out (caf?): a link",
        "data.validation_path: 1 left out (v.csv): CSV",
    ]
    assert left_out.lines() == lines
    assert LeftOut(left_out.listed()).lines() == lines


@pytest.mark.parametrize(
    ("name", "head", "reason"),
    [
        ("a.txt", "text".encode("utf-16"), "UTF-16 or UTF-32"),
        ("a.txt", "text".encode("utf-32"), "UTF-16 or UTF-32"),
        ("a.txt", "text".encode("utf-16-le"), "not UTF-8: binary, or text to convert"),
        ("a.txt", "café".encode("latin-1"), "not UTF-8: binary, or text to convert"),
        ("a", b"PK\3\4\0", "an archive"),
        ("a.txt", b"\x1f\x8b\x08\0", "an archive, or compressed without its suffix"),
        ("a.tar.gz", b"name".ljust(257, b"\0") + b"ustar", "an archive"),
        ("A.PNG", b"\x89PNG\0", "image, not text"),
        ("a.mp4", b"\0\0\0\x20ftyp", "video, not text"),
        ("model.safetensors", b"\0\1", "not UTF-8: binary"),
    ],
)
def test_the_reason_shows_what_a_file_is(name, head, reason):
    assert str(not_text(name, head)).startswith(reason)


def test_csv_is_left_out_and_alone_refused(tree):
    (tree / "t").mkdir()
    for name in ("t/a.csv", "t/B.TSV", "t/c.csv.gz"):
        (tree / name).write_text("a,b\n1,2\n")
    left_out = LeftOut()
    files = find_files(DataConfig(path=str(tree)), left_out=left_out)
    assert [file.name for file in files] == sorted(NAMES)
    (line,) = left_out.lines()
    assert line.startswith("data.path: 3 left out (t/B.TSV, t/a.csv, t/c.csv.gz): CSV is not text")
    for path in ("t", "t/a.csv"):
        message = r"^data\.path=\S+ contains no file of text .*; data\.path: \d left out .*\.jsonl$"
        with pytest.raises(ConfigError, match=message):
            find_files(DataConfig(path=str(tree / path)))
    data = DataConfig(path=None, sources={"s": SourceConfig(path=str(tree / "t"))})
    with pytest.raises(ConfigError, match=r"^data\.sources\.s\.path=.*; data\.sources\.s\.path: 3"):
        find_files(data)


def test_an_idx_belongs_to_its_bin(tree):
    """It is no file of its own, but one without its .bin is, and is left out once it is read."""
    for name in ("m.bin", "m.idx", "M.BIN", "M.IDX", "alone.idx"):
        (tree / name).touch()
    left_out = LeftOut()
    files = find_files(DataConfig(path=str(tree), pattern="*.*"), left_out=left_out)
    names = [file.name for file in files]
    assert names == ["M.BIN", "a.txt", "alone.idx", "b.md", "m.bin"]
    assert left_out.lines() == []
    for data in (DataConfig(path=str(tree / "m.idx")), DataConfig(path=str(tree), pattern="m.idx")):
        with pytest.raises(
            ConfigError, match=r"1 left out \(m\.idx\): the \.idx of a \.bin, which"
        ):
            find_files(data)
