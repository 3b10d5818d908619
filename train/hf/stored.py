"""The tensors in a folder's safetensors files, from their headers only.

The safetensors library imports numpy, whose threads would receive signals that the stopper waits
for. This module reads headers before such threads may start; the library reads the tensors later.
"""

from __future__ import annotations

import json
import math
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from train.config import ConfigError

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
BYTES = {"F32": 4, "BF16": 2, "F16": 2}  # bytes of an element; float32 represents all these types
# Tables of RoPE that old versions of transformers stored. The config defines their values.
TABLES = re.compile(r"(.+\.)?rotary_emb\.(original_)?(inv_freq|cos_cached|sin_cached)")
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
CHUNK = 2**24  # bytes of a tensor that are compared at a time
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass(frozen=True)
class Stored:
    """A tensor in a file: its name and first byte there, its shape, the type of its elements."""

    path: Path
    name: str
    first: int
    shape: tuple[int, ...]
    dtype: str

    def equals(self, other: Stored) -> bool:
        """Whether both have the same shape, type and bytes."""
        if (self.shape, self.dtype) != (other.shape, other.dtype):
            return False
        left = math.prod(self.shape) * BYTES[self.dtype]
        with self.path.open("rb") as one, other.path.open("rb") as two:
            one.seek(self.first)
            two.seek(other.first)
            while left > 0 and one.read(min(left, CHUNK)) == two.read(min(left, CHUNK)):
                left -= CHUNK
        return left <= 0


def stored_tensors(folder: Path) -> dict[str, Stored]:
    """All tensors in ``folder`` by name: in ``model.safetensors``, or in the files of the index.

    Without ``TABLES``, which nothing reads.
    Raises ``ConfigError`` for pickled weights, a damaged or truncated file, an index that names a
    file elsewhere or differs from the files, and elements that float32 cannot hold.
    """
    if (folder / INDEX).is_file():
        return _indexed(folder)
    if (folder / WEIGHTS).is_file():
        return _header(folder / WEIGHTS)
    pickled = next((path for pattern in PICKLES for path in sorted(folder.glob(pattern))), None)
    if pickled is not None:
        raise ConfigError(
            f"{pickled} is a pickle, which can run code; save the model as safetensors: "
            "save_pretrained of transformers does"
        )
    raise ConfigError(f"{folder} contains no weights: neither {WEIGHTS} nor {INDEX}")


def _indexed(folder: Path) -> dict[str, Stored]:
    path = folder / INDEX
    try:
        file_of = json.loads(path.read_bytes())["weight_map"]
        names = sorted(set(file_of.values()))
        file_of = {name: file for name, file in file_of.items() if not TABLES.fullmatch(name)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is not an index of weights: {error!r}") from None
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or "\\" in name:
            raise ConfigError(f"{path} names {name!r}, which is not a file of its folder")
    files = {name: _header(folder / name) for name in names}
    for tensor, name in file_of.items():
        if tensor not in files[name]:
            raise ConfigError(f"{path} places {tensor} in {name}, which lacks it")
    for name, tensors in files.items():
        if extra := sorted(tensor for tensor in tensors if file_of.get(tensor) != name):
            raise ConfigError(
                f"{folder / name} holds {extra[0]}, which {INDEX} does not place there"
            )
    return {tensor: files[name][tensor] for tensor, name in file_of.items()}


def tie_head(stored: dict[str, Stored], given: str) -> dict[str, Stored]:
    """``stored`` of a model whose head is its embedding, without the head.

    A folder may store either of the two, or both. Raises ``ConfigError`` if they differ.
    """
    head = stored.get(HEAD)
    if head is None:
        return stored
    embedding = stored.get(EMBEDDING, head)
    if not head.equals(embedding):
        raise ConfigError(
            f"{given}: {HEAD} differs from {EMBEDDING}, and tie_word_embeddings=true makes them "
            "one matrix; set it to false in config.json if the model has a head of its own, or "
            f"remove {HEAD}"
        )
    others = {name: tensor for name, tensor in stored.items() if name != HEAD}
    return others | {EMBEDDING: embedding}


def _header(path: Path) -> dict[str, Stored]:
    """The tensors in a file; the file's size must be that of header and tensors."""
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            (length,) = struct.unpack("<Q", file.read(8))
            if length > size:
                raise ValueError(f"a header of {length} bytes in a file of {size}")
            entries = json.loads(file.read(length))
        entries.pop("__metadata__", None)
        weights = {n: entry for n, entry in entries.items() if not TABLES.fullmatch(n)}
        tensors = {name: _entry(path, name, 8 + length, e) for name, e in weights.items()}
        ends = [entry["data_offsets"][1] for entry in entries.values()]
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except ConfigError:  # it is a ValueError
        raise
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, struct.error) as error:
        raise ConfigError(f"{path} is damaged: {error!r}") from None
    whole = 8 + length + max(ends, default=0)
    if size != whole:
        raise ConfigError(f"{path} is damaged: it has {size} bytes, its header describes {whole}")
    return tensors


def _entry(path: Path, name: str, begin: int, entry: dict[str, Any]) -> Stored:
    """A tensor in a file whose tensors follow its first ``begin`` bytes."""
    first, stop = entry["data_offsets"]
    stored = Stored(path, name, begin + first, tuple(map(int, entry["shape"])), entry["dtype"])
    if stored.dtype not in BYTES:
        raise ConfigError(
            f"{path}: {name} is of type {stored.dtype}; the trainer reads {', '.join(BYTES)}"
        )
    if stop - first != math.prod(stored.shape) * BYTES[stored.dtype]:
        raise ValueError(f"{name} of {list(stored.shape)} takes {stop - first} bytes")
    return stored
