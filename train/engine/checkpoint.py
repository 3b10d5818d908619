"""Checkpoints: written in a background thread, verified before they are loaded, and pruned.

    <run>/checkpoints/step-00000100/    manifest.json  .metadata  __<rank>_0.distcp ...

The format is that of torch.distributed.checkpoint, so any number of ranks can load what any other
number has written. A folder of that name is complete: the ranks write it under a temporary name,
then rank 0 adds the manifest and renames it. The manifest holds everything that is not a tensor, as
JSON metadata. Tensor files are read as tensors only. torch's own ``.metadata`` is a pickle, which
could run code, so it is read only from folders that belong to the user.
"""

from __future__ import annotations

import os
import re
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from train.config import ConfigError
from train.data.manifest import (
    DamagedError,
    FileMetadata,
    measure,
    read_manifest,
    sync_folder,
    verify,
    write_manifest,
)
from train.engine.host_copies import HostCopies
from train.engine.parallel import ParallelLayout, from_rank_0
from train.engine.shard import LoadPlanner, SavePlanner, Shard, own_share, whole
from train.paths import discard

# A single process saves and loads without a process group.
warnings.filterwarnings("ignore", message="torch.distributed is disabled")

PREFIX = "step-"
DAMAGED = "damaged-"
OTHERS_WRITE = 0o022
FORMER_NAMES = {"output.weight": "output"}  # tensor names in older checkpoints, which still load


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


Tensors = Mapping[str, Tensor | Shard]


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
        raise RuntimeError(f"checkpoint {path} cannot be read: {_cause(error)}") from None


def _stored_name(name: str, known: Mapping[str, Any]) -> str:
    """The name of a tensor in a checkpoint with the names ``known``; it may be a former name."""
    for now, before in FORMER_NAMES.items():
        if name not in known and now in name:
            return name.replace(now, before)
    return name


