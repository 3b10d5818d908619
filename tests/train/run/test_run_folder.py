"""If this fails, a start overwrites another run. Which runs may start or continue in an existing
folder."""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tests.train.jobs import ROOT
from train.config import ConfigError
from train.keys import flatten, get
from train.run.run_folder import RunFolder, write_atomically


@pytest.fixture
def folder(config) -> RunFolder:
    """The folder of an unfinished run of ``config``."""
    folder = RunFolder(config)
    folder.checkpoints.mkdir(parents=True)
    folder.config.write_text(json.dumps(dataclasses.asdict(config)))
    folder.metrics.write_text('{"step": 1}\n')
    return folder


def test_a_new_an_empty_and_its_own_folder_are_valid(config, folder):
    folder.require_fit(config)
    config.run.dir += "-new"
    new = RunFolder(config)
    new.require_fit(config)
    new.path.mkdir()
    new.require_fit(config)


def test_other_files_are_never_mixed_with_a_run(config):
    folder = RunFolder(config)
    folder.path.mkdir()
    (folder.path / "books.jsonl").touch()
    config.run.overwrite = True
    with pytest.raises(ConfigError, match=r"run\.dir=.*books\.jsonl.*no run"):
        folder.require_fit(config)


def test_a_file_is_no_folder(config):
    folder = RunFolder(config)
    folder.path.touch()
    with pytest.raises(ConfigError, match="not a folder"):
        folder.require_fit(config)


def test_another_run_is_rejected_naming_the_key_that_differs(config, folder):
    config.optim.lr = 0.5
    with pytest.raises(
        ConfigError, match=r"optim\.lr was 0\.003, is now 0\.5.*run\.overwrite=true"
    ):
        folder.require_fit(config)
    config.run.overwrite = True
    folder.require_fit(config)


def test_keys_that_a_run_may_change(config, folder):
    config.parallel.cp = 2
    config.train.steps += 1
    config.train.gradient_accumulation_steps = 2
    config.checkpoint.every = 7
    config.guard.sigma = 5.0
    config.memory.recompute, config.memory.mlp_chunk = "full", 64
    folder.require_fit(config)


def test_a_run_whose_settings_have_old_names_goes_on(config, folder):
    values = json.loads(folder.config.read_text())
    values["train"] |= {"recompute": "full", "loss_chunk": 77}
    for section in ("memory", "engine", "verify"):  # keys that it did not have yet
        del values[section]
    del values["train"]["residual"], values["model"]["attention_precision"]
    folder.config.write_text(json.dumps(values))
    folder.require_fit(config)


def test_a_run_without_ends_of_documents_goes_on_without_them(config, folder):
    """Its settings lack the key. The refusal names the value, and the second stage with ends."""
    values = json.loads(folder.config.read_text())
    del values["data"]["eos_token"], values["data"]["special_tokens"]
    folder.config.write_text(json.dumps(values))
    with pytest.raises(
        ConfigError, match=r"data\.eos_token was none, is now null; .*checkpoint\.reset_data=true"
    ):
        folder.require_fit(config)
    config.data.eos_token = "none"
    folder.require_fit(config)


ANEW = "start a new run from it in another run.dir with checkpoint.resume=RUN"


@pytest.mark.parametrize(
    ("key", "way"),
    [
        ("model.rope.theta", f"{ANEW}, "),
        ("model.n_layers", "to continue it, "),
        ("train.seed", f"{ANEW} checkpoint.reset_data=true, "),
        ("data.path", f"{ANEW} checkpoint.reset_data=true, "),
        ("optim.eps", f"checkpoint.accept_changes=[optim.eps], {ANEW}, "),
    ],
)
def test_keys_that_a_run_may_not_change(config, folder, key, way):
    section, _, name = key.rpartition(".")
    value = get(config, key)
    setattr(get(config, section), name, f"{value}2" if isinstance(value, str) else value + 1)
    with pytest.raises(ConfigError) as raised:
        folder.require_fit(config)
    assert f"contains a run with different settings: {key} was " in str(raised.value)
    assert f"{way}or choose another run.dir" in str(raised.value).replace(str(folder.path), "RUN")


