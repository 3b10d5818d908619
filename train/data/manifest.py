"""The manifest of a folder: size and checksum of each file, and metadata of the folder.

``manifest.json`` is written last, after every file has reached the disk, so a folder with a
manifest is complete. It contains a checksum of itself. Its JSON key for the metadata is "facts".
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from train.config import ConfigError

FORMAT = 1
MANIFEST = "manifest.json"
CHECKING_THREADS = 8  # one rank checks all files of a checkpoint while the others wait


class DamagedError(RuntimeError):
    """The content of ``path`` differs from what was written; ``problem`` is the difference."""

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(f"{path} {problem}")
        self.path, self.problem = path, problem


@dataclass(frozen=True)
class FileMetadata:
    """The expected ``size`` in bytes and CRC-32 of a file."""

    size: int
    crc32: int


@dataclass(frozen=True)
class Manifest:
    """``metadata`` as given to ``write_manifest``; ``files`` by path relative to the folder."""

    metadata: dict[str, Any]
    files: dict[str, FileMetadata]


def write_manifest(
    folder: Path,
    metadata: dict[str, Any],
    files: Iterable[Path] | None = None,
    measured: Mapping[str, FileMetadata] | None = None,
) -> None:
    """Complete ``folder``: flush its files to the disk, then the manifest, then the folder itself.

    ``metadata`` is a JSON object. ``files`` are paths below ``folder`` (``ValueError`` for others);
    None means every file in it. ``measured`` has results of ``measure`` from other processes, by
    file name; these files are not read. An earlier manifest is replaced atomically.
    """
    temporary = folder / f"{MANIFEST}.tmp"
    if files is None:
        own = (folder / MANIFEST, temporary)
        files = (path for path in folder.rglob("*") if path.is_file() and path not in own)
    entries, folders = {}, {folder}
    for path in sorted(files):
        name = path.relative_to(folder).as_posix()
        if not _stays_inside(name):
            raise ValueError(f"{path} is not a file of {folder}")
        entries[name] = asdict((measured or {}).get(name) or measure(path))
        folders.update(folder / parent for parent in Path(name).parents)
    body = json.loads(json.dumps({"format": FORMAT, "facts": metadata, "files": entries}))
    text = json.dumps({**body, "crc32": _crc32_of(body)}, indent=1)
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())
    for inner in folders:  # file names reach the disk before the manifest that lists them
        sync_folder(inner)
    temporary.replace(folder / MANIFEST)
    sync_folder(folder)


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of ``folder`` and no other file.

    Raises ``DamagedError`` if it is missing or damaged, ``ConfigError`` if it has the format of
    another version of the trainer.
    """
    path = folder / MANIFEST
    try:
        body = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise DamagedError(path, "is missing") from None
    except ValueError as error:
        raise DamagedError(path, f"cannot be read: {error}") from None
    expected = body.pop("crc32", None) if isinstance(body, dict) else None
    if expected is None:
        raise DamagedError(path, "is not a manifest with a checksum")
    if expected != _crc32_of(body):
        raise DamagedError(path, "differs from its checksum")
    if body.get("format") != FORMAT:
        raise ConfigError(
            f"{path} has format {body.get('format')}; this version reads {FORMAT}: use the version "
            f"that has written it"
        )
    try:
        files = {name: FileMetadata(**entry) for name, entry in body["files"].items()}
        manifest = Manifest(body["facts"], files)
    except (KeyError, TypeError, AttributeError) as error:
        raise DamagedError(path, f"lacks what a manifest has: {error}") from None
    for name in manifest.files:
        if not _stays_inside(name):
            raise DamagedError(path, f"names {name!r}, which is not a file of its folder")
    return manifest


def verify(folder: Path, contents: bool | Callable[[str], bool] = True) -> Manifest:
    """Compare every file of ``folder`` with its manifest, and return the manifest.

    Sizes are always compared, checksums only if ``contents`` is true (a function decides by file
    name). Files that the manifest does not list are ignored. ``DamagedError`` names the first file
    that differs. An ``OSError`` passes through: a failed read does not prove damage.
    """
    manifest = read_manifest(folder)
    for name, expected in manifest.files.items():
        path = folder / name
        if not path.is_file():
            raise DamagedError(path, "is not a file" if path.exists() else "is missing")
        size = path.stat().st_size
        if size != expected.size:
            raise DamagedError(path, f"has {size} bytes, not {expected.size}")
    names = [n for n in manifest.files if (contents(n) if callable(contents) else contents)]
    with ThreadPoolExecutor(CHECKING_THREADS) as threads:  # zlib computes without the GIL
        sums = threads.map(lambda name: checksum(folder / name), names)
        for name, found in zip(names, sums, strict=True):
            if found != manifest.files[name].crc32:
                raise DamagedError(folder / name, "differs from its checksum")
    return manifest


def measure(path: Path) -> FileMetadata:
    """Flush a file to the disk; returns its size and checksum."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return FileMetadata(path.stat().st_size, checksum(path))


def checksum(path: Path) -> int:
    """CRC-32 of a file, read block by block."""
    value = 0
    with path.open("rb") as file:
        while block := file.read(2**22):
            value = zlib.crc32(block, value)
    return value


def sync_folder(folder: Path) -> None:
    """Flush the directory entries of ``folder`` to the disk, for example after a rename."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _crc32_of(body: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())


def _stays_inside(name: str) -> bool:
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts
