"""If this fails, a mistyped key is ignored, or its error does not help. Configs: errors are
explained, and the files agree with the schema."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.support.ci_scripts import ci_script
from tests.train.forks import SCRIPT, TORCHRUN
from tests.train.jobs import HANG_S
from train.config import GROUPS
from train.help import help_text, options
from train.keys import (
    default,
    describe_values,
    nearest,
    schema,
    schema_keys,
    to_schema_key,
    value_keys,
)

ROOT = Path(__file__).absolute().parents[2]
REFERENCE = ci_script("reference")
BY_SIZE = ("optim.lr", "train.batch_tokens")  # keys that the size of the model decides


@pytest.mark.parametrize(
    ("argument", "key", "valid"),
    [
        ("modle=tiny", "modle", "model"),
        ("model=tinny", "model", "tiny"),
        ("model.n_headz=4", "model.n_headz", "model.n_heads"),
        ("model.n_heads=7", "model.n_heads", "model.n_heads=8"),
        ("+foo=1", "foo", "nearest valid one is"),
        ("data.path=/nowhere", "data.path", "nearest existing folder: /"),
        ("train.steps=many", "train.steps", "train.steps=300"),
        ("train.steps=1e6", "train.steps", "valid would be train.steps=1000000"),
        ("optim.betas=[0.9,x]", "optim.betas: Value 'x'", "optim.betas=[0.9, 0.95]"),
        ("run.dir=/dev/null/run", "run.dir: the folder /dev/null/run", "choose another"),
        ("data.cache_dir=/dev/null/c", "data.cache_dir: the folder /dev/null/c", "choose another"),
        ("parallel.cp=3", "parallel.cp", "parallel.cp=1"),
        ("engine=fsdp", "engine=fsdp", "engine=fsdp2"),
        ("engine.shard=all", "engine=fsdp2, not of engine=ddp", "choose engine=fsdp2"),
        ("train.recompute=full", "train.recompute", "its name is memory.recompute now"),
        ("+train.loss_chunk=7", "train.loss_chunk", "its name is memory.loss_chunk now"),
        ("memory=nonee", "memory=nonee", "did you mean memory=none?"),
        ("engine.stage=two", "engine.stage", "valid would be engine.stage=null"),
        ("data=text", "data.path", "data.path="),
        ("train.seed=[", "train.seed", "quote a value"),
        ("--multirn", "--multirn", "settings are written key=value"),
        ("data.sources.books.pth=/", "data.sources.books.pth", "data.sources.books.path"),
        ("data.sources.books.weight=much", "data.sources.books.weight", "books.weight=1.0"),
        ("data.sources={books:{wieght: 2}}", "data.sources.books.wieght", "books.weight"),
        ("data.sources.books.weight=2", "data.sources.books.path", "data.sources.books.path=..."),
        ("data.sources.books.path=/nowhere", "data.sources.books.path", "nearest existing folder"),
        ("+data.sources.books.path=/", "data.sources.books.path", "write data.sources.books.path"),
        ("data.sources={a.b:{path: /}}", "data.sources.a.b", "letters, digits, _ and - only"),
    ],
)
def test_an_invalid_value_exits_2_naming_key_and_remedy(pretrain, argument, key, valid):
    done = pretrain(argument)
    message = done.stdout + done.stderr
    assert done.returncode == 2
    assert len(message.splitlines()) <= 5
    assert key in message
    assert valid in message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "model: {n_headz: 3}",
            "model.n_headz: no such key; the nearest valid one is model.n_heads",
        ),
        ("train: {recompute: full}", "train.recompute: no such key; its name is memory.recompute"),
        ("model: {n_heads: lots}", "valid would be model.n_heads=4"),
        ("run: {dir: '${run.nam}'}", "run.dir: Interpolation key 'run.nam' not found"),
        ("model: [", "mine.yaml"),
        (
            "data: {sources: {books: {path: /, wieght: 1}}}",
            "data.sources.books.wieght: no such key; the nearest valid one is "
            "data.sources.books.weight",
        ),
        ("data: {sources: {books: 3}}", "data.sources.books: Invalid type assigned"),
    ],
    ids=["key", "old key", "type", "interpolation", "syntax", "source", "source type"],
)
def test_a_wrong_file_is_explained_like_a_wrong_argument(pretrain, tmp_path, text, message):
    folder = tmp_path / "experiment"
    folder.mkdir()
    (folder / "mine.yaml").write_text(f"# @package _global_\n{text}\n")
    done = pretrain("--config-dir", str(tmp_path), "experiment=mine")
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_an_error_after_the_stopper_has_started_is_explained_alike(pretrain, text_folder, tmp_path):
    """An invalid tokenizer file: the error comes when the corpus is opened."""
    (tmp_path / "bad.json").write_text("{}")
    place = [f"data.path={text_folder}", f"data.cache_dir={tmp_path}", f"run.dir={tmp_path}/run"]
    done = pretrain(*place, f"data.tokenizer={tmp_path}/bad.json")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "bad.json is not a tokenizer.json" in line


def test_under_torchrun_one_process_prints_and_all_exit_2():
    """In new interpreters: they end before they import torch."""
    launcher = [*TORCHRUN, "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, *launcher, SCRIPT, "parallel.cp=3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S)
    assert done.stderr.count("pretrain.py: parallel.cp=3") == 1
    assert set(re.findall(r"exitcode\s*: (\d+)", done.stderr)) == {"2"}


def test_check_mode_starts_nothing(pretrain, text_folder, tmp_path):
    folder = tmp_path / "run"
    done = pretrain("mode=check", f"data.path={text_folder}", f"run.dir={folder}")
    assert done.returncode == 0, done.stderr
    assert "41 files" in done.stdout
    assert not folder.exists()


def test_sources_come_from_the_command_line_and_from_files(pretrain, text_folder, tmp_path):
    """A file names two sources; the command line changes one of them and adds a third."""
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(
        "# @package _global_\ndefaults: [{override /data: mixture}]\n"
        f"data: {{sources: {{all: {{path: {text_folder}}}, deep: {{path: /nowhere}}}}}}\n"
    )
    arguments = ["--config-dir", str(tmp_path), "mode=check", "experiment=mine"]
    arguments += [f"data.sources.deep.path={text_folder}", "data.sources.deep.pattern=deep/*"]
    arguments += [f"data.sources.one.path={text_folder}/1.txt", "data.sources.one.weight=0.5"]
    done = pretrain(*arguments)
    assert done.returncode == 0, done.stderr
    assert f"{41 + 20 + 1} files" in done.stdout
    done = pretrain("mode=check", f"data.sources={{one: {{path: {text_folder}/1.txt}}}}")
    assert done.returncode == 0, done.stderr
    assert "1 files" in done.stdout


def test_a_mixture_without_sources_is_rejected(pretrain):
    done = pretrain("mode=check", "data=mixture")
    assert done.returncode == 2
    assert "data.path has no value yet" in done.stderr
    assert "data.sources.NAME.path=..." in done.stderr


@pytest.mark.parametrize("width", [20, 60, 80])
def test_help_explains_every_key_without_a_broken_word(width):
    """Each key with its type, default and meaning; lines are broken at spaces alone. Some words
    are longer than 20 letters."""
    text = help_text([], width)
    for group in GROUPS:
        assert f"  {group}: {', '.join(options(group))}" in text
    assert "model: 125m, 1b, 8b, inherit, qwen3_8b, tiny" in text
    words = " ".join(text.split())
    for key in value_keys():
        assert f" {key} {describe_values(key)} {schema()[key].meaning}" in words
    keys = text[text.index("Keys (key=value)") :].splitlines()
    assert width == 20 or max(map(len, keys)) <= width
    if width == 80:
        assert "data.seq_len (int >= 2, default: 4096)\n      tokens per sample, over all" in text


def test_help_explains_a_section_a_source_and_a_key(pretrain):
    done = pretrain("--help", "guard", "data.sources.books.weight", "model.rope.type=yarn")
    assert done.returncode == 0
    named = [line.split()[0] for line in done.stdout.splitlines() if re.match(r"  [a-z]", line)]
    sought = ["guard.sigma", "guard.window", "guard.patience", "data.sources.NAME.weight"]
    assert named == [*sought, "model.rope.type"]
    done = pretrain("--help", "gaurd")
    assert done.returncode == 2
    assert "no such section or key; the nearest is guard" in done.stderr


def test_nearest_handles_wrong_sections_and_swapped_letters():
    assert nearest("seq_len", schema_keys()) == "data.seq_len"
    assert nearest("train.lr", schema_keys()) == "optim.lr"
    assert nearest("modle", ["mode", "model"]) == "model"
    assert nearest("zzz", schema_keys()) is None


def test_a_source_may_have_any_name():
    assert to_schema_key("data.sources.path.path") == "data.sources.NAME.path"
    assert to_schema_key("data.sources.books") == "data.sources.NAME"
    assert to_schema_key("data.sources") == "data.sources"
    assert to_schema_key("model.dim") == "model.dim"
    assert {"data.sources", "data.sources.NAME", "data.sources.NAME.weight"} <= set(schema_keys())
    assert default("data.sources.NAME.weight") == 1.0


def test_every_key_has_a_meaning_and_stands_in_a_file_with_its_default():
    """The keys of an engine are null for the others: its file has their values."""
    found = {key: value for name in REFERENCE.EXPLAINING for key, value in _values(name)}
    expected = [key for key in value_keys() if not key.startswith("data.sources.NAME.")]
    assert sorted(found) == sorted(expected)
    for key in value_keys():
        assert schema()[key].meaning, f"{key} has no docstring"
        if key in BY_SIZE:
            assert found[key] == "???"
        elif key in expected and not key.startswith("engine."):
            usual = default(key) if key != "data.path" else None
            exact = not isinstance(usual, float)
            assert found[key] == (usual if exact else pytest.approx(usual))


def test_comments_and_the_reference_are_those_of_the_schema():
    """After a change of train/sections/: python .ci/reference.py."""
    assert (ROOT / "docs" / "reference.md").read_text() == REFERENCE.page()
    for name, prefix in REFERENCE.EXPLAINING.items():
        text = (ROOT / "configs" / name).read_text()
        assert text == REFERENCE.commented(text, prefix), name
        bare = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("# ("))
        for key, _ in _values(name):
            assert describe_values(key)[:60] in text, f"{key} has no comment in {name}"
            assert describe_values(key)[:60] not in bare


def _values(name):
    text = (ROOT / "configs" / name).read_text()
    values = {k: v for k, v in yaml.safe_load(text).items() if k not in ("defaults", "hydra")}
    return _leaves(values, REFERENCE.EXPLAINING[name].rstrip("."))


def _leaves(values, prefix):
    for name, value in values.items():
        key = f"{prefix}.{name}" if prefix else name
        if isinstance(value, dict) and value:
            yield from _leaves(value, key)
        else:
            yield key, value