def test_overwrite_replaces_complete_and_other_runs_but_never_a_stopped_one(config, folder):
    config.run.overwrite = True
    assert not folder.is_replaced_by(config)
    config.checkpoint.resume = "never"
    assert folder.is_replaced_by(config)
    config.checkpoint.resume = "auto"
    folder.summary.write_text('{"ste')  # torn by a kill
    assert not folder.is_replaced_by(config)
    folder.summary.write_text(json.dumps({"steps": config.train.steps}))
    assert folder.is_replaced_by(config)
    config.train.steps += 1
    assert not folder.is_replaced_by(config)
    config.optim.lr = 0.5
    assert folder.is_replaced_by(config)


def test_overwrite_replaces_a_run_of_a_later_version(config, folder):
    folder.config.write_text('{"train": {"later": 1}}')
    with pytest.raises(ConfigError, match=r"train\.later is not a key of this version"):
        folder.require_fit(config)
    config.run.overwrite = True
    assert folder.is_replaced_by(config)


def test_a_folder_that_cannot_be_made_is_named(config, tmp_path):
    (tmp_path / "file").touch()
    config.run.dir = str(tmp_path / "file" / "run")
    with pytest.raises(ConfigError, match=r"run\.dir: the folder .*file/run cannot be made"):
        RunFolder(config).lock()


def test_one_job_at_a_time(config, folder, monkeypatch):
    monkeypatch.setattr("train.run.run_folder.LOCK_S", 0.1)
    folder.ranks.write_text(json.dumps([{"rank": 0, "host": "here", "pid": 7}]))
    lock = folder.lock()
    with pytest.raises(ConfigError, match="in use by another job: process 7 on here"):
        RunFolder(config).lock()
    folder.ranks.unlink()  # a job that starts has not written them yet
    with pytest.raises(ConfigError, match="in use by another job; wait for it"):
        RunFolder(config).lock()
    lock.release()
    RunFolder(config).lock().release()


def test_a_file_is_replaced_whole_or_unchanged(tmp_path):
    path = tmp_path / "config.json"
    write_atomically(path, "old")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            write_atomically(path, "n" * 100)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.read_text() == "old"


def test_resume_never_rejects_a_run(config, folder):
    config.checkpoint.resume = "never"
    with pytest.raises(ConfigError, match=r"already contains a run and checkpoint\.resume=never"):
        folder.require_fit(config)


def test_a_complete_run_continues_only_for_more_steps(config, folder):
    folder.summary.write_text(json.dumps({"steps": config.train.steps}))
    with pytest.raises(ConfigError, match=r"complete after 300 steps; raise train\.steps"):
        folder.require_fit(config)
    config.train.steps += 1
    folder.require_fit(config)


def test_a_run_without_its_config_is_rejected(config, folder):
    folder.config.unlink()
    with pytest.raises(ConfigError, match=r"without its settings, config\.json"):
        folder.require_fit(config)


def test_clear_keeps_files_that_are_not_of_a_run(folder):
    (folder.path / "notes.txt").write_text("mine")
    for name in ("eval-book.json", "eval-book.png", "tokenizer.json", "wandb-id.txt"):
        (folder.path / name).touch()
    folder.profile.mkdir()
    (folder.profile / "steps1-2-rank0.json.gz").touch()
    folder.clear()
    assert {path.name for path in folder.path.iterdir()} == {"notes.txt", "checkpoints"}
    assert not any(folder.checkpoints.iterdir())


def test_flatten():
    nested = {"a": {"b": 1, "c": {"d": [2]}}, "e": None}
    assert flatten(nested) == {
        "a.b": 1,
        "a.c.d": [2],
        "e": None,
    }


def checkpoint_in(folder: RunFolder, name: str = "step-00000003") -> Path:
    (folder.checkpoints / name).mkdir(parents=True)
    (folder.checkpoints / name / "manifest.json").touch()
    return folder.checkpoints / name


