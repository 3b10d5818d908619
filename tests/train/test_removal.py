"""If this fails, a cleanup deletes files of others, or keeps what it should delete. What is removed
is gone, or that is an error; the target of a link stays."""

from __future__ import annotations

import os

import pytest

from train.config import ConfigError
from train.hf.origin import keep_origin
from train.paths import discard, remove, require_removal


def test_files_folders_and_links_are_removed_and_targets_stay(tmp_path):
    target = tmp_path / "target"
    (target / "deep").mkdir(parents=True)
    (tmp_path / "file").touch()
    (tmp_path / "folder" / "deep").mkdir(parents=True)
    (tmp_path / "link").symlink_to(target)
    (tmp_path / "dangling").symlink_to(tmp_path / "gone")
    for name in ("file", "folder", "link", "dangling", "nothing"):
        remove(tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["target"]
    assert (target / "deep").is_dir()


def test_a_failure_is_an_error_only_where_it_matters(tmp_path, monkeypatch):
    def busy(path, ignore_errors=False):
        if not ignore_errors:
            raise OSError(16, "Device or resource busy", str(path))

    monkeypatch.setattr("shutil.rmtree", busy)
    discard(tmp_path)
    with pytest.raises(ConfigError, match=r"cannot be removed \(Device or resource busy"):
        require_removal(tmp_path)


def test_what_can_be_discarded_is(tmp_path, monkeypatch):
    """A file that is busy costs only its own space."""
    for name in "abc":
        (tmp_path / "folder").mkdir(exist_ok=True)
        (tmp_path / "folder" / name).touch()
    unlink = os.unlink

    def busy(path, **options):
        if os.fspath(path).endswith("b"):
            raise OSError(16, "Device or resource busy", path)
        unlink(path, **options)

    monkeypatch.setattr(os, "unlink", busy)
    discard(tmp_path / "folder")
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["b"]


def test_settings_of_an_earlier_origin_never_stay(tmp_path):
    """Neither in a linked folder: the weights of a killed export would enter the next one."""
    for name in ("earlier", "origin"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(name)
    kept = tmp_path / "kept"
    kept.symlink_to(tmp_path / "earlier")
    keep_origin(None, kept)
    assert not kept.exists()
    kept.symlink_to(tmp_path / "earlier")
    keep_origin(tmp_path / "origin", kept)
    assert (kept / "config.json").read_text() == "origin"
    assert (tmp_path / "earlier" / "config.json").read_text() == "earlier"
