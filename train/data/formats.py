"""Readers of text files, by suffix, in bounded memory.

``.jsonl`` and ``.jsonl.gz`` hold a text per line, ``.parquet`` a text per row, ``.txt.gz`` and all
other files one text. Empty and null texts are skipped.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from train.config import TEXT, ConfigError
from train.data.chat import FIELDS, OPTIONAL, other_formats, record_text
from train.extras import installed, remedy

WHOLE_FILE = 0  # the row number of a text that is a whole file
ROWS_AT_A_TIME = 1024
LINES_PER_REPORT = 256
PARQUET = {  # streams the file; the defaults hold a whole column of a row group in memory
    "buffer_size": 2**20,
    "pre_buffer": False,
    "page_checksum_verification": True,
}


class Keys(NamedTuple):
    """The config keys that appear in errors: for the file's path, its text field and its format."""

    path: str
    text_field: str
    format: str = "data.format"


class Text(NamedTuple):
    """A text, its line or row (from 1, or ``WHOLE_FILE``), and its length in UTF-8 bytes."""

    row: int
    text: str
    n_bytes: int


def read_texts(
    path: Path,
    text_field: str,
    keys: Keys,
    at: Callable[[int], None] = lambda n_bytes: None,
    data_format: str = TEXT,
) -> Iterator[Text]:
    """Yield the texts of a file with a line or a few rows in memory at a time.

    With a ``data_format`` of records the text is that of ``record_text``. Calls ``at`` with the
    number of bytes read so far. Raises ``UnicodeDecodeError`` if a whole file is not UTF-8. Any
    other content that cannot be used raises ``ConfigError``, which names the line or the row, and
    the config ``keys``.
    """
    if path.name.endswith((".jsonl", ".jsonl.gz")):
        texts = _lines(path, text_field, keys, at, data_format)
    elif path.suffix == ".parquet":
        texts = _rows(path, text_field, keys, at, data_format)
    elif data_format == TEXT:
        texts = _whole(path, keys)
    else:
        raise ConfigError(
            f"{keys.format}={data_format} reads .jsonl, .jsonl.gz and .parquet, and not {path}; "
            f"choose the files with data.pattern, for example data.pattern='**/*.jsonl'"
        )
    for row, text in texts:
        if text:
            position = f"{path}:{row}" if row else str(path)
            try:
                yield Text(row, text, len(text.encode()))
            except UnicodeEncodeError as error:  # half of a surrogate pair, escaped in JSON
                raise ConfigError(f"{keys.path}: {position} is not valid text: {error}") from None
    at(path.stat().st_size)


def require_readers(paths: list[Path]) -> None:
    """Raise ``ConfigError`` if a file needs a package that is not installed."""
    parquet = next((path for path in paths if path.suffix == ".parquet"), None)
    if parquet is not None and not installed("pyarrow"):
        raise ConfigError(f"{parquet} needs pyarrow: {remedy('parquet')}")


@contextlib.contextmanager
def _readable(position: Callable[[], str], keys: Keys) -> Iterator[None]:
    """Convert read errors (disk, truncated or damaged file) to ``ConfigError`` at ``position``."""
    try:
        yield
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{keys.path}: {position()} cannot be read: {error}") from None


def _whole(path: Path, keys: Keys) -> Iterator[tuple[int, str]]:
    with _readable(lambda: str(path), keys):
        content = path.read_bytes()
        if path.name.endswith(".txt.gz"):
            content = gzip.decompress(content)
    yield WHOLE_FILE, content.decode("utf-8")


def _lines(
    path: Path, text_field: str, keys: Keys, at: Callable[[int], None], data_format: str
) -> Iterator[tuple[int, str]]:
    row = 0
    with _readable(lambda: f"{path}:{row + 1}", keys), path.open("rb") as raw:
        lines = gzip.GzipFile(fileobj=raw) if path.suffix == ".gz" else raw
        for row, line in enumerate(lines, start=1):
            if row % LINES_PER_REPORT == 0:
                at(raw.tell())
            if line.strip():
                yield row, _json_text(line, text_field, keys, f"{path}:{row}", data_format)


def _json_text(line: bytes, text_field: str, keys: Keys, position: str, data_format: str) -> str:
    try:
        record: Any = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{keys.path}: {position} is not UTF-8: {error}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{keys.path}: {position} is not JSON: {error}") from None
    if data_format != TEXT:
        return record_text(record, data_format, keys.format, position)
    if not isinstance(record, dict) or not isinstance(record.get(text_field, 0), str | None):
        found = ", ".join(record) if isinstance(record, dict) else type(record).__name__
        raise ConfigError(
            f"{keys.text_field}={text_field}: {position} has no such string field; it has: {found}"
            f"{other_formats(keys.format, record)}"
        )
    return record[text_field] or ""


def _rows(
    path: Path, text_field: str, keys: Keys, at: Callable[[int], None], data_format: str
) -> Iterator[tuple[int, str]]:
    """The rows of some columns, row group by row group, a few rows in memory at a time."""
    import pyarrow
    from pyarrow import parquet

    row, group, size = 0, 0, path.stat().st_size

    def position() -> str:
        return f"{path}:{row + 1} (row group {group})"

    try:
        with _readable(position, keys), parquet.ParquetFile(path, **PARQUET) as file:
            columns = [text_field]
            if data_format == TEXT:
                _require_string_column(file.schema_arrow, text_field, keys, path)
            else:
                names = {*file.schema_arrow.names}
                columns = [n for n in (*FIELDS[data_format], *OPTIONAL) if n in names]
                if not {*FIELDS[data_format]} <= names:  # its error names all of them
                    record_text(dict.fromkeys(names), data_format, keys.format, str(path))
            for group in range(file.num_row_groups):
                for batch in file.iter_batches(ROWS_AT_A_TIME, [group], columns=columns):
                    for value in batch.to_struct_array():
                        record, where = value.as_py(), position()
                        row += 1
                        if data_format == TEXT:
                            yield row, record[text_field] or ""
                        else:
                            yield row, record_text(record, data_format, keys.format, where)
                    at(size * row // max(1, file.metadata.num_rows))
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise ConfigError(f"{keys.path}: {position()} cannot be read: {error}") from None


def _require_string_column(schema: Any, text_field: str, keys: Keys, path: Path) -> None:
    from pyarrow import types

    index = schema.get_field_index(text_field)
    dtype = schema.field(index).type if index >= 0 else None
    if dtype is not None and types.is_dictionary(dtype):
        dtype = dtype.value_type
    if dtype is None or not (types.is_string(dtype) or types.is_large_string(dtype)):
        found = ", ".join(f"{field.name} ({field.type})" for field in schema)
        raise ConfigError(
            f"{keys.text_field}={text_field}: {path} has no such string column; it has: {found}"
            f"{other_formats(keys.format, schema.names)}"
        )
