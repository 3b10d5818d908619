"""Runs the Python blocks of pages, on ranks too.

A block that imports another library, and not RingFA3, shows that library: it is only parsed.
"""

from __future__ import annotations

import ast
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from examples.hf_cp import CUMULATIVE, example_ids
from tests.support.markdown import ROOT, blocks

PEERS = (  # whose blocks docs/migration.md has: modules that only such a block imports
    "flash_attn",
    "ring_flash_attn",
    "transformer_engine",
    "torch.distributed.tensor.experimental",
)


def ringfa3_blocks(page: Path) -> list[str]:
    """The Python blocks of a page, without those that show a peer, which are Python too."""
    found = [code for language, code in blocks(page) if language == "python"]
    roots = {code: _imported(code) for code in found}
    return [code for code in found if "ringfa3" in roots[code] or not roots[code] & set(PEERS)]


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


def migrated_step(group: dist.ProcessGroup, port: int) -> tuple[int, list[torch.Tensor]]:
    """Runs docs/migration.md without a process group, in the environment that torchrun gives.

    Returns the ranks of its plan, the loss of all ranks, and two sets of gradients: summed by hand,
    averaged by DDP.
    """
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    dist.destroy_process_group()
    os.environ |= {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    names = run_page(ROOT / "docs" / "migration.md")
    models = [names[name].parameters() for name in ("model", "averaged")]
    gradients = [p.grad for parameters in models for p in parameters]
    return names["plan"].world, [names["loss"], *gradients]


def groups_of_two(group: object) -> tuple[str, int, float]:
    del group
    names = run_page(ROOT / "docs" / "recipes.md", WORKERS=0)  # ranks of tests have no children
    return names["transport"], int(names["valid"]), names["difference"]


def trained_model(group: object, folder: str) -> list[torch.Tensor]:
    """The weights of a tiny model after a step of docs/huggingface.md."""
    del group
    batches = [(example_ids(97), CUMULATIVE)]
    names = run_page(ROOT / "docs" / "huggingface.md", FOLDER=folder, batches=batches)
    return [p.detach() for p in names["model"].parameters()]
