"""If this fails, runs compile where they should not, or wait for a compiler.
``train.compile=auto``: what it chooses on each device, and why it compiles nothing."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import pytest
import torch

from tests.train.held_runs import hold_run
from train import compile_choice
from train.compile_choice import compiles, why_uncompiled
from train.config import Config, ConfigError, from_plain
from train.model.transformer import build_model
from train.run.run_config import held_compile
from train.tasks import train


@pytest.fixture(autouse=True)
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with Triton and one C compiler, ``tmp_path/bin/clang``."""
    monkeypatch.setattr(compile_choice, "find_spec", lambda name: object())
    monkeypatch.delenv("CC", raising=False)
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    (folder / "clang").touch(mode=0o755)
    return folder / "clang"


def test_auto_compiles_on_a_gpu_alone():
    config = Config()
    assert config.train.compile == "auto"
    assert (compiles(config, cuda=True), compiles(config, cuda=False)) == (True, False)
    for mode, expected in (("block", True), ("none", False)):
        config.train.compile = mode
        assert compiles(config, cuda=True) is compiles(config, cuda=False) is expected
    model = build_model(Config(), 300, torch.device("cpu"))
    assert not model.transformer.compile
    assert all(block.compiled is None for block in model.transformer.blocks)


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("memory.offload", "residual", "memory.offload=residual moves tensors"),
        ("memory.offload", "all", "memory.offload=all moves tensors"),
        ("train.attention", "sdpa", "train.attention=sdpa is not one node"),
        ("train.deterministic", True, "train.deterministic=true"),
    ],
)
def test_settings_that_leave_blocks_uncompiled_are_named(key, value, reason):
    config = Config()
    section, name = key.split(".")
    setattr(getattr(config, section), name, value)
    assert why_uncompiled(config, cuda=True).startswith(reason)
    assert not compiles(config, cuda=True)


def test_tools_that_are_missing_are_named(tools, monkeypatch):
    """A job that runs elsewhere does not need them here."""
    config = Config()
    monkeypatch.setattr(compile_choice, "find_spec", lambda name: None)
    assert why_uncompiled(config, cuda=True) == "the package triton is not installed"
    monkeypatch.setattr(compile_choice, "find_spec", lambda name: object())
    tools.unlink()
    assert "neither CC, gcc nor clang" in why_uncompiled(config, cuda=True)
    assert compiles(config, cuda=True, here=False)
    tools.with_name("mycc").touch(mode=0o755)
    monkeypatch.setenv("CC", "mycc")
    assert compiles(config, cuda=True)


def test_a_run_goes_on_without_compiled_blocks_if_it_began_so(config):
    """It records none again, so the start after that does not compile either."""
    assert held_compile(config) == "auto"
    folder = hold_run(config)
    assert held_compile(config) == "auto"
    for recorded, expected in (("none", "none"), ("block", "auto"), (None, "none")):
        settings = json.loads(folder.config.read_text())
        settings["train"]["compile"] = recorded
        if recorded is None:  # a version without the key
            del settings["train"]["compile"]
        folder.config.write_text(json.dumps(settings))
        assert held_compile(config) == expected
    config.train.compile = "block"  # what is asked for goes first
    assert held_compile(config) == "block"
    config.train.compile, config.run.overwrite = "auto", True
    config.checkpoint.resume = "never"
    assert held_compile(config) == "auto"


def test_settings_of_a_version_without_the_key_mean_uncompiled_blocks():
    data = {"path": None}
    assert from_plain({"data": data, "train": {"steps": 3}}).train.compile == "none"
    assert from_plain({"data": data, "train": {"compile": "block"}}).train.compile == "block"


@pytest.mark.parametrize(
    ("cuda", "offload", "lines"), [(True, "all", 1), (True, "none", 0), (False, "all", 0)]
)
def test_a_start_on_gpus_says_in_one_line_why_it_compiles_nothing(
    config, capsys, cuda, offload, lines
):
    config.memory.recompute, config.memory.offload = "attention-saving", offload
    device = torch.device("cuda" if cuda else "cpu", 0)
    with (
        mock.patch.object(train, "choose_device", return_value=device),
        mock.patch.object(train, "set_affinity"),
        mock.patch.object(train, "before_run"),
        mock.patch.object(train, "open_corpus", side_effect=ConfigError("as far as this")),
        pytest.raises(ConfigError, match="as far as this"),
    ):
        train.run(config, mock.Mock())
    assert capsys.readouterr().out.count("train.compile=auto leaves blocks uncompiled: ") == lines
