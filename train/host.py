"""Work that one process of a host does for all processes of a user: checks, and shared arrays.

The files lie in the folder for temporary files, which is that of one host. The operating system
releases the lock of a process that dies, and another process then does the work.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock
from numpy.typing import NDArray

from train.paths import unusable

UNUSED_S = 3600.0  # a process that has mapped an array still has it after its removal


def once(names: Any, work: Callable[[], str]) -> str:
    """The result of ``work``, which one of the processes does that ask at the same time.

    ``names``, JSON, identify it. Processes that ask after it is complete do it again: what it
    depends on may have changed. Raises what ``work`` raises, and ``ConfigError`` if the folder for
    temporary files is unusable.
    """
    asked, path = time.time(), _path(names, ".json")
    with _writable(path):
        lock = FileLock(f"{path}.lock").acquire()
    with lock:
        try:
            completed, result = json.loads(path.read_text())
        except (OSError, ValueError, TypeError):
            completed, result = 0.0, ""
        if asked <= completed <= time.time():
            return result
        result = work()
        with _writable(path):
            path.write_text(json.dumps([time.time(), result]))
        return result


def shared_array(
    names: Any, width: int, rows: Callable[[], Iterable[NDArray[np.int64]]]
) -> NDArray[np.int64]:
    """The array (n, width) int64 of all ``rows``, n > 0, read only, in memory that processes share.

    ``names``, JSON, identify its content. Raises ``ConfigError`` if the folder for temporary files
    is unusable.
    """
    path = _path(names, ".rows")
    with _writable(path), FileLock(f"{path}.lock"):
        if not path.exists():
            _remove_unused(path.parent)
            unfinished = path.with_suffix(".tmp")  # of this process, or of one that died
            with unfinished.open("wb") as file:
                for some in rows():
                    file.write(np.ascontiguousarray(some, np.int64).tobytes())
            unfinished.replace(path)
        else:
            os.utime(path)  # the age of an array counts from its last use
        return np.asarray(np.memmap(path, np.int64, mode="r")).reshape(-1, width)


@contextlib.contextmanager
def _writable(path: Path) -> Iterator[None]:
    """Convert an ``OSError`` to the ``ConfigError`` that the folder of ``path`` is unusable."""
    try:
        yield
    except OSError as error:
        raise unusable("TMPDIR", path.parent, "written to", error) from None


def _path(names: Any, suffix: str) -> Path:
    """The file of ``names``, in a folder of the user's own."""
    name = hashlib.sha256(json.dumps(names).encode()).hexdigest()[:20]
    folder = Path(f"ringfa3-{os.getuid()}")
    try:
        folder = tempfile.gettempdir() / folder
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.stat().st_uid != os.getuid() or folder.is_symlink():
            raise PermissionError(0, "it belongs to another user")
    except OSError as error:
        raise unusable("TMPDIR", folder, "made", error) from None
    return folder / f"{name}{suffix}"


def _remove_unused(folder: Path) -> None:
    """Remove arrays that no process has opened for ``UNUSED_S``, and unfinished ones of a day ago.

    A process that is killed while it writes an array leaves an unfinished one.
    """
    for pattern, age in (("*.rows", UNUSED_S), ("*.tmp", 24 * UNUSED_S)):
        for path in folder.glob(pattern):
            with contextlib.suppress(FileNotFoundError):  # another process has removed it
                if path.stat().st_mtime < time.time() - age:
                    path.unlink()
