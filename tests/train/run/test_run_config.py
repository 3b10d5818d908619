"""If this fails, a run is read with other settings than it was trained with. The config of an
existing run: read back, with the command line's values on top."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from train.config import Config, ConfigError
from train.run.run_config import with_run_config
from train.run.run_folder import read_config
from train.sections.model import RopeConfig


@pytest.fixture
def run(config) -> Config:
    """The config of a run, and its folder."""
    config.model.dim, config.model.head_dim, config.optim.betas = 96, 48, [0.8, 0.9]
    config.sweep.dir = "elsewhere"
    folder = Path(config.run.dir)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(dataclasses.asdict(config)))
    return config


def test_a_config_is_read_as_written(run):
    assert read_config(Path(run.run.dir) / "config.json") == run


def test_keys_of_earlier_versions_are_read_by_their_present_names(run):
    path = Path(run.run.dir) / "config.json"
    values = json.loads(path.read_text())
    values["train"] |= {"recompute": "full", "loss_chunk": 77}
    del values["memory"]
    path.write_text(json.dumps(values))
    got = read_config(path)
    assert (got.memory.recompute, got.memory.loss_chunk) == ("full", 77)
    assert got.train == run.train


def test_a_rope_factor_of_earlier_versions_is_that_of_llama_3(run):
    path = Path(run.run.dir) / "config.json"
    for factor, kind in ((1.0, "default"), (8.0, "llama3")):
        values = dataclasses.asdict(run)
        values["model"]["rope"] = {"theta": 5e5, "factor": factor}
        path.write_text(json.dumps(values))
        assert read_config(path).model.rope == RopeConfig(kind, 5e5, factor)


def test_the_run_gives_the_model_and_the_command_line_wins(run):
    asked = Config(mode="eval")
    asked.run.dir, asked.data.max_doc_len, asked.parallel.cp = run.run.dir, 32, 2
    asked.model.rope.factor, asked.train.seed = 4.0, 9
    given = ["mode", "run.dir", "data.max_doc_len", "parallel.cp", "model.rope.factor"]
    got = with_run_config(asked, given)
    assert (got.mode, got.parallel.cp, got.data.max_doc_len, got.model.rope.factor) == (
        *("eval", 2, 32, 4.0),
    )
    assert (got.model.dim, got.data.seq_len, got.optim) == (96, run.data.seq_len, run.optim)
    assert got.train.seed == run.train.seed  # not on the command line: the run's value wins


def test_a_group_on_the_command_line_is_rejected(run):
    with pytest.raises(ConfigError, match=r"model=\.\.\.: mode=train takes .* from the run"):
        with_run_config(run, ["model"])


def test_a_folder_without_a_run_names_those_beside_it(run):
    empty = Path(run.run.dir).with_name("other")
    with pytest.raises(ConfigError, match=r"other contains no run.*other runs there: run"):
        read_config(empty / "config.json")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ('{"model": ', "Expecting value"),
        ("[]", "the sections of a config are missing"),
        ('{"train": null}', "train=None must be a section"),
        ('{"data": "text"}', "data=text must be a section"),
        ('{"model": {"rope": "llama3"}}', r" Merge .* RopeConfig\. value: llama3"),
        ('{"mode": {}}', "mode={} must be a word"),
        ('{"train": {"later": 1}}', r"train\.later is not a key of this version"),
        ('{"train": {"steps": "many"}}', r"train\.steps: Value 'many'"),
    ],
    ids=["torn", "list", "null", "word", "value", "mode", "later", "type"],
)
def test_a_config_that_cannot_be_read_is_refused_by_its_file(run, content, problem):
    path = Path(run.run.dir) / "config.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=rf"config\.json, the settings.* be read.*{problem}"):
        read_config(path)
