"""Text on disk -> named documents, split into training and held-out.

A document is what ``train.text.formats`` reads. Its split depends only on a hash of its text and
``data.held_out_salt``, or on whether ``data.validation_path`` has it. A document therefore stays in
its split when files are added, removed, renamed or sorted.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from train.config import SOURCES, ConfigError, DataConfig
from train.paths import expand
from train.sections.data import PLAIN, SourceConfig
from train.text.files import LeftOut, NotReadError, matching_files
from train.text.formats import read_texts, require_readers
from train.text.reading import CSV, INDEX, MEGATRON, TEXT, WHOLE_FILE, Reading, format_of
from train.text.token_ids import IdDecoder, Ids, partner

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

    ``path`` None is the standard library of the running Python. ``reading`` is how its files are
    read. ``validation`` means ``data.validation_path``.
    """

    name: str
    path: str | None
    pattern: str
    weight: float
    reading: Reading
    validation: bool = False


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

    ``ids`` are its tokens if the file has token ids. The text of a conversation or a completion is
    the JSON of its fields (``train.text.chat``).
    """

    file: TextFile
    row: int
    text: str
    n_bytes: int
    ids: Ids | None = None

    @property
    def name(self) -> str:
        """Its name within its source."""
        return document_name(self.file.name, self.row)

    @property
    def is_text(self) -> bool:
        """Whether its tokens are those of its text, between BOS and EOS."""
        return self.ids is None and self.file.source.reading.data_format == PLAIN

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
        return [Source("", data.path, data.pattern, 1.0, _reading(data, path_key))]
    return [
        Source(
            name=name,
            path=source.path,
            pattern=source.pattern or data.pattern,
            weight=source.weight,
            reading=_reading(data, f"{SOURCES}.{name}.path", source),
        )
        for name, source in sorted(data.sources.items())
    ]


def _reading(data: DataConfig, path_key: str, source: SourceConfig | None = None) -> Reading:
    own = source or data
    return Reading(
        text_field=own.text_field or data.text_field,
        path_key=path_key,
        split_on=data.split_on if own.split_on is None else own.split_on,
        split_bytes=own.split_bytes or data.split_bytes,
        data_format=own.format or data.format,
    )


def find_files(
    data: DataConfig, path_key: str = "data.path", left_out: LeftOut | None = None
) -> list[TextFile]:
    """The files of all sources, sorted by name within each source.

    ``left_out`` collects what is not read. Raises ``ConfigError`` for a source without files, and
    for a format whose reader is not installed.
    """
    return _found(data, sources_of(data, path_key), left_out or LeftOut())


def all_files(data: DataConfig, left_out: LeftOut | None = None) -> list[TextFile]:
    """The files of ``data.validation_path``, if it is given, and then those of ``find_files``."""
    if data.validation_path is None:
        return find_files(data, left_out=left_out)
    reading = _reading(data, "data.validation_path")
    validation = Source("", data.validation_path, data.pattern, 1.0, reading, validation=True)
    return _found(data, [validation, *sources_of(data)], left_out or LeftOut())


def _found(data: DataConfig, sources: list[Source], left_out: LeftOut) -> list[TextFile]:
    cache = Path(os.path.expanduser(data.cache_dir))  # without a home directory it is no error yet
    files = [file for source in sources for file in _files_of(source, cache, left_out)]
    require_readers([file.path for file in files])
    return files


def _files_of(source: Source, cache: Path, left_out: LeftOut) -> list[TextFile]:
    key = source.reading.path_key
    if source.path is None:
        root = Path(sysconfig.get_paths()["stdlib"])
        paths = (p for p in root.rglob("*.py") if _in_stdlib_corpus(p.relative_to(root)))
        found = [(path.relative_to(root).as_posix(), path) for path in paths]
    else:
        root = expand(key, source.path).absolute()
        if root.resolve() == cache.resolve():
            raise ConfigError(
                f"data.cache_dir={cache} is {key} too, and no text is read there; choose another "
                f"data.cache_dir"
            )
        found = [(root.name, root)] if root.is_file() else _matching(root, source, cache, left_out)
    names, files = {name for name, _ in found}, []
    for name, path in sorted(found):
        content, token_file = format_of(name).content, partner(path, ".bin")
        if content == CSV:
            left_out.add(key, "CSV is not text; convert it to .parquet or .jsonl", name)
        elif content != INDEX or not token_file.exists():
            files.append(TextFile(source, path, name))
        elif name.removesuffix(path.suffix) + token_file.suffix not in names:
            left_out.add(key, "the .idx of a .bin, which data.pattern excludes; include it", name)
    if not files:
        no_file = "no file of text" if found else "no file"
        problem = f"{key}={source.path} contains {no_file} that matches {source.pattern}"
        raise ConfigError("; ".join([problem, *left_out.lines()]))
    return files


def _matching(root: Path, source: Source, cache: Path, left_out: LeftOut) -> list[tuple[str, Path]]:
    key = source.reading.path_key
    try:
        return list(matching_files(root, source.pattern, partial(left_out.add, key), cache))
    except ValueError as error:
        raise ConfigError(
            f"{source.reading.section}.pattern={source.pattern}: {error}; it is relative to "
            f"{key}, for example **/*.txt"
        ) from None


def _in_stdlib_corpus(path: Path) -> bool:
    folders = path.parts[:-1]
    return (
        not STDLIB_EXCLUDED_FOLDERS.intersection(folders)
        and not any(folder.startswith("config-") for folder in folders)
        and not path.name.startswith(STDLIB_EXCLUDED_FILES)
    )


def fingerprint(files: list[TextFile]) -> str:
    """A hash of the names, sizes and modification times of the files, and of how they are read."""
    digest = hashlib.sha256()
    for file in files:
        reading, form = file.source.reading, format_of(file.name)
        settings = f"{file.source.name}\0{reading.text_field}\0{file.name}"
        settings += "\0validation" * file.source.validation
        if reading.data_format != PLAIN:  # earlier versions had no other
            settings += f"\0{reading.data_format}"
        if file.name.endswith((".txt.gz", ".jsonl", ".jsonl.gz", ".parquet")) or form == (TEXT, ""):
            # All versions read these names alike, so their caches stay valid.
            own: list[object] = []
        else:
            own = [*form]
        if form.content == TEXT:
            own += [part for part in (reading.split_on, reading.split_bytes) if part is not None]
        if own:
            settings += f"\0{own}"
        index = partner(file.path, ".idx")
        both = form.content == MEGATRON and index.exists()
        for path in (file.path, index) if both else (file.path,):
            stat = path.stat()
            digest.update(f"{settings}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode(*ANY_NAME))
    return digest.hexdigest()


def read_documents(
    file: TextFile,
    at: Callable[[int], None] = lambda n_bytes: None,
    decoder: IdDecoder | None = None,
) -> Iterator[Document]:
    """The documents of one file. Raises what ``train.text.formats.read_texts`` raises.

    ``decoder`` reads token ids.
    """
    for text in read_texts(file.path, file.source.reading._replace(decoder=decoder), at):
        yield Document(file, *text)


def read_files(
    files: list[TextFile],
    left_out: LeftOut,
    at: Callable[[int], None] = lambda n_bytes: None,
    decoder: IdDecoder | None = None,
) -> Iterator[tuple[Document, int]]:
    """The documents of all ``files``, each with the index of its file.

    ``at`` is called with the number of bytes read so far of all files. ``left_out`` collects the
    files that hold no text. Otherwise as ``read_documents``.
    """
    done = 0

    def show(n_bytes: int) -> None:
        at(done + n_bytes)

    for index, file in enumerate(files):
        try:
            for document in read_documents(file, show, decoder):
                yield document, index
        except NotReadError as error:
            left_out.add(file.source.reading.path_key, str(error), file.name)
        done += file.path.stat().st_size


def text_hash(text: str, salt: int) -> int:
    """A number in [0, ``HASHES``), the same on every machine: 63 bits of SHA-256."""
    digest = hashlib.sha256(f"{salt}\0{text}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % HASHES


def is_held_out(hashed: int, share: float) -> bool:
    """Whether the document with this hash belongs to the held-out ``share`` (0 to 1).

    A larger share holds out the same documents, and further ones of larger hashes.
    """
    return hashed < share * HASHES
