"""Imports point one way: train -> ringfa3, and inside ringfa3 from the lower packages up."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MOST_MODULES = 14  # of a package
MOST_LINES = 400  # of a file

# A module may import from its own package, and from what stands before that.
ORDER = [
    "errors",
    "numa",
    "custom_op",
    "validation",
    "ring_pass",
    "planning",
    "build",
    "kernels",
    "symmetric",
    "ring",
    "functional",
    "attention",
    "doctor",
    "__init__",
    "bench",
]
HYDRA_FILES = {"pretrain.py", "config.py", "sweep.py"}
SOURCES = sorted((ROOT / "ringfa3").rglob("*.py"))
CODE = [
    path
    for folder, suffixes in {
        "ringfa3": (".py",),
        "train": (".py",),
        "tests": (".py", ".cpp", ".h"),
        "csrc": (".cu", ".cuh", ".h"),
        "benchmarks": (".py", ".cu", ".cuh"),
    }.items()
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in suffixes
]


def imported(path: Path) -> set[str]:
    """Dotted names of everything that a file imports, at any depth of its code."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} has a relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def room(path: Path) -> str:
    """The top-level package or module of ringfa3 that a file belongs to."""
    return path.relative_to(ROOT / "ringfa3").parts[0].removesuffix(".py")


def dotted(path: Path) -> str:
    module = path.relative_to(ROOT).with_suffix("")
    return ".".join(module.parts).removesuffix(".__init__")


@pytest.mark.parametrize("path", SOURCES, ids=dotted)
def test_ringfa3_imports_only_lower_packages(path: Path) -> None:
    here = room(path)
    assert here in ORDER, f"give {here} its place in ORDER"
    names = imported(path)
    for name in names:
        if name.startswith("ringfa3."):
            there = name.split(".")[1]
            there = there if there in ORDER else "__init__"  # a public name
            assert ORDER.index(there) <= ORDER.index(here), f"{dotted(path)} imports {name}"
    assert not {n.split(".")[0] for n in names} & {"train", "hydra", "omegaconf"}


def test_modules_of_a_package_import_each_other_one_way() -> None:
    """No cycle of modules, at any depth of their code."""
    modules = {dotted(path): path for path in SOURCES}
    edges = {
        module: {
            target
            for name in imported(path)
            for target in (name, name.rpartition(".")[0])
            if target in modules and target != module and not module.startswith(target + ".")
        }
        for module, path in modules.items()
    }
    while leaves := {m for m, targets in edges.items() if not targets & edges.keys()}:
        edges = {m: targets for m, targets in edges.items() if m not in leaves}
    assert not edges, f"a cycle among {sorted(edges)}"


def test_packages_are_small() -> None:
    moving = {ROOT / "train"}
    for folder in {path.parent for path in CODE} - moving:
        if folder.is_relative_to(ROOT / "tests"):
            continue
        modules = [p for p in CODE if p.parent == folder and not p.name.startswith("__")]
        assert len(modules) <= MOST_MODULES, f"{folder} has {len(modules)} modules"


@pytest.mark.parametrize("path", CODE, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_are_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MOST_LINES


@pytest.mark.parametrize("path", sorted((ROOT / "train").rglob("*.py")), ids=lambda p: p.stem)
def test_train_keeps_hydra_in_its_place(path: Path) -> None:
    roots = {n.split(".")[0] for n in imported(path)}
    if path.name not in HYDRA_FILES:
        assert not roots & {"hydra", "omegaconf"}
    assert "deepspeed" not in roots