@pytest.mark.parametrize("name", ["step-00000003", "damaged-step-00000003-17"])
def test_a_folder_with_checkpoints_is_a_run(config, folder, name):
    folder.metrics.unlink()
    assert not folder.holds_run()
    checkpoint_in(folder, name)
    assert folder.holds_run()
    folder.require_fit(config)
    config.optim.lr = 0.5
    with pytest.raises(ConfigError, match=r"optim\.lr was 0\.003, is now 0\.5"):
        folder.require_fit(config)
    config.run.overwrite = True
    assert folder.is_replaced_by(config)
    folder.config.unlink()  # as a kill in the middle of `clear` leaves it
    assert folder.is_replaced_by(config)
    config.run.overwrite = False
    with pytest.raises(ConfigError, match=r"without its settings, config\.json"):
        folder.require_fit(config)


def test_a_partial_checkpoint_alone_is_no_run(folder):
    folder.metrics.unlink()
    for name in (".step-00000003", ".old-step-00000003", "step-3.ckpt"):
        checkpoint_in(folder, name)
    assert not folder.holds_run()


@pytest.mark.parametrize("removals", range(1, len(RunFolder.FILES)))
def test_a_kill_during_a_clear_never_leaves_files_without_a_run(folder, monkeypatch, removals):
    """Another start would mix them with its own."""
    for name in RunFolder.FILES:
        (folder.path / name).touch()
    left = iter(range(removals))

    def remove_or_die(path):
        if next(left, None) is None:
            raise KeyboardInterrupt
        path.rmdir() if path.is_dir() else path.unlink(missing_ok=True)

    monkeypatch.setattr("train.run.run_folder.require_removal", remove_or_die)
    with pytest.raises(KeyboardInterrupt):
        folder.clear()
    assert folder.holds_run()
    assert not folder.config.exists()


def test_clear_empties_a_linked_folder_of_checkpoints_and_keeps_the_link(folder, tmp_path):
    disk = tmp_path / "disk"
    folder.checkpoints.rmdir()
    disk.mkdir()
    folder.checkpoints.symlink_to(disk)
    for name in ("step-00000003", "damaged-step-00000001-5", ".step-00000004", "mine"):
        checkpoint_in(folder, name)
    folder.clear()
    assert not folder.holds_run()
    assert folder.checkpoints.is_symlink()
    assert [path.name for path in disk.iterdir()] == ["mine"]


def test_clear_spares_what_links_to_other_folders_point_to(config, folder, tmp_path):
    other = RunFolder(
        dataclasses.replace(config, run=dataclasses.replace(config.run, dir=f"{tmp_path}/o"))
    )
    theirs = checkpoint_in(other)
    other.config.touch()
    other.tensorboard.mkdir()
    folder.checkpoints.rmdir()
    folder.checkpoints.symlink_to(other.checkpoints)
    folder.tensorboard.symlink_to(other.tensorboard)
    folder.clear()
    assert not folder.checkpoints.is_symlink()
    assert not folder.tensorboard.is_symlink()
    assert theirs.is_dir()
    assert other.tensorboard.is_dir()
    folder.checkpoints.symlink_to(tmp_path / "gone")
    folder.clear()
    assert not folder.checkpoints.is_symlink()


def test_clear_fails_if_something_stays(folder, monkeypatch):
    path = checkpoint_in(folder)

    def busy(path: Path, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            raise OSError(16, "Device or resource busy", str(path))

    monkeypatch.setattr("shutil.rmtree", busy)
    with pytest.raises(ConfigError, match=rf"{path} cannot be removed \(Device or resource busy"):
        folder.clear()


def test_a_file_is_utf_8_in_every_locale(tmp_path):
    """The tokens in tokenizer.json are not ASCII."""
    program = "from train.run.run_folder import write_atomically as write; import pathlib; "
    program += "write(pathlib.Path('tokenizer.json'), '\\u0120the')"
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    environment = {**os.environ, **ascii_only, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=environment, check=True)
    assert (tmp_path / "tokenizer.json").read_bytes() == "\u0120the".encode()
