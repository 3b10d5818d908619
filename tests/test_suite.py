"""If this fails, tests are skipped without notice. The suite itself: pytest collects every file,
GPU tests are marked."""

from __future__ import annotations

import ast
import os
from fnmatch import fnmatch
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parent
FILES = sorted(TESTS.rglob("test_*.py"))


def name(path: Path) -> str:
    return str(path.relative_to(TESTS))


def marks(path: Path) -> set[str]:
    """Names of the marks in a module's `pytestmark`."""
    return {
        node.attr
        for statement in ast.parse(path.read_text()).body
        if isinstance(statement, ast.Assign)
        and any(isinstance(t, ast.Name) and t.id == "pytestmark" for t in statement.targets)
        for node in ast.walk(statement.value)
        if isinstance(node, ast.Attribute)
    }


def test_the_cpu_suite_sees_no_gpu(request: pytest.FixtureRequest) -> None:
    selected = request.config.getoption("-m")
    assert "not gpu" not in selected or os.environ["CUDA_VISIBLE_DEVICES"] == ""


@pytest.mark.parametrize("time", ["first", "second"])
def test_no_test_leaves_threads_to_the_next(time: str) -> None:
    assert torch.get_num_threads() == 1
    torch.set_num_threads(2)


def test_pytest_collects_every_folder(request: pytest.FixtureRequest) -> None:
    """Pytest passes over folders that match `norecursedirs`; `build` is in its default."""
    ignored = request.config.getini("norecursedirs")
    for folder in {path.parent for path in FILES}:
        for part in folder.relative_to(TESTS).parts:
            assert not [p for p in ignored if fnmatch(part, p)], f"{folder} is not collected"


@pytest.mark.parametrize("path", FILES, ids=name)
def test_files_of_gpu_tests_are_marked_and_named(path: Path) -> None:
    """`pytest -m gpu` selects test_gpu_*.py, and nothing else of the file runs on a CPU."""
    assert ("gpu" in marks(path)) == path.name.startswith("test_gpu_")
    assert path.name.startswith("test_gpu_") or path.parent.name != "gpu"
