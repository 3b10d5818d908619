"""Text files: one text each, or the parts of a long one."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from train.config import ConfigError
from train.text.files import not_text
from train.text.reading import BLOCK, HEAD, WHOLE_FILE, At, Reading, Rows


def text_parts(path: Path, reading: Reading, at: At) -> Rows:
    """One text, or the parts between separators, of at most so many bytes."""
    row, whole = 0, reading.split_on is None and reading.split_bytes is None
    with reading.opened(path, lambda: str(path)) as (raw, stream):
        first = stream.read(BLOCK)
        if b"\0" in first[:HEAD]:
            raise not_text(path.name, first[:HEAD])

        def blocks() -> Iterator[bytes]:
            yield first.removeprefix(codecs.BOM_UTF8)
            while block := stream.read(BLOCK):
                at(raw.tell())
                yield block

        for row, part in enumerate([b"".join(blocks())] if whole else _parts(blocks(), reading)):
            try:
                text = part.decode("utf-8")
                if "\0" in text:  # also after HEAD
                    raise ValueError("it has a NUL byte")
            except ValueError as error:
                if row == 0:
                    raise not_text(path.name, first[:HEAD]) from None
                raise ConfigError(
                    f"{reading.path_key}: {path}:{row + 1} is not UTF-8: {error}; {reading.repair}"
                ) from None
            if whole or text.strip():
                yield (WHOLE_FILE if whole else row + 1), text


def _parts(blocks: Iterable[bytes], reading: Reading) -> Iterator[bytes]:
    """The parts of a text, cut at ``split_on``, and then to ``split_bytes``."""
    if reading.split_on is None:
        return _cut(blocks, reading.split_bytes)
    # On the command line \n is two characters. A line may also end with \r\n.
    separator = reading.split_on.replace("\\n", "\n").replace("\\t", "\t").encode()
    pattern = re.compile(re.escape(separator).replace(b"\\\n", b"\r?\n"))
    parts = _separated(blocks, pattern)
    if reading.split_bytes is None:
        return parts
    return (cut for part in parts for cut in _cut([part], reading.split_bytes))


def _separated(blocks: Iterable[bytes], separator: re.Pattern[bytes]) -> Iterator[bytes]:
    rest = b""
    for block in blocks:
        *parts, rest = separator.split(rest + block)
        yield from parts
    yield rest


def _cut(blocks: Iterable[bytes], most: int) -> Iterator[bytes]:
    """Parts of at most ``most`` bytes: to the last line end in their second half, or else the last
    space there, or else the last whole character."""
    rest = b""
    for block in blocks:
        rest, start = rest + block, 0
        while len(rest) - start > most:
            half, end = start + most // 2, start + most
            cut = rest.rfind(b"\n", half, end) + 1 or rest.rfind(b" ", half, end) + 1
            if not cut:
                cut = end
                while rest[cut] & 0xC0 == 0x80 and cut > end - 3:  # inside of a character
                    cut -= 1
            yield rest[start:cut]
            start = cut
        rest = rest[start:]
    yield rest
