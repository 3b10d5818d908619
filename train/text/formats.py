"""From a file to its texts, by the suffix of its name in any case, in bounded memory.

* ``.jsonl``, ``.ndjson``, ``.jsonlines``: a document per line;
* ``.json``: a document per record, one after another or in one array;
* ``.parquet``: a document per row;
* ``.npy``, and ``.bin`` with ``.idx``: documents of token ids;
* all others: one text, or its parts with ``split_on`` or ``split_bytes``.

A record or row holds a text, a list of token ids, or a conversation (``train.text.chat``). Text may
be compressed: ``.gz``, ``.bz2``, ``.xz`` or ``.zst`` follows its suffix. A BOM of UTF-8 is skipped,
and so are empty and null texts.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from train.config import ConfigError
from train.extras import installed, remedy
from train.sections.data import PLAIN
from train.text.files import NotReadError
from train.text.json_records import json_lines, json_records
from train.text.parquet import parquet_rows
from train.text.plain import text_parts
from train.text.reading import (
    JSON,
    LINES,
    MEGATRON,
    NUMPY,
    PARQUET,
    PER_REPORT,
    At,
    Reading,
    Rows,
    format_of,
)
from train.text.token_ids import DamagedIdsError, Ids, megatron_documents, numpy_ids


class Text(NamedTuple):
    """A text, its line, record or row (from 1, or ``WHOLE_FILE``), and its length in UTF-8 bytes.

    ``ids`` are its tokens without BOS and EOS if the file has token ids.
    """

    row: int
    text: str
    n_bytes: int
    ids: Ids | None = None


def read_texts(path: Path, reading: Reading, at: At = lambda n_bytes: None) -> Iterator[Text]:
    """Yield the texts of a file with a line or a few rows in memory at a time.

    Calls ``at`` with the number of bytes read so far. Raises ``NotReadError``, before any text, for
    a file that is not one of texts. Any other content that cannot be used raises ``ConfigError``,
    which names the line or the row, and the config keys.
    """
    content, compression = format_of(path.name)
    if compression and content in (PARQUET, NUMPY, MEGATRON):
        raise NotReadError(f"a compressed .{content}; unpack it")
    if reading.data_format != PLAIN and content not in RECORDS:
        wanted = f"{reading.section}.format={reading.data_format}"
        raise NotReadError(f"no records, which {wanted} reads; exclude the file with data.pattern")
    try:
        for row, found in READERS.get(content, text_parts)(path, reading, at):
            text = _text(row, found, reading, f"{path}:{row}" if row else str(path))
            if text.n_bytes:
                yield text
    except DamagedIdsError as error:
        raise ConfigError(f"{reading.path_key}: {path} {error}") from None
    at(path.stat().st_size)


def _text(row: int, found: str | Ids, reading: Reading, position: str) -> Text:
    try:
        if isinstance(found, str):
            return Text(row, found, len(found.encode()))
        decoder = reading.required_decoder(position)
        ids = decoder.inner(found)
    except UnicodeEncodeError as error:  # half of a surrogate pair, escaped in JSON
        raise ConfigError(
            f"{reading.path_key}: {position} is not valid text: {error}; {reading.repair}"
        ) from None
    except DamagedIdsError as error:
        raise ConfigError(f"{reading.path_key}: {position} {error}") from None
    text = decoder.text(ids)
    return Text(row, text, max(len(text.encode()), min(len(ids), 1)), ids)


def _token_ids(path: Path, reading: Reading, at: At) -> Rows:
    n_bytes = 0
    with reading.readable(lambda: str(path)):
        if format_of(path.name).content == MEGATRON:
            documents = megatron_documents(path)
        else:
            blocks = numpy_ids(path)
            documents = reading.required_decoder(str(path)).split(blocks)
        for row, ids in enumerate(documents, start=1):
            n_bytes += ids.nbytes
            if row % PER_REPORT == 0:
                at(n_bytes)
            yield row, ids


RECORDS = {LINES: json_lines, JSON: json_records, PARQUET: parquet_rows}
READERS = RECORDS | dict.fromkeys((NUMPY, MEGATRON), _token_ids)


def require_readers(paths: list[Path]) -> None:
    """Raise ``ConfigError`` if a file needs a package that is not installed."""
    for path in () if installed("pyarrow") else paths:
        content, compression = format_of(path.name)
        if content == PARQUET or compression == ".zst":
            raise ConfigError(f"{path} needs pyarrow: {remedy('parquet')}")
