"""Checkpoints: written in a background thread, verified before they are loaded, and pruned.

    <run>/checkpoints/step-00000100/    manifest.json  .metadata  __<rank>_0.distcp ...

The format is that of torch.distributed.checkpoint, so any number of ranks can load what any other
number has written. A folder of that name is complete: it is written under a temporary name, gets
its manifest and is renamed. The manifest holds, as JSON, all that is not a tensor. Tensor files are
read as tensors only. ``.metadata`` is a pickle, which could run code, so it is read only from
folders that belong to the user.
"""

from __future__ import annotations

import os
import re
import shutil
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
    FileFacts,
    Manifest,
    measure,
    read_manifest,
    sync_folder,
    verify,
    write_manifest,
)
from train.engine.host_copies import HostCopies
from train.engine.parallel import ParallelLayout, from_rank_0
from train.engine.shard import LoadPlanner, SavePlanner, Shard, own_share, whole

# A single process saves and loads without a process group.
warnings.filterwarnings("ignore", message="torch.distributed is disabled")

PREFIX = "step-"
DAMAGED = "damaged-"
OTHERS_WRITE = 0o022
FORMER_NAMES = {"output.weight": "output"}  # of tensors in checkpoints that still load


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
    folder: Path, say: Callable[[str], None], own: bool = False, accepted: bool = False
) -> Path | None:
    """The newest checkpoint of ``folder`` whose files all match its manifest; None without one.

    ``accepted`` passes over those that a stop has saved during skipped steps. Damaged ones are
    reported to ``say``; those of the ``own`` run are renamed, so that no later search finds them.
    Raises ``ConfigError`` for one that another user could have written.
    """
    for path in reversed(checkpoints_in(folder).values()):
        try:
            verify(path)
        except DamagedError as error:
            if not own:
                say(f"damaged checkpoint skipped: {error}")
                continue
            aside = path.with_name(f"{DAMAGED}{path.name}-{time.time_ns()}")
            path.rename(aside)
            say(f"damaged checkpoint renamed to {aside.name}: {error}")
            continue
        if accepted and is_in_doubt(path):
            continue
        require_own(path)
        return path
    return None


def is_in_doubt(path: Path) -> bool:
    """Whether the steps before a checkpoint were skipped, as its weights may be their cause; also
    if its manifest cannot tell."""
    try:
        return bool(read_facts(path).get("guard", {}).get("in_a_row"))
    except (DamagedError, ConfigError, OSError):
        return True


def require_own(path: Path) -> None:
    """Raise ``ConfigError`` unless ``path`` belongs to the user and no one else can write to it."""
    for part in (path, path / ".metadata"):
        stat = part.stat()
        if stat.st_uid != os.geteuid() or stat.st_mode & OTHERS_WRITE:
            why = (
                "others can write to it"
                if stat.st_mode & OTHERS_WRITE
                else f"it belongs to user {stat.st_uid}"
            )
            raise ConfigError(
                f"checkpoint {part}: {why}; its metadata is a pickle, which can run code, so only "
                f"you may be able to write to it: copy it, or chown and chmod go-w it, if you "
                f"trust its origin"
            )


def find_checkpoint(path: Path, say: Callable[[str], None]) -> Path:
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
    newest = newest_valid(inner if inner.is_dir() else path, say)
    if newest is None:
        raise ConfigError(
            f"{path} contains no checkpoint; give a run folder or its checkpoints/step-*"
        )
    return newest


Tensors = Mapping[str, Tensor | Shard]


def require_fit(path: Path, tensors: Tensors) -> dict[str, Tensor | Shard]:
    """``tensors`` by their names in a verified checkpoint; ``ConfigError`` if a name or a shape
    does not fit."""
    known = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    named = {_stored_name(name, known): tensor for name, tensor in tensors.items()}
    for name, tensor in named.items():
        stored = getattr(known.get(name), "size", None)
        if stored != tensor.shape:
            kept = f"{list(stored)} there" if stored is not None else "not in it"
            raise ConfigError(
                f"checkpoint {path} does not fit this model: {name} is {list(tensor.shape)} "
                f"here and {kept}; choose the model settings that it was made with"
            )
    return named


def load_tensors(path: Path, tensors: Tensors) -> None:
    """Fill ``tensors`` in place from a verified checkpoint; its other tensors are ignored.

    Every rank reads independently. Raises as ``require_fit``.
    """
    try:
        named, reader = require_fit(path, tensors), dcp.FileSystemReader(path)
        with torch.no_grad():
            shards = {n: t if isinstance(t, Shard) else whole(t) for n, t in named.items()}
            dcp.load(shards, storage_reader=reader, planner=LoadPlanner(), no_dist=True)
    except CheckpointException as error:
        raise RuntimeError(f"checkpoint {path} cannot be read: {_cause(error)}") from None


def _stored_name(name: str, known: Mapping[str, Any]) -> str:
    """The name of a tensor in a checkpoint, where older ones have another."""
    for now, before in FORMER_NAMES.items():
        if name not in known and now in name:
            return name.replace(now, before)
    return name


