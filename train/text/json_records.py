"""JSON: a record per line, or records one after another or in an array."""

from __future__ import annotations

import codecs
import io
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from train.config import ConfigError
from train.sections.data import PLAIN
from train.text.chat import other_formats, record_text
from train.text.files import NotReadError, not_text
from train.text.reading import BLOCK, HEAD, PER_REPORT, At, Content, Reading, Rows


def json_lines(path: Path, reading: Reading, at: At) -> Rows:
    """The records of a file with one in each line; an empty line has none."""
    row = 0
    with reading.opened(path, lambda: f"{path}:{row + 1}") as (raw, lines):
        for row, line in enumerate(lines, start=1):
            if row % PER_REPORT == 0:
                at(raw.tell())
            yield row, _content_of_line(line, row, reading, f"{path}:{row}")


def _content_of_line(line: bytes, row: int, reading: Reading, position: str) -> Content:
    try:
        decoded = line.removeprefix(codecs.BOM_UTF8 if row == 1 else b"").decode("utf-8")
        if not decoded.strip():
            return ""
        record: Any = json.loads(decoded)
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{reading.path_key}: {position} is not UTF-8: {error}; convert it, for example with "
            f"iconv"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{reading.path_key}: {position} is not JSON: {error}; {reading.repair}"
        ) from None
    return _content(record, reading, position)


def _content(record: Any, reading: Reading, position: str) -> Content:
    """The text, the token ids or the conversation of a record."""
    if reading.data_format != PLAIN:
        return record_text(record, reading.data_format, f"{reading.section}.format", position)
    value = record.get(reading.text_field, 0) if isinstance(record, dict) else 0
    if isinstance(value, str | None):
        return value or ""
    if isinstance(value, list) and all(type(number) is int for number in value):
        return np.array(value)
    found = type(record).__name__
    if isinstance(record, dict):
        found = ", ".join(f"{name} ({type(entry).__name__})" for name, entry in record.items())
    raise ConfigError(
        f"{reading.section}.text_field={reading.text_field}: {position} has no such field with a "
        f"string or token ids; it has: {found}{other_formats(f'{reading.section}.format', record)}"
    )


def json_records(path: Path, reading: Reading, at: At) -> Rows:
    """The records of a ``.json``. It is left out if the first of them holds no document."""
    row = 0
    with reading.opened(path, lambda: f"{path}:{row + 1}") as (raw, stream):
        head = stream.peek(HEAD)
        try:
            for record in _records(io.TextIOWrapper(stream, "utf-8-sig").read):
                content = _content(record, reading, f"{path}:{row + 1}")
                row += 1
                if row % PER_REPORT == 0:
                    at(raw.tell())
                yield row, content
        except (ValueError, RecursionError) as error:
            if row == 0 and isinstance(error, UnicodeDecodeError):
                raise not_text(path.name, head) from None
            if row == 0 and not isinstance(error, ConfigError):
                raise NotReadError(
                    "a .json whose beginning is not JSON; repair it, or exclude it with "
                    "data.pattern"
                ) from None
            if row == 0:
                wanted = f"text in {reading.section}.text_field={reading.text_field}"
                if reading.data_format != PLAIN:
                    wanted = f"fields of {reading.section}.format={reading.data_format}"
                raise NotReadError(
                    f"a .json whose first record has no {wanted}; give its field, or exclude the "
                    f"file with data.pattern"
                ) from None
            if isinstance(error, ConfigError):
                raise
            position = f"{reading.path_key}: {path}:{row + 1}"
            raise ConfigError(
                f"{position} is not a record of JSON: {error}; {reading.repair}"
            ) from None


def _records(read: Callable[[int], str]) -> Iterator[Any]:
    """The JSON values of a file, one after another or in one array; ``ValueError`` for others.

    The text in memory has ``BLOCK`` characters, or twice those of the longest value.
    """
    decode, separator = json.JSONDecoder().raw_decode, re.compile(r"\s*")
    text, begin, begun, end_of_array = "", 0, False, ""
    while True:
        begin = separator.match(text, begin).end()
        if begin == len(text):
            text, begin = read(BLOCK), 0
            if text:
                continue
            if end_of_array:
                raise ValueError("the array has no end")
            return
        if not begun and text[begin] == "[":
            separator, end_of_array, begin = re.compile(r"[\s,]*"), "]", begin + 1
        elif text[begin] == end_of_array:
            if (text[begin + 1 :] + read(BLOCK)).strip():
                raise ValueError("text follows the array")
            return
        else:
            try:
                value, begin = decode(text, begin)
            except json.JSONDecodeError as error:
                # A value that goes on after the text fails at its end, or in a string of it.
                cut = error.pos > len(text.rstrip()) - 10 or error.msg.startswith("Unterminated")
                if not (cut and (more := read(max(BLOCK, len(text) - begin)))):
                    raise
                text, begin = text[begin:] + more, 0
            else:
                yield value
        begun = True
