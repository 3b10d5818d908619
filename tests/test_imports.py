"""Imports point one way: train -> ringfa3, and inside ringfa3 from the leaves up."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# A module may import those of its own package that stand before it.
ORDER = [
    "cores",
    "groups",
    "layout",
    "plan",
    "portions",
    "reference",
    "movement",
    "operations",
    "rows",
    "schedule",
    "enclosure",
    "context",
    "course",
    "toolchain",
    "cache",
    "headers",
    "sass",
    "build",
    "doctor",
    "kernels",
    "backward",
    "engine",
    "opaque",
    "ops",
    "lookout",
    "transports",
    "driver",
    "watch",
    "words",
    "region",
    "arena",
    "replays",
    "symmetric",
    "comm",
    "buffers",
    "gathering",
    "capture",
    "admission",
    "ring",
    "module",
    "__init__",
    "bench",
]
BENCH_ORDER = [
    "cases",
    "team",
    "machine",
    "timing",
    "problem",
    "gate",
    "peers",
    "epilogues",
    "agenda",
    "ring_peers",
    "yardsticks",
    "spread",
    "results",
    "contest",
    "memory",
    "host",
    "checkpoint",
    "table",
    "ring_summary",
    "ring_table",
    "plot",
    "report",
    "attention",
    "rehearsal",
    "ring",
    "__init__",
    "__main__",
]
HYDRA_FILES = {"pretrain.py", "config.py", "sweep.py"}


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


@pytest.mark.parametrize("path", sorted((ROOT / "ringfa3").glob("*.py")), ids=lambda p: p.stem)
def test_ringfa3_imports_only_what_stands_before(path: Path) -> None:
    assert path.stem in ORDER, f"give {path.name} its place in ORDER"
    allowed = ORDER[: ORDER.index(path.stem)]
    own = {n.split(".")[1] for n in imported(path) if n.startswith("ringfa3.")}
    assert own & set(ORDER) <= set(allowed)
    assert not {n.split(".")[0] for n in imported(path)} & {"train", "hydra", "omegaconf"}


@pytest.mark.parametrize(
    "path", sorted((ROOT / "ringfa3" / "bench").glob("*.py")), ids=lambda p: p.stem
)
def test_the_benchmark_imports_only_what_stands_before(path: Path) -> None:
    assert path.stem in BENCH_ORDER, f"give {path.name} its place in BENCH_ORDER"
    allowed = BENCH_ORDER[: BENCH_ORDER.index(path.stem)]
    names = imported(path)
    own = {n.split(".")[2] for n in names if n.startswith("ringfa3.bench.")}
    assert own & set(BENCH_ORDER) <= set(allowed)
    assert not {n.split(".")[0] for n in names} & {"train", "hydra", "omegaconf"}


@pytest.mark.parametrize("path", sorted((ROOT / "train").glob("*.py")), ids=lambda p: p.stem)
def test_train_keeps_hydra_in_its_place(path: Path) -> None:
    roots = {n.split(".")[0] for n in imported(path)}
    if path.name not in HYDRA_FILES:
        assert not roots & {"hydra", "omegaconf"}
    assert "deepspeed" not in roots
