"""If this fails, a part of the trainer cannot be changed without the others. Imports of the trainer
point one way, by package; Hydra and DeepSpeed stay in their modules."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

from train.config import MODES
from train.pretrain import MODULES as MODE_MODULES

TRAIN = Path(__file__).parents[2] / "train"

# A package imports from those before it. Each package's docstring names them.
ORDER = [
    "extras",
    "console",
    "slurm",
    "recipe",
    "sections",
    "hardware",
    "config",
    "compile_choice",
    "keys",
    "help",
    "paths",
    "host",
    "text",
    "data",
    "model",
    "engine",
    "hf",
    "run",
    "checks",
    "log",
    "estimate",
    "tasks",
    "probes",
    "pretrain",
]
PACKAGES = ORDER[ORDER.index("text") : -1]
HYDRA_MODULES = {"pretrain", "config", "sweep"}
MODULES = [path.relative_to(TRAIN) for path in sorted(TRAIN.rglob("*.py"))]


def imported(path: Path) -> set[str]:
    """Dotted names of everything that a file imports, at any depth of its code."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} has a relative import"
            names.add(node.module or "")
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_packages_import_one_way(path: Path) -> None:
    package = path.parts[0].removesuffix(".py")
    names = imported(TRAIN / path)
    if package == "__init__":
        assert not names
        return
    before = ORDER[: ORDER.index(package)]
    inside = [package] if len(path.parts) > 1 else []
    own = {name.split(".")[1] for name in names if name.startswith("train.")}
    assert own <= {*before, *inside}
    roots = {name.split(".")[0] for name in names}
    assert ("deepspeed" in roots) == (path == Path("engine/deepspeed.py"))
    assert path.stem in HYDRA_MODULES or not roots & {"hydra", "omegaconf"}


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_say_what_they_import(package: str) -> None:
    """A docstring of three lines whose last names the packages before."""
    tree = ast.parse((TRAIN / package / "__init__.py").read_text())
    (docstring,) = tree.body
    lines = [line for line in ast.get_docstring(tree).splitlines() if line]
    before = ", ".join(PACKAGES[: PACKAGES.index(package)])
    assert isinstance(docstring, ast.Expr)
    assert len(lines) == 3
    assert lines[1].startswith("In: ")
    assert lines[2] == (f"Imports: config, {before}." if before else "Imports: config.")


def test_each_mode_has_a_module_that_runs_it():
    assert sorted(MODE_MODULES) == sorted(MODES)
    for name in MODE_MODULES.values():
        assert callable(importlib.import_module(f"train.{name}").run)
