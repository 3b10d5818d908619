"""Writes a folder that transformers loads: safetensors files and their index."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from train.hf.names import hf_name
from train.hf.stored import INDEX, WEIGHTS


def save_weights(
    folder: Path,
    shapes: Mapping[str, tuple[int, ...]],
    read: Callable[[dict[str, tuple[int, ...]]], dict[str, Tensor]],
    dtype: torch.dtype,
    shard_bytes: int,
) -> None:
    """Write the tensors of ``shapes``, by their names here, to ``folder``.

    ``read`` returns the tensors for some of the shapes. A file has at most ``shard_bytes`` bytes of
    tensors, unless a single one is larger. Only the tensors of one file are in memory at a time. If
    there are several files, an index lists them.
    """
    files = _files(shapes, dtype.itemsize, shard_bytes)
    file_of: dict[str, str] = {}
    for number, own in enumerate(files, start=1):
        name = WEIGHTS
        if len(files) > 1:
            name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        tensors = {hf_name(key): tensor.to(dtype) for key, tensor in read(own).items()}
        save_file(tensors, folder / name, metadata={"format": "pt"})
        file_of |= dict.fromkeys(tensors, name)
    if len(files) > 1:
        total = sum(torch.Size(shape).numel() for shape in shapes.values()) * dtype.itemsize
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(file_of.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _files(
    shapes: Mapping[str, tuple[int, ...]], itemsize: int, shard_bytes: int
) -> list[dict[str, tuple[int, ...]]]:
    """The tensors of each file, in their order."""
    files: list[dict[str, tuple[int, ...]]] = [{}]
    free = shard_bytes
    for name, shape in shapes.items():
        size = torch.Size(shape).numel() * itemsize
        if size > free and files[-1]:
            files.append({})
            free = shard_bytes
        files[-1][name] = shape
        free -= size
    return files
