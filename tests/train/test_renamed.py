"""If this fails, commands and runs of earlier versions fail without the new name. Names of earlier
versions: refused with the new name where given, read in stored settings."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from tests.train.jobs import steps
from train.checks.config import check
from train.config import Config, ConfigError, EngineConfig, from_plain
from train.data.manifest import read_manifest, write_manifest
from train.engine import train_state
from train.keys import schema
from train.sections.renamed import RENAMED, RENAMED_VALUES

OLD = {
    "train": {"batch": 8, "accumulation": 1, "recompute": "full"},
    "data": {"path": "/", "piece_len": 77},
}


def test_stored_settings_of_earlier_versions_are_read():
    stored = {**OLD, "engine": {"name": "fsdp2", "shard": "host"}}
    before = json.dumps(stored)
    config = from_plain(stored)
    assert (config.train.global_batch_size, config.train.gradient_accumulation_steps) == (8, 1)
    assert (config.data.max_doc_len, config.memory.recompute) == (77, "full")
    assert config.engine == EngineConfig("fsdp2", shard="hsdp", reduce="step")
    assert json.dumps(stored) == before
    assert from_plain(dataclasses.asdict(config)) == config


def test_an_earlier_run_has_the_stream_of_samples_that_it_had():
    """The settings in the metadata of a checkpoint, under old and new names."""
    config = Config()
    config.data.path, config.data.max_doc_len, config.data.eos_token = "/", 77, "none"
    now = json.loads(json.dumps(dataclasses.asdict(config)))
    earlier = json.loads(json.dumps(now))
    earlier["data"]["piece_len"] = earlier["data"].pop("max_doc_len")
    streams = [train_state._stream({"corpus": "c", "settings": s}) for s in (now, earlier)]
    assert streams[0] == streams[1]
    assert streams[0]["data.max_doc_len"] == 77


def to_earlier(settings: dict[str, Any]) -> None:
    """Settings as an earlier version stored them: with its names, and without later keys."""
    for old, new in RENAMED.items():
        (section, key), (new_section, new_key) = old.split("."), new.split(".")
        settings[section][key] = settings[new_section].pop(new_key)
    settings["engine"]["shard"] = "host"
    for section, key in (
        ("engine", "reduce"),
        ("train", "compile"),
        ("memory", "recompute_layers"),
    ):
        del settings[section][key]


def test_a_run_of_an_earlier_version_goes_on_and_is_evaluated_and_exported(
    pretrain, overrides, tmp_path
):
    """With fsdp2, whose keys have changed: in the run's settings and in those of a checkpoint."""
    folder = tmp_path / "run"
    command = [*overrides, f"run.dir={folder}", "engine=fsdp2", "engine.shard=hsdp"]
    command += ["train.gradient_accumulation_steps=2", "optim.schedule_steps=6"]
    pretrain(*command, "train.steps=3").check_returncode()
    (checkpoint,) = (folder / "checkpoints").iterdir()
    path, manifest = folder / "config.json", read_manifest(checkpoint)
    settings = json.loads(path.read_text())
    for stored in (settings, manifest.metadata["settings"]):
        to_earlier(stored)
    path.write_text(json.dumps(settings))
    write_manifest(checkpoint, manifest.metadata, [checkpoint / name for name in manifest.files])
    text, exported = tmp_path / "text.txt", tmp_path / "exported"
    text.write_text("ring attention\n" * 50)
    pretrain(
        "mode=eval", f"run.dir={folder}", f"eval.path={text}", "eval.name=text"
    ).check_returncode()
    assert json.loads((folder / "eval-text.json").read_text())["loss"] > 0
    pretrain("mode=export", f"run.dir={folder}", f"export.dir={exported}").check_returncode()
    assert (exported / "model.safetensors").is_file()
    pretrain(*command, "train.steps=6").check_returncode()
    assert [step for step, *_ in steps(folder)] == [1, 2, 3, 4, 5, 6]
    assert json.loads(path.read_text())["train"]["compile"] == "none"


def test_new_names_are_keys_and_old_names_are_none():
    assert set(RENAMED.values()) <= schema().keys()
    assert not set(RENAMED) & schema().keys()


@pytest.mark.parametrize(("old", "new"), [*RENAMED.items(), *RENAMED_VALUES.items()])
def test_an_old_name_exits_2_and_names_the_new(pretrain, tmp_path, old, new):
    """On the command line and in a file."""
    (tmp_path / "experiment").mkdir()
    section, _, key = old.partition(".")
    key, _, value = key.partition("=")
    text = f"{section}: {{{key}: {value or 4}}}"
    if old == "memory=keep":
        text = "defaults: [{override /memory: keep}]"
    (tmp_path / "experiment" / "mine.yaml").write_text(f"# @package _global_\n{text}\n")
    given = old if "=" in old else f"{old}=4"
    engine = ["engine=fsdp2"] if section == "engine" else []
    for arguments in (
        [*engine, given],
        ["--config-dir", str(tmp_path), *engine, "experiment=mine"],
    ):
        done = pretrain(*arguments)
        assert done.returncode == 2
        assert f"its name is {new} now" in done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_an_old_name_among_the_accepted_changes_names_the_new(config):
    config.checkpoint.accept_changes = ["train.batch"]
    with pytest.raises(ConfigError, match=r"its name is train\.global_batch_size now"):
        check(config, world=1)
