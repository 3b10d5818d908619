"""If this fails, a missing package is an error without the command that installs it. The error of a
checkout without an extra: one line with the command that installs it.

A package is missing where ``sys.modules`` holds None for it: imports and ``find_spec`` find none.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.train.jobs import ROOT
from tests.train.test_train_imports import MODULES, TRAIN, imported
from train import extras
from train.console import LineConsole
from train.log.plots import draw, plot_losses

# What comes with Python, with ringfa3 itself, or with omegaconf.
GIVEN = {*sys.stdlib_module_names, "train", "ringfa3", "torch", "numpy", "yaml"}
# Packages of the other extras; checks of the config, or ``draw``, name them.
OPTIONAL = {"matplotlib": "plots", "pyarrow": "parquet", "wandb": "wandb", "deepspeed": "deepspeed"}
BLOCKED = """
import runpy, sys
script, *missing = sys.argv[1:]
sys.modules.update(dict.fromkeys(missing))
sys.argv = [script, "mode=check"]
runpy.run_path(script, run_name="__main__")
"""


def run_without(*packages: str) -> subprocess.CompletedProcess[str]:
    """The script in an interpreter of its own, where ``packages`` are missing."""
    command = [sys.executable, "-c", BLOCKED, str(ROOT / "train" / "pretrain.py"), *packages]
    return subprocess.run(command, capture_output=True, text=True, env={}, timeout=100)


@pytest.mark.parametrize("package", extras.TRAIN)
def test_without_a_package_of_its_extra_the_script_names_the_extra(package):
    run = run_without(package)
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr == (
        f"pretrain.py: training needs packages that are not installed ({package}): "
        "pip install -e '.[train]'\n"
    )


def test_without_the_extra_all_packages_stand_in_one_line():
    run = run_without(*extras.TRAIN)
    assert run.returncode == 2
    (line,) = run.stderr.splitlines()
    assert f"({', '.join(extras.TRAIN)})" in line


def test_the_packages_are_those_of_pyproject():
    """Every import of the trainer is of a package in an extra, and the extra train has no other."""
    text = (ROOT / "pyproject.toml").read_text()

    def packages(extra: str) -> set[str]:
        (listed,) = re.findall(rf"^{extra} = \[(.*?)\]", text, re.MULTILINE | re.DOTALL)
        return set(re.findall(r'"([a-z0-9-]+)[^"]*"', listed))

    assert {{"hydra": "hydra-core"}.get(p, p) for p in extras.TRAIN} == packages("train")
    assert all(package in packages(extra) for package, extra in OPTIONAL.items())
    roots = {name.split(".")[0] for path in MODULES for name in imported(TRAIN / path)}
    assert roots - GIVEN <= {*extras.TRAIN, *OPTIONAL}


def test_without_matplotlib_a_line_names_the_extra(capsys, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    draw(lambda: plot_losses(Path("unused.png"), "", {"a": [1.0]}), LineConsole())
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("no plot: ")
    assert line.endswith("; pip install -e '.[plots]'")


@pytest.mark.parametrize(
    ("target", "extras"),
    [
        ("demo", ["train,plots"]),
        ("test", ["train,plots,test"]),
        ("check", ["train,plots,test"]),
        ("deepspeed", ["train,plots,test", "deepspeed"]),
        ("kernels", ["train,plots,test", "wheel"]),
    ],
)
def test_make_installs_what_a_target_needs_into_its_own_environment(tmp_path, target, extras):
    """In a checkout where nothing is installed yet, as make would do it."""
    for name in ("Makefile", "pyproject.toml"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    command = ["make", "--dry-run", "--silent", "-C", str(tmp_path), target]
    given = ("MAKEFLAGS", "MAKEOVERRIDES", "MFLAGS", "MAKELEVEL")  # to a make that runs this test
    own = {name: value for name, value in os.environ.items() if name not in given}
    run = subprocess.run(command, capture_output=True, text=True, env=own, timeout=60)
    assert run.returncode == 0, run.stderr
    assert re.findall(r'-e "\.\[(.*?)\]"', run.stdout) == extras
    environments = re.findall(r"[\w./-]*\.venv[\w-]*", run.stdout)
    assert set(environments) == {".venv-make"}
