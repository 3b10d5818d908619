"""Text on disk -> named documents, split into training and held-out.

A document is a text file, a line of a ``.jsonl`` or a row of a ``.parquet``. Its split depends only
on a hash of its text and ``data.held_out_salt``, or on whether ``data.validation_path`` has it. A
document therefore stays in its split when files are added, removed, renamed or sorted.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from train.config import SOURCES, TEXT, ConfigError, DataConfig
from train.data.formats import WHOLE_FILE, Keys, read_texts, require_readers
from train.paths import expand

# The corpus excludes parts of the standard library that some installations lack: tests, and modules
# that Linux distributions package separately. Every installation of one Python version then gives
# the same corpus. It also excludes pydoc_data, one generated file of prose, larger than ten others.
STDLIB_EXCLUDED_FOLDERS = frozenset(
    [
        *("site-packages", "dist-packages", "__pycache__", "__phello__"),
        *("test", "tests", "idle_test", "idlelib", "tkinter", "turtledemo"),
        *("lib2to3", "distutils", "ensurepip", "macholib", "pydoc_data"),
    ]
)
STDLIB_EXCLUDED_FILES = ("_sysconfigdata", "sitecustomize.py", "_distutils_system_mod.py")

ANY_NAME = ("utf-8", "surrogateescape")  # file names need not be UTF-8
HASHES = 2**63  # of texts: they fit into int64


@dataclass(frozen=True)
class Source:
    """A source of text: an entry of ``data.sources``, or a path (``name`` is empty).

    ``path`` None is the standard library of the running Python. ``path_key`` is the config key of
    the path, ``section`` the config section with ``pattern`` and ``text_field``. ``validation``
    means ``data.validation_path``.
    """

    name: str
    path: str | None
    pattern: str
    text_field: str
    weight: float
    path_key: str
    validation: bool = False
    format: str = TEXT

    @property
    def section(self) -> str:
        """The config section with the keys that control how it is read."""
        return f"{SOURCES}.{self.name}" if self.name else "data"

    @property
    def keys(self) -> Keys:
        """The config keys that appear in errors about its files."""
        return Keys(self.path_key, f"{self.section}.text_field", f"{self.section}.format")


@dataclass(frozen=True)
class TextFile:
    """A file in a source. ``name`` is its path relative to the source, with forward slashes."""

    source: Source
    path: Path
    name: str

    @property
    def label(self) -> str:
        """``name``, preceded by the name of its source."""
        return f"{self.source.name}/{self.name}" if self.source.name else self.name


@dataclass(frozen=True)
class Document:
    """A text, its file and row (``WHOLE_FILE``, or from 1), and its length in UTF-8 bytes.

    The text of a conversation or a completion is a JSON of its fields (``train.data.chat``).
    """

    file: TextFile
    row: int
    text: str
    n_bytes: int

    @property
    def name(self) -> str:
        """Its name within its source."""
        return document_name(self.file.name, self.row)

    def hash(self, salt: int) -> int:
        """``text_hash`` of its text."""
        return text_hash(self.text, salt)


def document_name(file: str, row: int) -> str:
    """A document's name: that of its file, plus the row if the file holds several documents."""
    return file if row == WHOLE_FILE else f"{file}:{row}"


def sources_of(data: DataConfig, path_key: str = "data.path") -> list[Source]:
    """The sources, sorted by name; for ``data.path``, one source without a name.

    ``path_key`` is the config key that errors name for ``data.path``.
    """
    if not data.sources:
        own = (data.path, data.pattern, data.text_field, 1.0, path_key)
        return [Source("", *own, format=data.format)]
    return [
        Source(
            name=name,
            path=source.path,
            pattern=source.pattern or data.pattern,
            text_field=source.text_field or data.text_field,
            weight=source.weight,
            path_key=f"{SOURCES}.{name}.path",
            format=source.format or data.format,
        )
        for name, source in sorted(data.sources.items())
    ]


def find_files(data: DataConfig, path_key: str = "data.path") -> list[TextFile]:
    """The files of all sources, sorted by name within each source.

    Raises ``ConfigError`` for a source without files, and for a format whose reader is not
    installed.
    """
    files = [file for source in sources_of(data, path_key) for file in _files_of(source)]
    require_readers([file.path for file in files])
    return files


def all_files(data: DataConfig) -> list[TextFile]:
    """The files of ``data.validation_path``, if it is given, and then those of ``find_files``."""
    if data.validation_path is None:
        return find_files(data)
    own = (data.validation_path, data.pattern, data.text_field, 1.0, "data.validation_path")
    files = _files_of(Source("", *own, validation=True, format=data.format))
    require_readers([file.path for file in files])
    return [*files, *find_files(data)]


def _files_of(source: Source) -> list[TextFile]:
    if source.path is None:
        root = Path(sysconfig.get_paths()["stdlib"])
        paths = [p for p in root.rglob("*.py") if _in_stdlib_corpus(p.relative_to(root))]
    else:
        root = expand(source.path_key, source.path).absolute()
        paths = [root] if root.is_file() else _matching(root, source)
        root = root.parent if root.is_file() else root
        paths = [p for p in paths if not _hidden(p.relative_to(root))]
    if not paths:
        raise ConfigError(
            f"{source.path_key}={source.path} contains no file that matches {source.pattern}"
        )
    files = [TextFile(source, path, path.relative_to(root).as_posix()) for path in paths]
    return sorted(files, key=lambda file: file.name)


def _matching(root: Path, source: Source) -> list[Path]:
    try:
        return [path for path in root.glob(source.pattern) if path.is_file()]
    except (NotImplementedError, ValueError) as error:  # an absolute or an empty pattern
        raise ConfigError(
            f"{source.section}.pattern={source.pattern}: {error}; it is relative to "
            f"{source.path_key}, for example **/*.txt"
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


def fingerprint(files: list[TextFile]) -> str:
    """A hash of the names, sizes and modification times of the files; does not read them."""
    digest = hashlib.sha256()
    for file in files:
        stat = file.path.stat()
        settings = f"{file.source.name}\0{file.source.text_field}\0{file.name}"
        settings += "\0validation" * file.source.validation
        if file.source.format != TEXT:  # earlier versions had no other
            settings += f"\0{file.source.format}"
        digest.update(f"{settings}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode(*ANY_NAME))
    return digest.hexdigest()


def read_documents(
    file: TextFile, at: Callable[[int], None] = lambda n_bytes: None
) -> Iterator[Document]:
    """The documents of one file. Raises what ``train.data.formats.read_texts`` raises."""
    source = file.source
    texts = read_texts(file.path, source.text_field, source.keys, at, source.format)
    for row, text, n_bytes in texts:
        yield Document(file, row, text, n_bytes)


def text_hash(text: str, salt: int) -> int:
    """A number in [0, ``HASHES``), the same on every machine: 63 bits of SHA-256."""
    digest = hashlib.sha256(f"{salt}\0{text}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % HASHES


def is_held_out(hashed: int, share: float) -> bool:
    """Whether the document with this hash belongs to the held-out ``share`` (0 to 1).

    A larger share holds out the same documents, and further ones of larger hashes.
    """
    return hashed < share * HASHES
