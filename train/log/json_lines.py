"""A file with one JSON object per line, complete after every line."""

from __future__ import annotations

import json
import math
import threading
from pathlib import Path
from typing import Any


class JsonLines:
    """Appends objects to a file, from any thread.

    Lines that a full disk rejects stay in memory and are written later, with the next line or at
    the end; ``problem`` is the reason why lines are missing. ``last_step`` is the step after which
    the run continues. The lines of later steps, and incomplete lines of a killed process or host,
    are removed first.
    """

    def __init__(self, path: Path, last_step: int) -> None:
        self.path = path
        self.problem: str | None = None
        self._lock = threading.Lock()
        self._file = path.open("ab", buffering=0)
        self._pending = b""
        self._cut: int | None = None  # truncate the file here before the next append
        self.drop_after(last_step)

    def write(self, record: dict[str, Any]) -> None:
        """Append one object; numbers that are not finite become null."""
        line = (json.dumps(_finite(record), allow_nan=False) + "\n").encode()
        with self._lock:
            self._pending += line
            self._flush()

    def drop_after(self, last_step: int) -> None:
        """Remove the lines of steps after ``last_step``, pending ones too.

        The file is truncated at the first of them, which needs no disk space. Later lines of
        earlier steps are appended again; only files of another writer have any.
        """
        with self._lock:
            content = self.path.read_bytes()[: self._cut]
            written = len(content)
            lines = (content + self._pending).splitlines(keepends=True)
            keep = [_belongs(line, last_step) for line in lines]
            first = keep.index(False) if False in keep else len(lines)
            head = b"".join(lines[:first])
            tail = (line for line, kept in zip(lines, keep, strict=True) if kept)
            self._cut = min(written, len(head))
            self._pending = b"".join(tail)[self._cut :]
            self._flush()

    def _flush(self) -> None:
        try:
            if self._cut is not None:
                self._file.truncate(self._cut)
                self._cut = None
            while self._pending:
                self._pending = self._pending[self._file.write(self._pending) :]
            self.problem = None
        except OSError as error:
            self.problem = f"{self.path}: {error.strerror}"

    def close(self) -> None:
        """Try once more to write the pending lines, then close the file."""
        with self._lock:
            if not self._file.closed:
                self._flush()
                self._file.close()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a file, in order."""
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def _finite(value: Any) -> Any:
    """``value`` with None in place of numbers that JSON cannot represent."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(entry) for entry in value]
    return value


def _belongs(line: bytes, last_step: int) -> bool:
    try:
        return line.endswith(b"\n") and json.loads(line).get("step", 0) <= last_step
    except ValueError:  # a host that lost its power may leave zeros
        return False
