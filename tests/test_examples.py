"""If this fails, an example that users copy does not run. The examples run as their docstrings say:
on the CPU, in one process and under torchrun."""

from __future__ import annotations

import ast
import contextlib
import io
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from tests.support.markdown import ROOT, blocks
from tests.support.ranks import Ranks

EXAMPLES = ROOT / "examples"


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The examples run on the CPU, whatever this machine has."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


def alone(name: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The lines that an example prints in one process, this one; sorted."""
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return sorted(capsys.readouterr().out.splitlines())


def shared(name: str) -> list[str]:
    """The lines that an example prints under torchrun on two processes, sorted."""
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    done = subprocess.run(
        [*torchrun, str(EXAMPLES / name)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    # torchrun runs Python unbuffered: a rank writes a line and its end apart, others in between.
    return sorted(filter(None, re.split(r"\n|(?=rank \d|loss [\d.]+,)", done.stdout)))


def test_attend_prints_what_the_readme_says(capsys: pytest.CaptureFixture[str]) -> None:
    """One process, then two, on the CPU: the norm to its two decimals."""
    (said,) = [text for language, text in blocks(ROOT / "README.md") if language == "text"]
    assert [*alone("attend.py", capsys), *shared("attend.py")] == said.splitlines()


@pytest.mark.parametrize("name", ["attend", "packed_documents", "shared_prefix", "hf_cp"])
def test_a_process_of_another_launcher_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise each of its processes would attend alone to all tokens."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("sys.argv", [f"{name}.py"])
    with pytest.raises(SystemExit, match=f"run torchrun .* examples/{name}.py"):
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")


def test_train_layer_learns() -> None:
    """The last loss is at most 0.8 of the first that is printed."""
    losses = [float(line.split()[-1]) for line in shared("train_layer.py")]
    assert len(losses) == 4
    assert losses[-1] < 0.8 * losses[0]


def test_packed_documents_give_one_loss_and_one_gradient(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Two ranks print the loss and the gradient norm of one process, to within 1e-4."""
    expected, *_ = alone("packed_documents.py", capsys)
    found, *tokens = shared("packed_documents.py")
    assert tokens == ["rank 0: 1024 of 2048 tokens", "rank 1: 1024 of 2048 tokens"]
    numbers = [[float(x) for x in re.findall(r"\d+\.\d+", s)] for s in (expected, found)]
    assert len(numbers[0]) == 2
    assert numbers[1] == pytest.approx(numbers[0], abs=1e-4)


def _in_group(group: dist.ProcessGroup, name: str) -> list[str]:
    """What an example prints on a rank whose default group exists already."""
    del group
    with (
        mock.patch("torch.distributed.destroy_process_group"),
        contextlib.redirect_stdout(io.StringIO()) as said,
    ):
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return said.getvalue().splitlines()


def test_a_tree_of_responses_trains_alike_on_any_number_of_ranks(
    ranks: Ranks, capsys: pytest.CaptureFixture[str]
) -> None:
    """Four ranks print the numbers of tokens and the losses of one process, to within 1e-4; the
    loss falls."""
    expected, (found, *others) = (
        alone("shared_prefix.py", capsys),
        ranks.run(4, _in_group, "shared_prefix.py"),
    )
    assert expected[0] == found[0] == "4319 tokens fold into 1043"
    assert others == [[]] * 3
    losses = [[float(line.split()[-1]) for line in lines[1:]] for lines in (expected, found)]
    assert len(losses[0]) == 3
    assert losses[1] == pytest.approx(losses[0], abs=1e-4)
    assert sorted(losses[0], reverse=True) == losses[0]


def test_every_example_says_how_it_is_started_and_is_tested() -> None:
    tested = set(re.findall(r'shared\("(\w+\.py)"', Path(__file__).read_text()))
    # The last three: tests/hf/test_context_parallel.py, test_hf_trainers.py, test_torchtitan.py.
    tested |= {"shared_prefix.py", "hf_cp.py", "hf_trainer.py", "torchtitan_cp.py"}
    assert {path.name for path in EXAMPLES.iterdir() if path.suffix == ".py"} == tested
    for name in tested:
        said = ast.get_docstring(ast.parse((EXAMPLES / name).read_text())) or ""
        assert f"examples/{name}" in said
