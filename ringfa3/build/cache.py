"""The user's folder of things that are made once: kernel libraries, CUTLASS's headers.

An entry is a folder. It is filled in a folder of its maker's own and appears by a rename, whole.
So a killed maker leaves no half entry, and a lock that is lost, as over NFS, costs work only: two
may then make the same entry, and one of the two is kept.
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
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from ringfa3.errors import BuildError

NOTICE = 15.0  # seconds between two lines of one that waits
PATIENCE = 900.0  # seconds until a maker is taken to be stuck
STALE = 86400.0  # seconds until any unfinished folder, also another host's, is a dead maker's


def location() -> Path:
    """$RINGFA3_CACHE, else ~/.cache/ringfa3/kernels; it need not exist."""
    return Path(os.environ.get("RINGFA3_CACHE", "~/.cache/ringfa3/kernels")).expanduser()


def cache() -> Path:
    """The user's own folder, made with mode 0700.

    Raises BuildError if others can write to it (what lies there is loaded and run), OSError if it
    cannot be made.
    """
    folder = location()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise BuildError(f"{folder} can be written by others: chmod 700 it, or set RINGFA3_CACHE")
    return folder


def say(line: str) -> None:
    print(f"ringfa3: {line}", file=sys.stderr, flush=True)


def once(
    task: str, name: str, found: Callable[[], Path | None], fill: Callable[[Path], None]
) -> Path:
    """What `found` finds, after the entry `name` was made if it found nothing.

    One process of those that share a lock makes it, others wait and say so; if it fails they fail
    with it. `fill` gets an empty folder, and may use that folder's parent for what need not stay.

    Raises whatever `fill` raises, and OSError for a full or read-only disk.
    """
    folder = cache()
    failure = folder / f"{task}.failed"
    came = time.time()
    with _turn(folder, task, found) as alone:
        if made := found():
            return made
        if failure.is_file() and failure.stat().st_mtime > came:  # while we waited
            what, _, why = failure.read_text().partition("\n")
            if what == name:
                raise BuildError(why)
        _sweep(folder, task if alone else None)
        work = Path(tempfile.mkdtemp(dir=folder, prefix=_Work.prefix(task)))
        try:
            (work / "entry").mkdir()
            fill(work / "entry")
            try:
                os.rename(work / "entry", folder / name)
            except OSError:
                if made := found():  # another was first
                    return made
                # what has the name is damaged, or NFS does not show it yet
                os.rename(work / "entry", folder / f"{name}.{work.name.rpartition('@')[2]}")
            made = found()
            assert made is not None
            failure.unlink(missing_ok=True)
            return made
        except BuildError as error:
            with suppress(OSError):  # of a full disk
                failure.write_text(f"{name}\n{error}")
            raise
        finally:
            shutil.rmtree(work, ignore_errors=True)


class _Work(NamedTuple):
    """A folder in which an entry is being made; its name says what and by whom."""

    path: Path
    task: str
    host: str
    pid: int
    age: float  # seconds

    @staticmethod
    def prefix(task: str) -> str:
        return f".{task}@{socket.gethostname()}@{os.getpid()}@"

    @staticmethod
    def under(folder: Path) -> Iterator[_Work]:
        for path in folder.glob(".*@*@*@*"):
            task, host, pid, _ = path.name.removeprefix(".").split("@")
            with suppress(OSError):  # it has just gone
                yield _Work(path, task, host, int(pid), time.time() - path.stat().st_mtime)


@contextmanager
def _turn(folder: Path, task: str, found: Callable[[], Path | None]) -> Iterator[bool]:
    """Waits until nobody else makes what `found` finds; yields whether we hold the task's lock."""
    from filelock import FileLock, Timeout  # PyTorch needs it too

    lock = FileLock(folder / f"{task}.lock")
    speaks = os.environ.get("LOCAL_RANK", "0") in ("0", "1")  # one of the two waits
    while True:
        try:
            lock.acquire(timeout=NOTICE)
        except Timeout:
            maker = next((w for w in _Work.under(folder) if w.task == task), None)
            if found() or maker is None or maker.age > PATIENCE:
                break
            if speaks:
                who = f"process {maker.pid} on {maker.host}"
                say(f"waiting for {task}: {who} has been at it for {maker.age:.0f} s")
        except (OSError, NotImplementedError):  # a file system without locks
            break
        else:
            try:
                yield True
            finally:
                lock.release()
            return
    yield False


def _sweep(folder: Path, alone: str | None) -> None:
    """Removes what dead makers have left. `alone`: the task whose lock we hold."""
    for work in _Work.under(folder):
        ours = work.task == alone and work.host == socket.gethostname()
        if work.age > STALE or (ours and not Path(f"/proc/{work.pid}").exists()):
            shutil.rmtree(work.path, ignore_errors=True)
