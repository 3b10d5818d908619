"""A file with one JSON object per line, complete after every line."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any


class JsonLines:
    """Appends objects to a file. What a full disk does not take is kept and written later.

    ``last_step`` is the step after which the run goes on: lines of later steps, and a line that a
    killed process has left torn, are removed first.
    """

    def __init__(self, path: Path, last_step: int) -> None:
        kept = b""
        if path.exists():
            lines = path.read_bytes().splitlines(keepends=True)
            kept = b"".join(line for line in lines if _belongs(line, last_step))
        temporary = path.with_suffix(".tmp")
        temporary.write_bytes(kept)
        temporary.replace(path)
        self.path = path
        self.problem: str | None = None  # why the newest lines are not in the file
        self._file = path.open("ab", buffering=0)
        self._pending = b""

    def write(self, record: dict[str, Any]) -> None:
        """Append one object; a number that is not finite becomes null."""
        finite = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in record.items()
        }
        self._pending += (json.dumps(finite, allow_nan=False) + "\n").encode()
        try:
            while self._pending:
                self._pending = self._pending[self._file.write(self._pending) :]
            self.problem = None
        except OSError as error:
            self.problem = f"{self.path}: {error.strerror}"

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a file, in order."""
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def _belongs(line: bytes, last_step: int) -> bool:
    return line.endswith(b"\n") and json.loads(line).get("step", 0) <= last_step