class Checkpoints:
    """The checkpoints of a run on one rank; every rank makes the same calls.

    A thread writes a copy of the tensors (pinned, if they are on a GPU) and communicates over
    ``save_group``. One rank copies and writes each tensor that all ranks hold. A failed write is
    counted, reported and removed; training continues. The caller of ``begin`` holds ``lock``.
    """

    def __init__(
        self,
        folder: Path,
        parallel: ParallelLayout,
        keep: int,
        keep_every: int | None,
        say: Callable[[str], None],
    ) -> None:
        self.folder, self.parallel, self.say = folder, parallel, say
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

    def choose(self, accepted: bool = False) -> Path | None:
        """The newest valid checkpoint, or None; rank 0 verifies and broadcasts its answer.

        ``accepted``: of those behind a step that was not skipped.
        """
        search = partial(newest_valid, self.folder, self.say, own=True, accepted=accepted)
        return from_rank_0(self.parallel, search)

    def remove_after(self, step: int) -> None:
        """Remove what the run has rolled back behind: the checkpoints of later steps than ``step``.

        Every rank must call this. No write may be in progress.
        """

        def remove() -> None:
            for later, path in checkpoints_in(self.folder).items():
                if later > step:
                    self._remove(path)

        from_rank_0(self.parallel, remove)
        self.saved = step

    def remove_litter(self) -> None:
        """Remove the incomplete files of killed processes. No write may be in progress."""
        for litter in self.folder.glob(".*"):
            if litter.is_dir():
                shutil.rmtree(litter, ignore_errors=True)
            else:
                litter.unlink(missing_ok=True)

    def has(self, step: int) -> bool:
        """Whether the checkpoint of ``step`` is saved or being written."""
        return self.saved == step or (self._writing is not None and self._written == step)

    def begin(
        self,
        step: int,
        shards: Mapping[str, Shard],
        facts: dict[str, Any],
        ready: torch.cuda.Event | None = None,
    ) -> None:
        """Copy ``shards`` and start to write them as the checkpoint of ``step``.

        Waits for a previous write first. ``ready`` is the CUDA event after which the tensors have
        the values to save.
        """
        self.wait()
        share = self._copy(own_share(shards), ready)
        self._written = step
        self._writing = self._thread.submit(self._write, step, share, facts)

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

    def _write(self, step: int, share: dict[str, Shard], facts: dict[str, Any]) -> None:
        """Runs in the thread, on all ranks at once."""
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
            problem = self._complete(temporary, final, {"step": step, **facts})
        except (
            OSError,
            CheckpointException,
        ) as error:  # a lost peer ends the run instead
            problem = _cause(error)
        if problem is None:
            self.saved = step
            return
        self.failures += 1
        if self.parallel.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
            self.say(
                f"checkpoint of step {step} failed ({self.failures} so far), training continues: "
                f"{problem}"
            )

    def _complete(self, temporary: Path, final: Path, facts: dict[str, Any]) -> str | None:
        """Rank 0 completes the folder; returns on all ranks what went wrong, or None."""
        files, problem = self._measured(temporary)
        if self.parallel.rank == 0 and problem is None:
            try:
                paths = [temporary / name for name in (*files, ".metadata")]
                for path in (temporary, *paths):
                    path.chmod(path.stat().st_mode & ~OTHERS_WRITE)
                write_manifest(temporary, facts, paths, measured=files)
                before = final.with_name(f".old-{final.name}")
                if final.exists():  # of the same step, from before the run rolled back
                    final.rename(before)
                temporary.rename(final)
                sync_folder(self.folder)
                shutil.rmtree(before, ignore_errors=True)
            except OSError as error:
                problem = _cause(error)
            else:
                self._prune()
        if self.parallel.world > 1:
            answer = [problem]
            dist.broadcast_object_list(answer, src=0, group=self.parallel.save_group)
            problem = answer[0]
        return problem

    def _measured(self, folder: Path) -> tuple[dict[str, FileFacts], str | None]:
        """On rank 0 size and checksum of the tensor files, each measured by its rank, or a problem.

        The file of a rank lies in the cache of its host; rank 0 would read all of them.
        """
        parallel = self.parallel
        try:
            own = {path.name: measure(path) for path in folder.glob(f"__{parallel.rank}_*.distcp")}
            answer: tuple[dict[str, FileFacts], str | None] = own, None
        except OSError as error:
            answer = {}, f"rank {parallel.rank}: {_cause(error)}"
        everyone: list[Any] = [answer]
        if parallel.world > 1:
            everyone = [None] * parallel.world
            dist.all_gather_object(everyone, answer, group=parallel.save_group)
        files = {name: facts for measured, _ in everyone for name, facts in measured.items()}
        return files, next((problem for _, problem in everyone if problem), None)

    def _prune(self) -> None:
        """Remove all but those of every ``keep_every``-th step and the newest ``keep``.

        Those in doubt do not count among the newest: one before them stays for a roll-back.
        """
        steps = list(checkpoints_in(self.folder).items())
        while len(steps) > self.keep and is_in_doubt(steps[-1][1]):
            steps.pop()
        for step, path in steps[: -self.keep]:
            if not self.keep_every or step % self.keep_every:
                try:
                    self._remove(path)
                except OSError as error:  # the new checkpoint is complete all the same
                    self.say(f"checkpoint of step {step} could not be removed: {_cause(error)}")

    def _remove(self, path: Path) -> None:
        hidden = path.with_name(f".old-{path.name}")  # a half-removed one must not count as damaged
        path.rename(hidden)
        shutil.rmtree(hidden, ignore_errors=True)


def read_facts(path: Path) -> dict[str, Any]:
    """The facts in the manifest of a checkpoint."""
    manifest: Manifest = read_manifest(path)
    return manifest.facts


def _cause(error: BaseException) -> str:
    """The error in one line; torch's exception holds one error for each failed rank."""
    if isinstance(error, CheckpointException):
        rank, (cause, _) = next(iter(error.failures.items()))
        return f"rank {rank}: {_cause(cause)}"
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
