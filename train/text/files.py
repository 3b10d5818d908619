"""The files below a folder that match a pattern, and what is not read, with its reason.

Links are followed. Each real folder and file is read once, so a link to a parent folder causes no
loop and no duplicates. It has its name without a link, or that of a link if only a link has a
suffix, as in a cache of blobs.
"""

from __future__ import annotations

import errno
import mimetypes
import os
import stat
from collections import deque
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

EXAMPLES = 3  # names that a line on files that are not read has
UTF16 = (b"\xff\xfe", b"\xfe\xff", b"\0\0\xfe\xff")  # the BOMs of UTF-16 and UTF-32
ARCHIVES = (
    b"PK\3\4",
    b"\x1f\x8b",
    b"BZh",
    b"\xfd7zXZ",
    b"7z\xbc\xaf",
    b"Rar!",
    b"\x28\xb5\x2f\xfd",
)
JOB = ".job"  # a file in the folder of every run
TYPES = mimetypes.MimeTypes()  # without the files of the system


class NotReadError(ValueError):
    """A file is left out. The message is the reason and the remedy, without the name."""


class LeftOut:
    """Files and folders that are not read.

    ``found`` maps a config key of a path and a reason to their number and the first ``EXAMPLES``.
    """

    def __init__(self, found: list[tuple[str, str, int, list[str]]] | None = None) -> None:
        self.found = {(key, reason): (n, names) for key, reason, n, names in found or ()}

    def add(self, key: str, reason: str, name: str) -> None:
        """Count the file or folder ``name`` below the path of ``key``."""
        n, names = self.found.get((key, reason), (0, []))
        self.found[key, reason] = n + 1, [*names, name][:EXAMPLES]

    def listed(self) -> list[tuple[str, str, int, list[str]]]:
        """``found`` for JSON, as the constructor takes it."""
        return [(key, reason, *counted) for (key, reason), counted in sorted(self.found.items())]

    def lines(self) -> list[str]:
        """A line for each key and reason."""
        return [
            f"{key}: {n:,} left out ({', '.join(map(printable, names))}"
            f"{', ...' if n > len(names) else ''}): {reason}"
            for key, reason, n, names in self.listed()
        ]


def printable(name: str) -> str:
    """A file name in UTF-8, with ``?`` for bytes that are not."""
    return name.encode("utf-8", "replace").decode()


def matching_files(
    root: Path, pattern: str, left_out: Callable[[str, str], None], skipped: Path | None = None
) -> Iterator[tuple[str, Path]]:
    """The files below ``root`` whose names match the glob ``pattern``, with these names.

    A name is relative to ``root``, with forward slashes. Names with a part that starts with a dot
    are skipped, and so are the folder ``skipped`` and those of runs: a start that reads what
    another start writes trains on other text each time. ``left_out`` gets the reason and the name
    of whatever cannot be read. Raises ``ValueError`` for a pattern that names nothing below
    ``root``.
    """
    parts = PurePosixPath(pattern).parts
    if not parts or parts[0] == "/" or ".." in parts:
        raise ValueError("the pattern must name files below the folder")
    seen = set() if skipped is None else {os.path.realpath(skipped)}
    waiting = deque([("", os.path.realpath(root))])  # links at its end: real names come first
    unnamed: deque[tuple[str, str]] = deque()  # files without a suffix: a link may give them one
    while waiting or unnamed:
        name, real = (waiting or unnamed).popleft()
        if real in seen:
            continue
        seen.add(real)
        path = root / name
        try:
            mode = os.stat(real).st_mode
            entries = list(os.scandir(path)) if stat.S_ISDIR(mode) else []
        except OSError as error:
            lost = error.errno in (errno.ENOENT, errno.ELOOP)
            reason = "a link without a target" if lost else f"unreadable ({error.strerror})"
            left_out(f"{reason}; repair it, or exclude it with data.pattern", name or ".")
            continue
        if stat.S_ISDIR(mode):
            if name and any(entry.name == JOB for entry in entries):
                continue
            below = []
            for entry in sorted(entries, key=lambda entry: entry.name):
                inner = f"{name}/{entry.name}" if name else entry.name
                if entry.name.startswith(".") or not _matches(inner.split("/"), parts, below=True):
                    continue
                if entry.is_symlink():
                    waiting.append((inner, os.path.realpath(entry.path)))
                elif entry.is_file() and not PurePosixPath(entry.name).suffix:
                    unnamed.append((inner, os.path.join(real, entry.name)))
                else:
                    below.append((inner, os.path.join(real, entry.name)))
            waiting.extendleft(reversed(below))
        elif _matches(name.split("/"), parts):
            if stat.S_ISREG(mode):
                yield name, path
            else:
                left_out("a socket, pipe or device", name)


def _matches(names: list[str], parts: tuple[str, ...], below: bool = False) -> bool:
    """Whether a file of this name matches; with ``below`` also, whether one below it may."""
    if not parts:
        return not names
    if not names:
        return below or parts == ("**",)
    if parts[0] == "**":
        return _matches(names, parts[1:], below) or _matches(names[1:], parts, below)
    return fnmatchcase(names[0], parts[0]) and _matches(names[1:], parts[1:], below)


def not_text(name: str, head: bytes) -> NotReadError:
    """The error for a file that is not UTF-8 text and begins with ``head``."""
    medium = (TYPES.guess_type(name)[0] or "").split("/")[0]
    if head.startswith(UTF16):
        return NotReadError("UTF-16 or UTF-32; convert it to UTF-8, for example with iconv")
    if head.startswith(ARCHIVES) or head[257:262] == b"ustar":
        return NotReadError("an archive, or compressed without its suffix; unpack or rename it")
    if medium in ("image", "audio", "video"):
        return NotReadError(f"{medium}, not text")
    return NotReadError("not UTF-8: binary, or text to convert to UTF-8, for example with iconv")