class Checkpoints:
    """The checkpoints of a run on one rank; every rank makes the same calls.

    ``begin`` copies the tensors to the host (pinned, if they are on a GPU). A thread writes this
    copy and communicates over ``save_group``. One rank copies and writes each tensor that all ranks
    hold. A failed write is counted and logged, and its files are removed; training continues. The
    caller of ``begin`` holds ``lock``.
    """

    def __init__(
        self,
        folder: Path,
        parallel: ParallelLayout,
        keep: int,
        keep_every: int | None,
        log: Callable[[str], None],
    ) -> None:
        self.folder, self.parallel, self.log = folder, parallel, log
        self.keep, self.keep_every = keep, keep_every
        self.saved: int | None = None  # step of the newest complete checkpoint
        self.failures = 0
        self._host = HostCopies(parallel.device)
        self._stream = (
            torch.cuda.Stream(parallel.device) if parallel.device.type == "cuda" else None
        )
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None
        self._written: int | None = None  # step of the write in progress
        self.lock = threading.RLock()

    def choose(self, exclude_skipping: bool = False) -> Path | None:
        """The newest valid checkpoint, or None; rank 0 verifies and broadcasts its answer.

        ``exclude_skipping`` is as in ``newest_valid``.
        """
        search = partial(
            newest_valid, self.folder, self.log, own=True, exclude_skipping=exclude_skipping
        )
        return from_rank_0(self.parallel, search)

    def remove_after(self, step: int) -> None:
        """Remove the checkpoints of steps after ``step``, to which the run has rolled back.

        Every rank must call this. No write may be in progress.
        """

        def remove() -> None:
            for later, path in checkpoints_in(self.folder).items():
                if later > step:
                    self._remove(path)

        from_rank_0(self.parallel, remove)
        self.saved = step

    def remove_partial_files(self) -> None:
        """Remove the incomplete checkpoints of killed processes; no write may be in progress.

        Other hidden files stay: the folder may be a link to a disk that has files of its own.
        """
        for name in (f".{PREFIX}[0-9]*", f".old-{PREFIX}[0-9]*"):
            for path in self.folder.glob(name):
                discard(path)
                if path.is_symlink() or path.exists():
                    self.log(f"{path}, an incomplete checkpoint, could not be removed: remove it")

    def has(self, step: int) -> bool:
        """Whether the checkpoint of ``step`` is saved or being written."""
        return self.saved == step or (self._writing is not None and self._written == step)

    def begin(
        self,
        step: int,
        shards: Mapping[str, Shard],
        metadata: dict[str, Any],
        ready: torch.cuda.Event | None = None,
    ) -> None:
        """Copy ``shards`` and start to write them as the checkpoint of ``step``.

        Waits for a previous write first. ``ready`` is the CUDA event after which the tensors have
        the values to save.
        """
        self.wait()
        share = self._copy(own_share(shards), ready)
        self._written = step
        self._writing = self._thread.submit(self._write, step, share, metadata)

    def wait(self) -> None:
        """Wait until no write is in progress."""
        if self._writing is not None:
            self._writing.result()
            self._writing = None

    def _copy(
        self, shards: Mapping[str, Shard], ready: torch.cuda.Event | None
    ) -> dict[str, Shard]:
        boxes = [box.values for shard in shards.values() for box in shard.boxes]
        hosts = iter(self._host.like(boxes))

        def copy(_: int, box: Tensor) -> Tensor:
            return next(hosts).copy_(box, non_blocking=True)

        with torch.no_grad(), torch.cuda.stream(self._stream):
            if self._stream is not None and ready is not None:
                self._stream.wait_event(ready)
            copies = {name: shard.map(copy) for name, shard in shards.items()}
        if self._stream is not None:
            self._stream.synchronize()
        return copies

    def _write(self, step: int, share: dict[str, Shard], metadata: dict[str, Any]) -> None:
        """Write a checkpoint. The threads of all ranks run this at the same time."""
        final = self.folder / f"{PREFIX}{step:08d}"
        temporary = self.folder / f".{final.name}"
        try:
            writer = dcp.FileSystemWriter(temporary, single_file_per_rank=True, sync_files=True)
            group, alone = self.parallel.save_group, self.parallel.world == 1
            dcp.save(
                dict(share),
                storage_writer=writer,
                planner=SavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
                process_group=group,
                no_dist=alone,
            )
            problem = self._complete(temporary, final, {"step": step, **metadata})
        except (
            OSError,
            CheckpointException,
        ) as error:  # the error of a lost peer is another type and ends the run
            problem = _cause(error)
        if problem is None:
            self.saved = step
            return
        self.failures += 1
        if self.parallel.rank == 0:
            discard(temporary)
            self.log(
                f"checkpoint of step {step} failed ({self.failures} so far), training continues: "
                f"{problem}"
            )

    def _complete(self, temporary: Path, final: Path, metadata: dict[str, Any]) -> str | None:
        """Rank 0 adds the manifest and renames the folder; returns the problem on all ranks."""
        files, problem = self._measured(temporary)
        if self.parallel.rank == 0 and problem is None:
            try:
                paths = [temporary / name for name in (*files, ".metadata")]
                for path in (temporary, *paths):
                    path.chmod(path.stat().st_mode & ~OTHERS_WRITE)
                write_manifest(temporary, metadata, paths, measured=files)
                before = final.with_name(f".old-{final.name}")
                if final.exists():  # the run has rolled back and reached this step again
                    final.rename(before)
                temporary.rename(final)
                sync_folder(self.folder)
                discard(before)
            except OSError as error:
                problem = _cause(error)
            else:
                self._prune()
        if self.parallel.world > 1:
            answer = [problem]
            dist.broadcast_object_list(answer, src=0, group=self.parallel.save_group)
            problem = answer[0]
        return problem

    def _measured(self, folder: Path) -> tuple[dict[str, FileMetadata], str | None]:
        """Size and checksum of every tensor file, by name, and the first problem if there is one.

        Each rank measures its own file, which is still in the page cache of its host. Rank 0 would
        read all files from the disk.
        """
        parallel = self.parallel
        try:
            own = {path.name: measure(path) for path in folder.glob(f"__{parallel.rank}_*.distcp")}
            answer: tuple[dict[str, FileMetadata], str | None] = own, None
        except OSError as error:
            answer = {}, f"rank {parallel.rank}: {_cause(error)}"
        everyone: list[Any] = [answer]
        if parallel.world > 1:
            everyone = [None] * parallel.world
            dist.all_gather_object(everyone, answer, group=parallel.save_group)
        files = {name: entry for measured, _ in everyone for name, entry in measured.items()}
        return files, next((problem for _, problem in everyone if problem), None)

    def _prune(self) -> None:
        """Remove all but the newest ``keep`` checkpoints and those of every ``keep_every``-th step.

        The newest ones do not count if they were saved while skipping: a roll-back, which cannot
        use them, needs an earlier one.
        """
        steps = list(checkpoints_in(self.folder).items())
        while len(steps) > self.keep and saved_while_skipping(steps[-1][1]):
            steps.pop()
        for step, path in steps[: -self.keep]:
            if not self.keep_every or step % self.keep_every:
                try:
                    self._remove(path)
                except OSError as error:  # the new checkpoint is complete all the same
                    self.log(f"checkpoint of step {step} could not be removed: {_cause(error)}")

    def _remove(self, path: Path) -> None:
        hidden = path.with_name(f".old-{path.name}")  # a half-removed one must not count as damaged
        path.rename(hidden)
        discard(hidden)


def read_manifest_metadata(path: Path) -> dict[str, Any]:
    """The metadata in the manifest of a checkpoint: ``TrainState.metadata`` and ``step``."""
    return read_manifest(path).metadata


def _cause(error: BaseException) -> str:
    """The error in one line; of torch's exception, which has an error per rank, the first one."""
    if isinstance(error, CheckpointException):
        rank, (cause, _) = next(iter(error.failures.items()))
        return f"rank {rank}: {_cause(cause)}"
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
