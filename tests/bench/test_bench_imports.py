"""If this fails, a benchmark cannot be changed without the others. Packages of the benchmarks
import one way: common <- attention, ring, fp8, cluster; these <- tables."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

BENCH = Path(__file__).parent.parent.parent / "ringfa3" / "bench"
ALLOWED = {
    "common": {"common"},
    "attention": {"common", "attention"},
    "fp8": {"common", "fp8"},
    "cluster": {"common", "cluster"},
    "ring": {"common", "cluster", "ring"},
    "tables": {"common", "attention", "ring", "tables"},
}


def packages_imported_by(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {n.split(".")[2] for n in names if n.startswith("ringfa3.bench.")}


@pytest.mark.parametrize("package", ALLOWED)
def test_a_package_imports_only_those_below_it(package: str) -> None:
    for path in (BENCH / package).glob("*.py"):
        assert packages_imported_by(path) <= ALLOWED[package], path.name


def test_every_package_has_its_place() -> None:
    assert {path.parent.name for path in BENCH.glob("*/__init__.py")} == set(ALLOWED)
    assert {path.name for path in BENCH.glob("*.py")} == {"__init__.py", "__main__.py"}
