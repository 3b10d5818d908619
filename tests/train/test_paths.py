"""If this fails, a wrong path is an error that does not name its key. Paths that a run cannot read
or write: one line each, with the key and the remedy."""

from __future__ import annotations

import importlib
import pwd
import resource
import sys
from pathlib import Path

import pytest

from train.checks.config import check
from train.config import ConfigError
from train.data import shards
from train.data.shards import open_corpus
from train.paths import expand, make_folder
from train.pretrain import read_command_line
from train.run.failure import explain
from train.run.run_folder import RunFolder

READ_ONLY = "/sys/kernel"  # also for root


@pytest.fixture
def without_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container whose user has neither HOME nor an entry in /etc/passwd."""

    def unknown(user: object) -> None:
        raise KeyError(user)

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("data.path", "~/text"),
        ("data.tokenizer", "~/tokenizer.json"),
        ("run.dir", "~/run"),
        ("checkpoint.resume", "~/run"),
        ("checkpoint.init_from", "~/run"),
        ("checkpoint.init_from", "hf:~/model"),
    ],
)
def test_without_a_home_directory_the_key_is_named(config, without_home, key, value):
    section, _, name = key.partition(".")
    setattr(getattr(config, section), name, value)
    with pytest.raises(ConfigError, match=rf"{key}=.*~.*HOME is not set.*a path without ~"):
        check(config, world=1)


def test_without_a_home_directory_the_cache_needs_a_path(config, without_home):
    config.data.cache_dir = "~/.cache/ringfa3/data"
    check(config, world=1)
    with pytest.raises(ConfigError, match=r"data\.cache_dir=~/\.cache.*give data\.cache_dir"):
        open_corpus(config.data)


def test_home_is_expanded_in_every_path(config, text_folder, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(text_folder.parent))
    config.data.path = f"~/{text_folder.name}"
    config.data.cache_dir = str(tmp_path / "cache")
    assert len(open_corpus(config.data).train) > 0
    assert expand("run.dir", "~/run") == text_folder.parent / "run"


def test_a_shell_leaves_the_tilde_to_hydra():
    given = ["data.path=~/text", "run.dir=~me/run", "run.name=a~b", "~data", "data.path='~/t, x'"]
    quoted = read_command_line(given).overrides
    assert quoted == ["data.path='~/text'", "run.dir='~me/run'", *given[2:]]


def test_a_complete_cache_of_another_user_is_read_without_its_lock(config, monkeypatch):
    own = open_corpus(config.data)

    def denied(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(shards, "FileLock", denied)
    monkeypatch.setattr(shards, "make_folder", denied)
    assert open_corpus(config.data).digest == own.digest
    monkeypatch.setattr(shards, "verify", denied)
    with pytest.raises(ConfigError, match=r"data\.cache_dir: .* read \(Permission denied\)"):
        open_corpus(config.data)


def test_a_cache_that_cannot_be_searched_is_named(config, monkeypatch):
    """Path.exists raises for a folder of another user that others may not search."""

    def denied(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "exists", denied)
    with pytest.raises(ConfigError, match=r"data\.cache_dir: .* read \(Permission") as raised:
        open_corpus(config.data)
    assert not raised.value.found_by_all  # a process that alone has the error prints it


def test_a_cache_that_takes_no_file_is_named(config):
    config.data.cache_dir = READ_ONLY
    with pytest.raises(ConfigError, match=rf"data\.cache_dir: the folder {READ_ONLY} cannot be w"):
        open_corpus(config.data)


@pytest.mark.parametrize("limit", [5_000, 10_000])
def test_a_full_cache_disk_is_named(config, text_folder, limit):
    """Files end at ``limit`` bytes: in the tokenizer (7,769), or in the tokens (13,826)."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        with pytest.raises(
            ConfigError, match=r"data\.cache_dir: .* cannot be written to \(File too large\)"
        ) as raised:
            open_corpus(config.data)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not raised.value.found_by_all
    assert not list(Path(config.data.cache_dir).glob("*.tmp"))


def test_an_unreadable_text_is_not_blamed_on_the_cache(config, monkeypatch):
    def denied(file: shards.corpus.TextFile, *_: object) -> None:
        raise PermissionError(13, "Permission denied", str(file.path))

    monkeypatch.setattr(shards.corpus, "read_documents", denied)
    with pytest.raises(PermissionError):
        open_corpus(config.data)


def test_a_run_folder_that_takes_no_file_is_named(config, monkeypatch):
    config.run.dir = READ_ONLY
    with pytest.raises(ConfigError, match=rf"run\.dir: the folder {READ_ONLY} cannot be written"):
        RunFolder(config).make()
    error = OSError(28, "No space left on device")
    assert explain(error, config).endswith("writable, or choose another run.dir")
    for path, own in ((f"{READ_ONLY}/metrics.jsonl", True), (7, True), ("/dev/shm/x", False)):
        error = OSError(28, "No space left on device", path)
        assert explain(error, config).endswith("choose another run.dir") == own


def test_a_folder_is_made_with_its_parents(tmp_path):
    make_folder("sweep.dir", tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()
    assert not list((tmp_path / "a" / "b").iterdir())


def test_an_export_needs_a_folder_that_a_rename_can_replace(config, tmp_path, monkeypatch):
    config.mode, config.export.dir = "export", str(tmp_path / "link")
    disk = tmp_path / "disk"
    disk.mkdir()
    (tmp_path / "link").symlink_to(disk)
    check(config, world=1)
    monkeypatch.setattr(Path, "is_mount", lambda path: path == disk)
    with pytest.raises(ConfigError, match=rf"is a mount, .* in it: export\.dir={disk}/NAME"):
        check(config, world=1)


def test_an_import_of_the_entry_point_leaves_the_search_path(monkeypatch):
    """Other modules of the process are found as before."""
    monkeypatch.setattr(sys, "path", ["first", *sys.path])
    importlib.reload(importlib.import_module("train.pretrain"))
    assert sys.path[0] == "first"
