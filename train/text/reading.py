"""How the files of a source are read: their formats, compressions and read errors."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path, PurePath
from typing import Any, BinaryIO, NamedTuple

from train.config import SOURCES, ConfigError
from train.sections.data import PLAIN
from train.text.token_ids import IdDecoder, Ids

WHOLE_FILE = 0  # the row number of a text that is a whole file
BLOCK = 2**24  # bytes or characters of a file that are read at a time
HEAD = 8192  # the first bytes of a file, which show what it is
PER_REPORT = 256  # lines or records between two reports of the progress
LINES, JSON, PARQUET, NUMPY, MEGATRON = "lines", "json", "parquet", "npy", "bin"
TEXT, CSV, INDEX = "text", "csv", "idx"
CONTENTS = {".json": JSON, ".parquet": PARQUET, ".npy": NUMPY, ".bin": MEGATRON, ".idx": INDEX}
CONTENTS |= {".jsonl": LINES, ".ndjson": LINES, ".jsonlines": LINES, ".csv": CSV, ".tsv": CSV}

At = Callable[[int], None]
Content = str | Ids  # of a document
Rows = Iterator[tuple[int, Content]]


def _zstd(raw: BinaryIO) -> Any:
    import pyarrow

    return io.BufferedReader(pyarrow.input_stream(raw, compression="zstd"))


DECOMPRESSED: dict[str, Callable[[BinaryIO], Any]] = {
    "": lambda raw: raw,
    ".gz": lambda raw: gzip.GzipFile(fileobj=raw),
    ".bz2": bz2.BZ2File,
    ".xz": lzma.LZMAFile,
    ".zst": _zstd,
}


class Format(NamedTuple):
    """What a file holds, a value of ``CONTENTS`` or ``TEXT``, and a key of ``DECOMPRESSED``."""

    content: str
    compression: str


def format_of(name: str) -> Format:
    """The format of a file by its name, in any case."""
    path = PurePath(name.lower())
    compression = path.suffix if path.suffix in DECOMPRESSED else ""
    suffix = PurePath(path.stem).suffix if compression else path.suffix
    return Format(CONTENTS.get(suffix, TEXT), compression)


class Reading(NamedTuple):
    """How the files of a source are read. Errors name the config keys: ``path_key`` of the path,
    and those of ``section``. ``decoder`` reads token ids; it is None if there is no tokenizer. A
    record has a text, or with another ``data_format`` a conversation (``train.text.chat``).
    """

    text_field: str = "text"
    path_key: str = "data.path"
    split_on: str | None = None
    split_bytes: int | None = None
    decoder: IdDecoder | None = None
    data_format: str = PLAIN

    @property
    def section(self) -> str:
        """The config section of the source, or ``data``."""
        return self.path_key.rpartition(".")[0] if self.path_key.startswith(SOURCES) else "data"

    @property
    def repair(self) -> str:
        """The remedy for a damaged file, at the end of an error."""
        return f"repair the file, or exclude it with {self.section}.pattern"

    def required_decoder(self, position: str) -> IdDecoder:
        """``decoder``; ``ConfigError`` if it is None."""
        if self.decoder is None:
            raise ConfigError(
                f"{self.path_key}: {position} has token ids, and data.tokenizer=null; give the "
                f"tokenizer.json that made them"
            )
        return self.decoder

    @contextlib.contextmanager
    def readable(self, position: Callable[[], str]) -> Iterator[None]:
        """Convert read errors (disk, truncated or damaged file) to ``ConfigError``."""
        try:
            yield
        except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
            raise ConfigError(
                f"{self.path_key}: {position()} cannot be read: {error}; {self.repair}"
            ) from None

    @contextlib.contextmanager
    def opened(self, path: Path, position: Callable[[], str]) -> Iterator[tuple[BinaryIO, Any]]:
        """A file and its decompressed content, with read errors as in ``readable``."""
        with self.readable(position), path.open("rb") as raw:
            yield raw, DECOMPRESSED[format_of(path.name).compression](raw)
