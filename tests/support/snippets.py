"""Runs the Python blocks of pages, on ranks too.

A block that imports RingFA3 runs. Any other block shows another library: it imports that library,
and is only parsed.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import torch

from examples.hf_cp import CUMULATIVE, example_ids
from tests.support.markdown import ROOT, blocks

PEERS = (  # whose blocks docs/migration.md has: modules that only such a block imports
    "flash_attn",
    "ring_flash_attn",
    "transformer_engine",
    "torch.distributed.tensor.experimental",
)


def ringfa3_blocks(page: Path) -> list[str]:
    """The Python blocks of a page that import RingFA3; others show a peer, and are Python."""
    found = [code for language, code in blocks(page) if language == "python"]
    roots = {code: _imported(code) for code in found}
    assert all(root & {"ringfa3", *PEERS} for root in roots.values()), "whose block is it?"
    return [code for code in found if "ringfa3" in roots[code]]


def _imported(code: str) -> set[str]:
    """Modules that a block imports, or their first names."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    return names | {name.partition(".")[0] for name in names}


def run_page(page: Path, **given: object) -> dict[str, Any]:
    """The names that a page's blocks define, run one after the other after those given."""
    namespace: dict[str, Any] = dict(given)
    for code in ringfa3_blocks(page):
        exec(compile(code, page.name, "exec"), namespace)
    return namespace


def migrated_step(group: object) -> list[torch.Tensor]:
    """The loss of all ranks and two sets of gradients: summed by hand, averaged by DDP."""
    del group
    names = run_page(ROOT / "docs" / "migration.md")
    models = [names[name].parameters() for name in ("model", "averaged")]
    return [names["loss"], *(p.grad for parameters in models for p in parameters)]


def groups_of_two(group: object) -> tuple[str, int, float]:
    del group
    names = run_page(ROOT / "docs" / "recipes.md")
    return names["transport"], int(names["valid"]), names["difference"]


def trained_model(group: object, folder: str) -> list[torch.Tensor]:
    """The weights of a tiny model after a step of docs/huggingface.md."""
    del group
    batches = [(example_ids(97), CUMULATIVE)]
    names = run_page(ROOT / "docs" / "huggingface.md", FOLDER=folder, batches=batches)
    return [p.detach() for p in names["model"].parameters()]
