"""The checkpoints of a run: written in a background thread, chosen, and pruned.

The ranks write a checkpoint under a temporary name. Then rank 0 adds the manifest and renames it.
"""

from __future__ import annotations

import shutil
import threading
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

from train.data.manifest import FileMetadata, measure, sync_folder, write_manifest
from train.engine.host_copies import HostCopies
from train.engine.parallel import ParallelLayout, from_rank_0
from train.engine.shard import SavePlanner, Shard, own_share
from train.engine.stored_checkpoint import (
    OTHERS_WRITE,
    PREFIX,
    cause_of,
    checkpoints_in,
    newest_valid,
    saved_while_skipping,
)
from train.engine.train_state import TrainState
from train.paths import discard


def _free_space(folder: Path) -> str:
    """Text that follows a failed write: PyTorch's errors do not always name a full disk."""
    try:
        return f"; the disk of {folder} had {shutil.disk_usage(folder).free / 1e9:,.1f} GB free"
    except OSError:
        return ""  # the folder is gone, which the failure itself names


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

    def save(self, state: TrainState, ready: torch.cuda.Event | None = None) -> None:
        """Start to save ``state``, unless it is saved or being written; any thread may call this.

        ``ready`` is as in ``begin``.
        """
        with self.lock:
            if not self.has(state.step):
                self.begin(state.step, state.shards(), state.metadata(), ready)

    def require_saved(self, state: TrainState, ready: torch.cuda.Event | None = None) -> None:
        """``save``, and wait for the end; ``RuntimeError`` if ``state`` could not be saved."""
        with self.lock:
            self.wait()
            self.save(state, ready)
            self.wait()
        if self.saved != state.step:
            raise RuntimeError(
                f"step {state.step} could not be saved, the newest checkpoint is that of step "
                f"{self.saved}; fix what {self.folder.with_name('events.jsonl')} names and run the "
                f"same command again"
            )

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
        with self.lock:
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
            problem = cause_of(error)
        if problem is None:
            self.saved = step
            return
        self.failures += 1
        if self.parallel.rank == 0:
            free = _free_space(self.folder)
            discard(temporary)
            self.log(
                f"checkpoint of step {step} failed ({self.failures} so far), training continues: "
                f"{problem}{free}"
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
                problem = cause_of(error)
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
            answer = {}, f"rank {parallel.rank}: {cause_of(error)}"
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
                    self.log(f"checkpoint of step {step} could not be removed: {cause_of(error)}")

    def _remove(self, path: Path) -> None:
        hidden = path.with_name(f".old-{path.name}")  # a half-removed one must not count as damaged
        path.rename(hidden)
        discard(hidden)
