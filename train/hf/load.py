"""Weights from a folder of transformers, read rank by rank."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from train.engine.shard import Shard
from train.hf.names import hf_name
from train.hf.stored import stored_tensors, tie_head

MODEL = "model."  # prefix of the names of weights in a training state


@torch.no_grad()
def load_folder(folder: Path, shards: Mapping[str, Shard]) -> None:
    """Fill the boxes of the weights in ``shards``, float32, from the checked ``folder``.

    ``shards`` is a training state; its other tensors do not change. A rank reads only the boxes
    that it holds, without communication. Raises ``RuntimeError`` if a file cannot be read.
    """
    stored = stored_tensors(folder)
    if f"{MODEL}output.weight" not in shards:
        stored = tie_head(stored, str(folder))
    wanted: dict[Path, list[tuple[str, Shard]]] = {}
    for name, shard in shards.items():
        if name.startswith(MODEL):
            tensor = stored[hf_name(name.removeprefix(MODEL))]
            wanted.setdefault(tensor.path, []).append((tensor.name, shard))
    for path, tensors in wanted.items():
        try:
            with safe_open(path, framework="pt") as file:
                for name, shard in tensors:
                    _fill(file.get_slice(name), shard)
        except (OSError, SafetensorError) as error:
            raise RuntimeError(f"{path} cannot be read: {error}") from None


def _fill(stored: object, shard: Shard) -> None:
    for box in shard.boxes:
        if box.values.numel():
            edges = zip(box.offsets, box.values.shape, strict=True)
            box.values.copy_(stored[tuple(slice(n, n + size) for n, size in edges)])
