"""The user's cache: entries that one process makes once, kernel libraries and CUTLASS's headers.

An entry is a folder. Its maker fills a working folder and renames it, so an entry appears whole
and a killed maker leaves none. A lock that fails, as over NFS, costs work only: two processes may
make the same entry, and one of the two stays.
"""

from __future__ import annotations

import os
import shutil
import socket
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from ringfa3.errors import BuildError

NOTICE = 15.0  # seconds between two lines of a waiting process
PATIENCE = 900.0  # seconds of work, or without a sign of life, after which a maker is stuck
BEGAN = "began"  # in a working folder: when its maker began to work on the entry
STALE = 86400.0  # seconds after which a working folder, of any host, belongs to a dead maker


def cache_path() -> Path:
    """$RINGFA3_CACHE, else ~/.cache/ringfa3/kernels; it need not exist.

    Raises BuildError: there is no home directory.
    """
    given = os.environ.get("RINGFA3_CACHE", "~/.cache/ringfa3/kernels")
    try:
        return Path(given).expanduser()
    except RuntimeError:  # HOME is not set, and the system has no entry for the user
        raise BuildError(f"{given} needs HOME, which is not set: set RINGFA3_CACHE") from None


def cache_folder() -> Path:
    """The folder of the cache, created with mode 0700 if missing.

    Raises BuildError: others can write to it, and processes load and run its libraries. OSError:
    it cannot be created.
    """
    folder = cache_path()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise BuildError(f"{folder} can be written by others: chmod 700 it, or set RINGFA3_CACHE")
    return folder


def log_line(line: str) -> None:
    print(f"ringfa3: {line}", file=sys.stderr, flush=True)


class Making(NamedTuple):
    """An entry in the making, while its lock is held.

    The maker creates the file BEGAN in the folder's parent when it starts to work on the entry.
    Until then it touches the parent, the sign of life of an entry that waits in the maker's queue.
    """

    folder: Path  # empty; the maker fills it. The folder's parent is for temporary files
    publish: Callable[[], Path]  # makes it an entry; the result of `find`
    fail: Callable[[BuildError], None]  # lets the processes that wait for it fail too


@contextmanager
def working_folder(task: str) -> Iterator[Path]:
    """A folder in the cache for temporary files; it is removed at the end."""
    folder = Path(tempfile.mkdtemp(dir=cache_folder(), prefix=_Work.prefix(task)))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def making(
    task: str, name: str, find: Callable[[], Path | None], wait: bool = True
) -> Iterator[Making | Path | None]:
    """The entry `name` to be made, or the result of `find`.

    One of the processes that share the task's lock makes the entry. The others log that they wait,
    or without `wait` get None.

    Raises BuildError: that of the maker for which this process has waited.
    """
    folder = cache_folder()
    failure = folder / f"{task}.failed"
    began = time.time()
    with ExitStack() as locks:
        locked = locks.enter_context(_entry_lock(folder, task, find, wait))
        found = find()
        if found or locked is None:
            yield found
            return
        if failure.is_file() and failure.stat().st_mtime > began:  # while we waited
            failed, _, message = failure.read_text().partition("\n")
            if failed == name:
                raise BuildError(message)
        _sweep(folder, task if locked else None)
        work = locks.enter_context(working_folder(task))

        def publish() -> Path:
            try:
                os.rename(work / "entry", folder / name)
            except OSError:
                if made := find():  # another process was first
                    return made
                # the entry of that name is damaged, or NFS does not show it yet
                os.rename(work / "entry", folder / f"{name}.{work.name.rpartition('@')[2]}")
            if (made := find()) is None:
                raise BuildError(f"the sources changed while {name} was made: build it again")
            failure.unlink(missing_ok=True)
            return made

        def fail(error: BuildError) -> None:
            with suppress(OSError):  # of a full disk
                failure.write_text(f"{name}\n{error}")

        (work / "entry").mkdir()
        yield Making(work / "entry", publish, fail)


def make_once(
    task: str, name: str, find: Callable[[], Path | None], fill: Callable[[Path], None]
) -> Path:
    """The result of `find`, after making the entry `name` by `fill(folder)` if it gave None.

    Raises as `making`, whatever `fill` raises, and OSError for a full or read-only disk.
    """
    with making(task, name, find) as made:
        if isinstance(made, Path):
            return made
        assert made is not None  # it has waited
        (made.folder.parent / BEGAN).touch()
        try:
            fill(made.folder)
            return made.publish()
        except BuildError as error:
            made.fail(error)
            raise


class _Work(NamedTuple):
    """The working folder of an entry; its name states the task, and the maker's host and pid."""

    path: Path
    task: str
    host: str
    pid: int
    age: float  # seconds since the maker began to work on the entry, or last touched the folder
    queued: bool  # the maker has not begun

    @staticmethod
    def prefix(task: str) -> str:
        return f".{task}@{socket.gethostname()}@{os.getpid()}@"

    @staticmethod
    def under(folder: Path) -> Iterator[_Work]:
        for path in folder.glob(".*@*@*@*"):
            task, host, pid, _ = path.name.removeprefix(".").split("@")
            with suppress(OSError):  # its maker has just removed it
                queued = not (path / BEGAN).exists()
                since = (path if queued else path / BEGAN).stat().st_mtime
                yield _Work(path, task, host, int(pid), time.time() - since, queued)

    def __str__(self) -> str:
        does = (
            "has it in its queue" if self.queued else f"has been building it for {self.age:.0f} s"
        )
        return f"process {self.pid} on {self.host} {does}"


@contextmanager
def _entry_lock(
    folder: Path, task: str, find: Callable[[], Path | None], wait: bool
) -> Iterator[bool | None]:
    """Waits until no other process makes the entry; yields whether we hold the task's lock.

    Without `wait` it yields None if another process holds the lock.
    """
    from filelock import FileLock, Timeout  # PyTorch depends on it too

    lock = FileLock(folder / f"{task}.lock")
    speaks = os.environ.get("LOCAL_RANK", "0") in ("0", "1")  # one of the two waits for the other
    locked: bool | None = False
    while True:
        try:
            lock.acquire(timeout=NOTICE if wait else 0)
        except Timeout:
            if not wait:
                locked = None
                break
            maker = next((w for w in _Work.under(folder) if w.task == task), None)
            if find() or maker is None or maker.age > PATIENCE:
                break
            if speaks:
                log_line(f"waiting for {task}: {maker}")
        except (OSError, NotImplementedError):  # a file system without locks
            break
        else:
            try:
                yield True
            finally:
                lock.release()
            return
    yield locked


def _sweep(folder: Path, locked: str | None) -> None:
    """Removes the working folders of dead makers. locked: the task whose lock we hold."""
    for work in _Work.under(folder):
        ours = work.task == locked and work.host == socket.gethostname()
        if work.age > STALE or (ours and not Path(f"/proc/{work.pid}").exists()):
            shutil.rmtree(work.path, ignore_errors=True)
