"""A file with one JSON object per line, complete after every line."""

from __future__ import annotations

import json
import math
import threading
from pathlib import Path
from typing import Any


class JsonLines:
    """Appends objects to a file, from any thread. What a full disk does not take is kept and
    written later, here or when the file is closed; ``problem`` says why lines are missing in it.

    ``last_step`` is the step after which the run goes on: lines of later steps, and a line that a
    killed process has left torn, are removed first.
    """

    def __init__(self, path: Path, last_step: int) -> None:
        self.path = path
        self.problem: str | None = None
        self._lock = threading.Lock()
        self._file = path.open("ab", buffering=0)
        self._pending = b""
        self._cut: int | None = None  # the file is to end here before anything is appended
        self.forget(last_step)

    def write(self, record: dict[str, Any]) -> None:
        """Append one object; a number in it that is not finite becomes null."""
        line = (json.dumps(_finite(record), allow_nan=False) + "\n").encode()
        with self._lock:
            self._pending += line
            self._flush()

    def forget(self, last_step: int) -> None:
        """Remove the lines of the steps after ``last_step``, those that still wait too.

        The file is cut where the first of them begins, which needs no space on the disk. Lines that
        stay are behind it only in files that were not written by this class.
        """
        with self._lock:
            content = self.path.read_bytes()[: self._cut]
            written = len(content)
            lines = (content + self._pending).splitlines(keepends=True)
            stays = [_belongs(line, last_step) for line in lines]
            first = stays.index(False) if False in stays else len(lines)
            head = b"".join(lines[:first])
            tail = (line for line, kept in zip(lines, stays, strict=True) if kept)
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
        """Close the file, after one more try to write what is missing in it."""
        with self._lock:
            if not self._file.closed:
                self._flush()
                self._file.close()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a file, in order."""
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def _finite(value: Any) -> Any:
    """``value`` with None for every number in it that JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(entry) for entry in value]
    return value


def _belongs(line: bytes, last_step: int) -> bool:
    return line.endswith(b"\n") and json.loads(line).get("step", 0) <= last_step
