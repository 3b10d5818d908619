"""Checkpoints on disk: found, verified, and read.

    <run>/checkpoints/step-00000100/    manifest.json  .metadata  __<rank>_0.distcp ...

The format is that of torch.distributed.checkpoint, so any number of ranks can load what any other
number has written. A folder of that name is complete. The manifest holds everything that is not a
tensor, as JSON metadata. Tensor files are read as tensors only. torch's own ``.metadata`` is a
pickle, which could run code, so it is read only from folders that belong to the user.
"""

from __future__ import annotations

import os
import re
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from train.config import ConfigError
from train.data.manifest import DamagedError, read_manifest, verify
from train.engine.shard import LoadPlanner, Shard, whole

# A single process saves and loads without a process group.
warnings.filterwarnings("ignore", message="torch.distributed is disabled")

PREFIX = "step-"
DAMAGED = "damaged-"
OTHERS_WRITE = 0o022
FORMER_NAMES = {"output.weight": "output"}  # tensor names in older checkpoints, which still load

Tensors = Mapping[str, Tensor | Shard]


def checkpoints_in(folder: Path) -> dict[int, Path]:
    """The checkpoints of ``folder`` by step, oldest first, unverified."""
    steps = {path: _step_of(path) for path in folder.glob(f"{PREFIX}*")}
    found = {step: path for path, step in steps.items() if step is not None}
    return dict(sorted(found.items()))


def _step_of(path: Path) -> int | None:
    """The step of the checkpoint at ``path``; None if no checkpoint has such a name."""
    name = re.fullmatch(rf"{PREFIX}(\d+)", path.name)
    return int(name[1]) if name and path.is_dir() else None


def newest_valid(
    folder: Path, log: Callable[[str], None], own: bool = False, exclude_skipping: bool = False
) -> Path | None:
    """The newest checkpoint of ``folder`` whose files all match its manifest; None without one.

    With ``exclude_skipping``, checkpoints that were saved while steps were skipped do not count.
    ``log`` gets a line for each damaged checkpoint. With ``own``, the run's own folder, a damaged
    checkpoint is quarantined: it gets the prefix ``DAMAGED``, and no later search finds it. Raises
    ``ConfigError`` for a checkpoint that another user could have written.
    """
    for path in reversed(checkpoints_in(folder).values()):
        try:
            verify(path)
        except DamagedError as error:
            if not own:
                log(f"damaged checkpoint skipped: {error}")
                continue
            quarantined = path.with_name(f"{DAMAGED}{path.name}-{time.time_ns()}")
            path.rename(quarantined)
            log(f"damaged checkpoint renamed to {quarantined.name}: {error}")
            continue
        if exclude_skipping and saved_while_skipping(path):
            continue
        require_own(path)
        return path
    return None


def saved_while_skipping(path: Path) -> bool:
    """Whether the last step before a checkpoint was skipped; True if its manifest is unreadable.

    Its weights may be why steps were skipped, so a roll-back must not load it.
    """
    try:
        return bool(read_manifest_metadata(path).get("guard", {}).get("in_a_row"))
    except (DamagedError, ConfigError, OSError):
        return True


def read_manifest_metadata(path: Path) -> dict[str, Any]:
    """The metadata in the manifest of a checkpoint: ``TrainState.metadata`` and ``step``."""
    return read_manifest(path).metadata


def require_own(path: Path) -> None:
    """Raise ``ConfigError`` unless ``path`` belongs to the user and no one else can write to it."""
    for part in (path, path / ".metadata"):
        stat = part.stat()
        if stat.st_uid != os.geteuid() or stat.st_mode & OTHERS_WRITE:
            others = stat.st_mode & OTHERS_WRITE
            why = "others can write to it" if others else f"it belongs to user {stat.st_uid}"
            raise ConfigError(
                f"checkpoint {part}: {why}; its metadata is a pickle, which can run code, so only "
                f"you may be able to write to it: copy it, or chown and chmod go-w it, if you "
                f"trust its origin"
            )


def find_checkpoint(path: Path, log: Callable[[str], None]) -> Path:
    """The verified checkpoint at ``path``, or the newest valid one if ``path`` is a run folder.

    Raises ``ConfigError`` if there is none.
    """
    if _step_of(path) is not None:
        try:
            verify(path)
        except DamagedError as error:
            raise ConfigError(f"checkpoint {path} is damaged: {error}; choose another") from None
        require_own(path)
        return path
    inner = path / "checkpoints"
    newest = newest_valid(inner if inner.is_dir() else path, log)
    if newest is None:
        raise ConfigError(
            f"{path} contains no checkpoint; give a run folder or its checkpoints/step-*"
        )
    return newest


def require_fit(path: Path, tensors: Tensors) -> dict[str, Tensor | Shard]:
    """``tensors`` by their names in a verified checkpoint; ``ConfigError`` if one does not fit."""
    known = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    named = {_stored_name(name, known): tensor for name, tensor in tensors.items()}
    for name, tensor in named.items():
        stored = getattr(known.get(name), "size", None)
        if stored != tensor.shape:
            kept = f"{list(stored)} there" if stored is not None else "not in it"
            rows = "embedding" in name and stored is not None and stored[1:] == tensor.shape[1:]
            anew = " (if the tokenizer leaves ids out: start anew)" if rows else ""
            raise ConfigError(
                f"checkpoint {path} does not fit this model: {name} is {list(tensor.shape)} "
                f"here and {kept}; choose the model settings that it was made with{anew}"
            )
    return named


def load_tensors(path: Path, tensors: Tensors) -> None:
    """Fill ``tensors`` in place from a verified checkpoint; its other tensors are ignored.

    Every rank reads independently. Raises what ``require_fit`` raises.
    """
    try:
        named, reader = require_fit(path, tensors), dcp.FileSystemReader(path)
        with torch.no_grad():
            shards = {n: t if isinstance(t, Shard) else whole(t) for n, t in named.items()}
            dcp.load(shards, storage_reader=reader, planner=LoadPlanner(), no_dist=True)
    except CheckpointException as error:
        raise RuntimeError(f"checkpoint {path} cannot be read: {cause_of(error)}") from None


def _stored_name(name: str, known: Mapping[str, Any]) -> str:
    """The name of a tensor in a checkpoint with the names ``known``; it may be a former name."""
    for now, before in FORMER_NAMES.items():
        if name not in known and now in name:
            return name.replace(now, before)
    return name


def cause_of(error: BaseException) -> str:
    """The error in one line; of torch's exception, which has an error per rank, the first one."""
    if isinstance(error, CheckpointException):
        rank, (cause, _) = next(iter(error.failures.items()))
        return f"rank {rank}: {cause_of(cause)}"
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
