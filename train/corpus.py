"""Text on disk -> named documents, split into training and held out.

A document is one file, or one line of a ``.jsonl`` file. Which split it belongs to depends on
nothing but its name (the path below the corpus folder), so it stays there when others come or go.
"""

from __future__ import annotations

import hashlib
import json
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from train.config import ConfigError, DataConfig

# Parts of the standard library that not every installation has (tests, and what Linux distributions
# package on their own), so that all installations of one Python version hold the same corpus; and
# pydoc_data, a single generated file of prose, larger than any ten of the others.
STDLIB_EXCLUDED_FOLDERS = frozenset(
    [
        *("site-packages", "dist-packages", "__pycache__", "__phello__"),
        *("test", "tests", "idle_test", "idlelib", "tkinter", "turtledemo"),
        *("lib2to3", "distutils", "ensurepip", "macholib", "pydoc_data"),
    ]
)
STDLIB_EXCLUDED_FILES = ("_sysconfigdata", "sitecustomize.py", "_distutils_system_mod.py")


@dataclass(frozen=True)
class Source:
    """A file of the corpus. ``name`` is its path relative to the corpus, with forward slashes."""

    path: Path
    name: str


@dataclass(frozen=True)
class Document:
    """A text with its name in the corpus."""

    name: str
    text: str

    @property
    def n_bytes(self) -> int:
        """Length in UTF-8 bytes."""
        return len(self.text.encode())


def find_sources(data: DataConfig) -> list[Source]:
    """The files of the corpus in the order of their names; ``ConfigError`` when there is none."""
    if data.path is None:
        root = Path(sysconfig.get_paths()["stdlib"])
        paths = [p for p in root.rglob("*.py") if _in_stdlib_corpus(p.relative_to(root))]
    else:
        root = Path(data.path).expanduser().absolute()
        paths = [root] if root.is_file() else _matching(root, data.pattern)
        root = root.parent if root.is_file() else root
        paths = [p for p in paths if not _hidden(p.relative_to(root))]
    if not paths:
        raise ConfigError(f"data.path={data.path} holds no file that fits {data.pattern}")
    sources = [Source(path, path.relative_to(root).as_posix()) for path in paths]
    return sorted(sources, key=lambda source: source.name)


def _matching(root: Path, pattern: str) -> list[Path]:
    try:
        return [path for path in root.glob(pattern) if path.is_file()]
    except (NotImplementedError, ValueError) as error:  # an absolute or an empty pattern
        raise ConfigError(
            f"data.pattern={pattern}: {error}; it is relative to data.path, for example **/*.txt"
        ) from None


def _in_stdlib_corpus(path: Path) -> bool:
    folders = path.parts[:-1]
    return (
        not STDLIB_EXCLUDED_FOLDERS.intersection(folders)
        and not any(folder.startswith("config-") for folder in folders)
        and not path.name.startswith(STDLIB_EXCLUDED_FILES)
    )


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def fingerprint(sources: list[Source]) -> str:
    """A hash of the names, sizes and modification times of the files; reads none of them."""
    digest = hashlib.sha256()
    for source in sources:
        stat = source.path.stat()
        digest.update(f"{source.name}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def read_documents(source: Source, text_field: str) -> Iterator[Document]:
    """The documents of one file: itself, or each line of a ``.jsonl``. Empty texts are left out.

    Raises ``UnicodeDecodeError`` for a file that is not UTF-8, ``ConfigError`` for a line of a
    ``.jsonl`` that is no object with a string ``text_field``.
    """
    if source.path.suffix != ".jsonl":
        text = source.path.read_bytes().decode("utf-8")
        if text:
            yield Document(source.name, text)
        return
    with source.path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if text := _json_text(line, text_field, f"{source.path}:{number}"):
                yield Document(f"{source.name}:{number}", text)


def _json_text(line: str, text_field: str, place: str) -> str:
    if not line.strip():
        return ""
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"data.path: {place} is not JSON: {error}") from None
    text = record.get(text_field) if isinstance(record, dict) else None
    if not isinstance(text, str):
        found = ", ".join(record) if isinstance(record, dict) else type(record).__name__
        raise ConfigError(
            f"data.text_field={text_field}: {place} has no such string field; it has: {found}"
        )
    return text


def is_held_out(name: str, share: float) -> bool:
    """Whether the document of this name is in the held-out ``share`` (0 to 1) of the corpus."""
    hashed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
    return hashed < share * 2**64
