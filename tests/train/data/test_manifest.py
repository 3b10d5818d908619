"""If this fails, damaged files pass as whole. Manifests: they are read as written, and name any
difference."""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path

import pytest

from train.config import ConfigError
from train.data import manifest
from train.data.manifest import (
    DamagedError,
    FileMetadata,
    read_manifest,
    verify,
    write_manifest,
)

METADATA = {"step": 12, "loss": 0.1, "names": ["a", "λ"], "by_rank": {"10": 1, "9": None}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two files, one of them in a subfolder, and their manifest."""
    folder = tmp_path / "kept"
    (folder / "deep").mkdir(parents=True)
    (folder / "a.bin").write_bytes(b"ring" * 100)
    (folder / "deep" / "b.bin").write_bytes(b"")
    write_manifest(folder, METADATA)
    return folder


def seal(folder: Path, body: dict) -> None:
    """Write ``body`` as a manifest with a correct checksum of itself."""
    crc32 = zlib.crc32(json.dumps(body, sort_keys=True).encode())
    (folder / "manifest.json").write_text(json.dumps({**body, "crc32": crc32}))


def test_metadata_sizes_and_checksums_are_read_back(folder):
    found = read_manifest(folder)
    assert found == verify(folder)
    assert found.metadata == METADATA
    assert found.files == {
        "a.bin": FileMetadata(400, zlib.crc32(b"ring" * 100)),
        "deep/b.bin": FileMetadata(0, 0),
    }
    assert {path.name for path in folder.iterdir()} == {"a.bin", "deep", "manifest.json"}


def test_a_rewritten_manifest_lists_neither_itself_nor_temporary_files(folder):
    (folder / "manifest.json.tmp").write_text("half")
    write_manifest(folder, {"step": 13})
    assert verify(folder).metadata == {"step": 13}
    assert set(read_manifest(folder).files) == {"a.bin", "deep/b.bin"}


def test_only_the_given_files_are_listed_and_only_from_below(folder):
    (folder / "log.txt").write_text("grows")
    write_manifest(folder, {}, [folder / "a.bin"])
    (folder / "log.txt").write_text("grows on")
    assert set(verify(folder).files) == {"a.bin"}
    for path in (folder.parent / "other", folder / ".." / "other"):
        path.write_text("outside")
        with pytest.raises(ValueError, match="other"):
            write_manifest(folder, {}, [path])


def test_everything_is_on_the_disk_before_the_manifest_has_its_name(folder, monkeypatch):
    """The order of the calls of fsync and rename."""
    (folder / "manifest.json").unlink()
    done: list[int | str] = []
    fsync, replace = os.fsync, Path.replace

    def sync(descriptor: int) -> None:
        done.append(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def rename(path: Path, target: Path) -> None:
        done.append("rename")
        replace(path, target)

    monkeypatch.setattr(manifest.os, "fsync", sync)
    monkeypatch.setattr(Path, "replace", rename)
    write_manifest(folder, METADATA)
    renamed = done.index("rename")
    names = ("a.bin", "deep/b.bin", "manifest.json", "deep", ".")
    assert {(folder / name).stat().st_ino for name in names} <= set(done[:renamed])
    assert done[renamed + 1 :] == [folder.stat().st_ino]


def test_a_failed_write_leaves_no_manifest(folder):
    (folder / "manifest.json").unlink()
    with pytest.raises(TypeError):
        write_manifest(folder, {"not json": object()})
    with pytest.raises(DamagedError, match=r"manifest\.json is missing"):
        read_manifest(folder)


def _damage(folder: Path, how: str) -> None:
    path, own = folder / "a.bin", folder / "manifest.json"
    if how == "missing":
        path.unlink()
    elif how == "folder":
        path.unlink()
        path.mkdir()
    elif how == "shorter":
        path.write_bytes(path.read_bytes()[:-1])
    elif how == "flipped":
        content = bytearray(path.read_bytes())
        content[200] ^= 1
        path.write_bytes(content)
    elif how == "no manifest":
        own.unlink()
    elif how == "half a manifest":
        own.write_text(own.read_text()[:-20])
    elif how == "not text":
        own.write_bytes(b"\xff\xfe")
    elif how == "another step":
        own.write_text(own.read_text().replace('"step": 12', '"step": 13'))
    elif how == "a list":
        own.write_text("[]")
    elif how == "shape":
        seal(folder, {"format": 1, "facts": {}, "files": {"a.bin": {"bytes": 3}}})
    else:
        seal(folder, {"format": 1, "facts": {}, "files": {how: {"size": 0, "crc32": 0}}})


@pytest.mark.parametrize(
    ("how", "name", "problem"),
    [
        ("missing", "a.bin", "is missing"),
        ("folder", "a.bin", "is not a file"),
        ("shorter", "a.bin", "has 399 bytes, not 400"),
        ("flipped", "a.bin", "differs from its checksum"),
        ("no manifest", "manifest.json", "is missing"),
        ("half a manifest", "manifest.json", "cannot be read"),
        ("not text", "manifest.json", "cannot be read"),
        ("another step", "manifest.json", "differs from its checksum"),
        ("a list", "manifest.json", "is not a manifest"),
        ("shape", "manifest.json", "lacks what a manifest has"),
        ("/etc/hostname", "manifest.json", "names '/etc/hostname'"),
        ("deep/../../x", "manifest.json", "names 'deep/../../x'"),
        ("", "manifest.json", "names ''"),
    ],
)
def test_damage_is_named(folder, how, name, problem):
    _damage(folder, how)
    with pytest.raises(DamagedError) as raised:
        verify(folder)
    assert raised.value.path == folder / name
    assert problem in raised.value.problem
    assert str(raised.value) == f"{folder / name} {raised.value.problem}"


def test_contents_are_compared_on_request(folder):
    _damage(folder, "flipped")
    verify(folder, contents=False)
    verify(folder, contents=lambda name: name != "a.bin")
    for contents in (True, lambda name: name == "a.bin"):
        with pytest.raises(DamagedError, match=r"a\.bin differs"):
            verify(folder, contents)
    _damage(folder, "shorter")
    with pytest.raises(DamagedError, match=r"a\.bin has 399 bytes"):
        verify(folder, contents=False)


def test_a_manifest_of_another_version_is_not_damaged(tmp_path):
    seal(tmp_path, {"format": 9, "facts": {}, "files": {}})
    with pytest.raises(ConfigError, match="has format 9; this version reads 1"):
        read_manifest(tmp_path)
