"""Token ids that another program wrote: Megatron's ``.bin`` with its ``.idx``, and ``.npy``."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from train.text.files import NotReadError

Ids = NDArray[np.integer[Any]]

# The header of an .idx: version, code of the ids' dtype, number of sequences, and of entries in the
# document index. The lengths of the sequences (int32), their first bytes in the .bin (int64) and
# the document index (int64) follow.
MAGIC, HEADER = b"MMIDIDX\0\0", struct.Struct("<QBQQ")
DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # 6 and 7 are floats
BLOCK = 2**22  # ids that a search for the ends of documents reads at a time


class DamagedIdsError(ValueError):
    """A file of token ids contradicts itself, its ``.idx`` or the tokenizer."""


class IdDecoder:
    """Documents of token ids, and their texts. The ids are those of ``tokenizer``, below ``size``.

    ``bos`` starts a document and ``eos``, unless it is None, ends one.
    """

    def __init__(self, tokenizer: Tokenizer, size: int, bos: int, eos: int | None) -> None:
        self.tokenizer, self.size, self.bos, self.eos = tokenizer, size, bos, eos

    def split(self, blocks: Iterable[Ids]) -> Iterator[Ids]:
        """The documents in consecutive ``blocks``: each ends after an EOS or before a BOS."""
        rest: list[Ids] = []
        for block in blocks:
            ends = [] if self.eos is None else np.flatnonzero(block == self.eos) + 1
            starts = [] if self.bos == self.eos else np.flatnonzero(block == self.bos)
            begin = 0
            for cut in sorted({*map(int, ends), *map(int, starts)}):
                yield np.concatenate([*rest, block[begin:cut]])
                rest, begin = [], cut
            rest.append(block[begin:])
        if rest:
            yield np.concatenate(rest)

    def inner(self, ids: Ids) -> Ids:
        """``ids`` of a document without the BOS and the EOS that it may have.

        Raises ``DamagedIdsError`` for an id that the tokenizer does not have.
        """
        for id in (ids.min(), ids.max()) if len(ids) else ():
            if not 0 <= id < self.size:
                raise DamagedIdsError(
                    f"has token id {id}, but data.tokenizer has ids 0 to {self.size - 1}; give the "
                    f"tokenizer.json that made the ids"
                )
        start = int(len(ids) > 0 and ids[0] == self.bos)
        stop = len(ids) - int(len(ids) > start and ids[-1] == self.eos)
        return ids[start:stop]

    def text(self, ids: Ids) -> str:
        """The text of ``ids``, with the names of special tokens."""
        return str(self.tokenizer.decode(ids.tolist(), skip_special_tokens=False))


def numpy_ids(path: Path) -> Iterator[Ids]:
    """The ids in a ``.npy``, in blocks that raise ``DamagedIdsError`` where the file is truncated.

    Raises ``NotReadError`` if it holds anything but integers in one dimension.
    """
    header = np.lib.format
    with path.open("rb") as file:
        try:
            v1 = header.read_magic(file) == (1, 0)
            read = header.read_array_header_1_0 if v1 else header.read_array_header_2_0
            shape, _, dtype = read(file)
        except ValueError:
            raise NotReadError("a .npy that numpy cannot read") from None
        start = file.tell()
    if dtype.kind not in "iu" or len(shape) != 1:
        raise NotReadError(
            "a .npy without token ids: they are one dimension of integers, where each document "
            "ends with EOS; reshape or convert it"
        )
    return _blocks(path, dtype, start, shape[0])


def _blocks(path: Path, dtype: np.dtype[Any], start: int, n_ids: int) -> Iterator[Ids]:
    with path.open("rb") as file:
        file.seek(start)
        for begin in range(0, n_ids, BLOCK):
            wanted = min(BLOCK, n_ids - begin)
            block = np.fromfile(file, dtype, wanted)
            if len(block) < wanted:
                raise DamagedIdsError(f"is truncated: it has {begin + len(block)} of {n_ids} ids")
            yield block


def partner(path: Path, suffix: str) -> Path:
    """The file of the same name with ``suffix``, in the case of the suffix of ``path``."""
    return path.with_suffix(suffix.upper() if path.suffix.isupper() else suffix)


def megatron_documents(path: Path) -> Iterator[Ids]:
    """The documents of a ``.bin``: each is one or more sequences of its ``.idx``.

    Raises ``NotReadError`` without an ``.idx`` of Megatron, ``DamagedIdsError`` if the two differ.
    """
    index = partner(path, ".idx")
    try:
        content = np.asarray(np.memmap(index, np.uint8, "r"))  # indexing an np.memmap is slow
    except (FileNotFoundError, ValueError):  # missing, or empty
        content = np.empty(0, np.uint8)
    if not content[: len(MAGIC)].tobytes() == MAGIC:
        raise NotReadError(
            "a .bin without its .idx of Megatron; write the ids to a .npy or .parquet"
        )
    start = len(MAGIC) + HEADER.size
    if len(content) < start:
        raise DamagedIdsError(f"cannot be read: {index.name} has {len(content)} bytes only")
    version, code, sequences, entries = HEADER.unpack(content[len(MAGIC) : start].tobytes())
    if version != 1 or code not in DTYPES:
        raise DamagedIdsError(
            f"cannot be read: {index.name} has version {version} and dtype code {code}; known are "
            f"version 1 and {', '.join(map(str, DTYPES))}"
        )
    expected = start + 12 * sequences + 8 * entries
    if len(content) != expected:
        raise DamagedIdsError(
            f"cannot be read: {index.name} has {len(content)} bytes, not the {expected} of "
            f"{sequences} sequences and {entries} entries of the document index"
        )
    columns = np.split(content[start:], [4 * sequences, 12 * sequences])
    lengths, pointers, ends = (
        c.view(t) for c, t in zip(columns, ("<i4", "<i8", "<i8"), strict=True)
    )
    if not entries or ends[0] != 0 or ends[-1] != sequences or (np.diff(ends) < 0).any():
        raise DamagedIdsError(
            f"cannot be read: the document index of {index.name} does not go from 0 to "
            f"{sequences}, its number of sequences"
        )
    dtype = np.dtype(DTYPES[code])
    with path.open("rb") as file:
        for first, stop in pairwise(map(int, ends)):
            parts = [np.empty(0, dtype)]
            for sequence in range(first, stop):
                pointer, length = int(pointers[sequence]), int(lengths[sequence])
                file.seek(max(pointer, 0))
                part = file.read(max(length, 0) * dtype.itemsize)
                if pointer < 0 or len(part) != length * dtype.itemsize:
                    raise DamagedIdsError(
                        f"has no {length} ids at byte {pointer}, where {index.name} has sequence "
                        f"{sequence}"
                    )
                parts.append(np.frombuffer(part, dtype))
            yield np.concatenate(parts)
