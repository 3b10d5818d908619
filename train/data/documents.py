"""Tokenised documents on disk: token files, and an index of the documents in them.

    <split>/index.npz  00000.bin  00001.bin ...  [00000.loss.bin ...]

A ``.loss.bin`` has a bit per token, set if the token has loss, the highest bit first. Without these
files every token but the first of a document has.

Tokens are read with ``pread``, not through mmap. If a file shrinks or a disk fails during training,
``pread`` raises an exception that names the document; mmap would end the process by SIGBUS. The
index is mapped: all processes of a host share its pages, and the system can drop them.
"""

from __future__ import annotations

import os
import struct
import zipfile
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from train.data.corpus import document_name
from train.data.manifest import DamagedError

SHARD_TOKENS = 2**27
OPEN_FILES = 256
AT_ONCE = 2**16  # documents of which numpy holds copies
IGNORED = -100  # label of a token whose next token has no loss
DTYPES = ("uint16", "uint32")
LOSS = np.dtype(np.uint8)  # eight tokens
COLUMNS = ("shard", "start", "lengths", "n_bytes", "origin", "row", "hash")


class DocumentError(RuntimeError):
    """A document cannot be tokenised or read; the message names it."""

    def __init__(self, document: str, problem: str) -> None:
        super().__init__(f"document {document}: {problem}")


class TokenFile:
    """The tokens in a file. Any thread may read slices."""

    def __init__(self, path: Path, dtype: np.dtype[Any], tokens: int) -> None:
        self.path, self.dtype, self.tokens = path, dtype, tokens

    def __len__(self) -> int:
        return self.tokens

    def __getitem__(self, key: slice) -> NDArray[Any]:
        """Tokens ``[key.start, key.stop)``; ``OSError`` or ``DamagedError`` if unreadable."""
        tokens = np.empty(key.stop - key.start, self.dtype)
        unread, position = memoryview(tokens).cast("B"), key.start * self.dtype.itemsize
        file = _opened(self.path)
        while unread:
            n = os.preadv(file.fileno(), [unread], position)
            if n == 0:
                raise DamagedError(self.path, f"ends at byte {position}, inside the document")
            unread, position = unread[n:], position + n
        return tokens


@lru_cache(maxsize=OPEN_FILES)
def _opened(path: Path) -> FileIO:
    return FileIO(path)


@dataclass(frozen=True)
class Documents:
    """One split of a tokenised corpus. Every text starts with BOS, and with ``has_eos`` ends with
    EOS; a conversation has the tokens of its chat template.

    The columns are (n,) integers each:

    * ``shard`` and ``start`` locate a document's tokens; ``lengths`` counts all of them;
    * ``n_bytes`` is the length in UTF-8 of its text, or of the part with loss;
    * ``origin`` (index into ``files``) and ``row`` locate its text;
    * ``hash`` is its ``text_hash``, by which documents are chosen.

    ``digest`` identifies the documents on any host; without it they are in this process alone.

    ``loss`` holds the bits of the tokens in ``shards``. ``sources`` maps names to weights. Source k
    has documents ``bounds[k]`` to ``bounds[k + 1] - 1``.
    """

    shards: Sequence[TokenFile | NDArray[Any]]
    shard: NDArray[np.integer[Any]]
    start: NDArray[np.integer[Any]]
    lengths: NDArray[np.integer[Any]]
    n_bytes: NDArray[np.integer[Any]]
    origin: NDArray[np.integer[Any]]
    row: NDArray[np.integer[Any]]
    hash: NDArray[np.integer[Any]]
    files: Sequence[str]
    sources: dict[str, float]
    bounds: tuple[int, ...]
    vocab_size: int
    has_eos: bool = False
    loss: Sequence[TokenFile | NDArray[np.uint8]] | None = None
    digest: str | None = None

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def text_lengths(self) -> NDArray[np.integer[Any]]:
        """The tokens of each document's text, (n,): without BOS and EOS."""
        return self.lengths - 1 - self.has_eos

    def text(self, document: int) -> NDArray[np.int64]:
        """The tokens of a document's text. Raises what ``tokens`` raises."""
        return self.tokens(document, 1, 1 + int(self.text_lengths[document]))

    def name(self, document: int) -> str:
        """The source and file of a document, plus the row if the file holds several documents."""
        return document_name(self.files[self.origin[document]], int(self.row[document]))

    def tokens(self, document: int, start: int, stop: int) -> NDArray[np.int64]:
        """Tokens ``[start, stop)`` of a document; ``stop`` may exceed its length.

        Raises ``DocumentError`` if they cannot be read or are not in the vocabulary.
        """
        base = int(self.start[document])
        stop = min(stop, int(self.lengths[document]))
        try:
            ids = self.shards[self.shard[document]][base + start : base + stop].astype(np.int64)
        except (OSError, DamagedError) as error:
            raise DocumentError(self.name(document), str(error)) from error
        if ids.size and ids.max() >= self.vocab_size:
            problem = f"token {ids.max()} is not in the vocabulary of {self.vocab_size}"
            raise DocumentError(self.name(document), problem)
        return ids

    def loss_mask(self, document: int) -> NDArray[np.bool_]:
        """Which tokens of a document have loss, (tokens,). Raises what ``tokens`` raises."""
        length = int(self.lengths[document])
        if self.loss is None:
            return np.arange(length) > 0
        start = int(self.start[document])
        try:
            packed = self.loss[self.shard[document]][start // 8 : -(-(start + length) // 8)]
        except (OSError, DamagedError) as error:
            raise DocumentError(self.name(document), str(error)) from error
        return np.unpackbits(packed)[start % 8 :][:length].astype(bool)

    def of_source(self, number: int) -> Documents:
        """The documents of source ``number``, renumbered from 0."""
        first, stop = self.bounds[number], self.bounds[number + 1]
        columns = {name: getattr(self, name)[first:stop] for name in COLUMNS}
        source, weight = list(self.sources.items())[number]
        digest = self.digest and f"{self.digest} {source}"
        only = {"sources": {source: weight}, "bounds": (0, stop - first), "digest": digest}
        return replace(self, **columns, **only)


class SplitWriter:
    """Writes the documents of one split: token files of about ``shard_tokens`` and the index.

    ``with_loss`` adds the files of which tokens have loss.
    """

    def __init__(
        self,
        folder: Path,
        dtype: np.dtype[Any],
        with_loss: bool = False,
        shard_tokens: int = SHARD_TOKENS,
    ) -> None:
        folder.mkdir()
        self.folder, self.dtype, self.shard_tokens = folder, dtype, shard_tokens
        self._columns = {name: array("q") for name in COLUMNS}
        self._shards = 0
        self._written = 0
        self._file = (folder / "00000.bin").open("wb")
        self._loss = (folder / "00000.loss.bin").open("wb") if with_loss else None
        self._bits = np.zeros(0, bool)  # fewer than a byte, not written yet

    def __len__(self) -> int:
        return len(self._columns["lengths"])

    def add(
        self,
        ids: list[int],
        n_bytes: int,
        origin: int,
        row: int,
        hashed: int,
        loss: NDArray[np.bool_] | None = None,
    ) -> None:
        """Append the document with tokens ``ids``. No document is split over two token files.

        ``origin`` is the number of its text file and must not decrease from call to call.
        ``hashed`` is the document's ``hash``, ``loss`` its ``loss_mask``.
        """
        if self._written >= self.shard_tokens:
            self._close()
            self._shards, self._written = self._shards + 1, 0
            self._file = (self.folder / f"{self._shards:05d}.bin").open("wb")
            if self._loss is not None:
                self._loss = (self.folder / f"{self._shards:05d}.loss.bin").open("wb")
        self._file.write(np.array(ids, self.dtype).tobytes())
        if self._loss is not None:
            bits = np.append(self._bits, np.arange(len(ids)) > 0 if loss is None else loss)
            whole = len(bits) // 8 * 8
            self._loss.write(np.packbits(bits[:whole]).tobytes())
            self._bits = bits[whole:]
        values = (self._shards, self._written, len(ids), n_bytes, origin, row, hashed)
        for name, value in zip(COLUMNS, values, strict=True):
            self._columns[name].append(value)
        self._written += len(ids)

    def close(self) -> None:
        """Complete the files. No document can be added afterwards."""
        self._close()
        columns = {name: np.array(values, np.int64) for name, values in self._columns.items()}
        np.savez(self.folder / "index.npz", **columns)

    def _close(self) -> None:
        self._file.close()
        if self._loss is not None:
            self._loss.write(np.packbits(self._bits).tobytes())
            self._loss.close()
            self._bits = self._bits[:0]


def open_split(
    folder: Path,
    sizes: Sequence[int],
    dtype_name: str,
    vocab_size: int,
    files: dict[str, list[str]],
    weights: dict[str, float],
    has_eos: bool = False,
    has_loss: bool = False,
    digest: str | None = None,
    check: bool = True,
) -> Documents:
    """Open a split; ``DamagedError`` if its index and, with ``check``, the token files disagree.

    ``sizes`` are the bytes of the token files ``00000.bin``, ``00001.bin``, ... ``files`` holds the
    file names of each source in the order of the index, ``weights`` the weight of each source.
    ``has_loss`` means that there are files of which tokens have loss.
    """
    if dtype_name not in DTYPES:
        raise DamagedError(folder, f"holds tokens of type {dtype_name}; known: {DTYPES}")
    dtype = np.dtype(dtype_name)
    shards = []
    for number, size in enumerate(sizes):
        path = folder / f"{number:05d}.bin"
        if size % dtype.itemsize:
            raise DamagedError(path, f"has {size} bytes, not a multiple of {dtype.itemsize}")
        shards.append(TokenFile(path, dtype, size // dtype.itemsize))
    loss = [TokenFile(f.path.with_suffix(".loss.bin"), LOSS, -(-len(f) // 8)) for f in shards]
    labelled = [(source, name) for source, names in files.items() for name in names]
    first_file = np.cumsum([0, *(len(names) for names in files.values())])
    columns = _map_index(folder / "index.npz")
    if check:
        _check_index(folder / "index.npz", columns, shards, n_files=len(labelled))
    return Documents(
        **columns,
        shards=shards,
        files=[f"{source}/{name}" if source else name for source, name in labelled],
        sources={source: weights[source] for source in files},
        bounds=tuple(bisect_left(columns["origin"], number) for number in first_file.tolist()),
        vocab_size=vocab_size,
        has_eos=has_eos,
        loss=loss if has_loss else None,
        digest=digest,
    )


def _map_index(path: Path) -> dict[str, NDArray[np.int64]]:
    """The columns of an index, mapped where ``np.savez`` has stored them without compression.

    Raises ``DamagedError`` for other content, ``OSError`` if the system refuses to read the file.
    """
    columns = {}
    try:
        with zipfile.ZipFile(path) as archive:
            for name in COLUMNS:
                with archive.open(f"{name}.npy") as member:
                    np.lib.format.read_magic(member)
                    shape, _, dtype = np.lib.format.read_array_header_1_0(member)
                    length = member.tell()
                info = archive.getinfo(f"{name}.npy")
                with path.open("rb") as file:
                    file.seek(info.header_offset + 26)
                    begin = info.header_offset + 30 + sum(struct.unpack("<HH", file.read(4)))
                if dtype != np.int64 or len(shape) != 1 or not shape[0]:
                    raise DamagedError(path, f"has {name} of {dtype} {shape}, not of int64 (n,)")
                mapped = np.memmap(path, dtype, "r", begin + length, shape)
                columns[name] = np.asarray(mapped)  # indexing an np.memmap is slow
    except FileNotFoundError as error:
        raise DamagedError(path, f"cannot be read: {error}") from None
    except (DamagedError, OSError):  # a failed read does not prove damage
        raise
    except Exception as error:  # numpy and zipfile raise many types for damaged bytes
        raise DamagedError(path, f"cannot be read: {error}") from None
    if len({column.shape for column in columns.values()}) != 1:
        shapes = ", ".join(f"{name} {column.shape}" for name, column in columns.items())
        raise DamagedError(path, f"has columns of different lengths: {shapes}")
    return columns


def _check_index(
    path: Path, columns: dict[str, NDArray[np.int64]], shards: list[TokenFile], n_files: int
) -> None:
    rooms, last = np.array([len(file) for file in shards]), 0
    for first in range(0, len(columns["lengths"]), AT_ONCE):
        shard, start, lengths, n_bytes, origin, row, hashed = (
            np.array(columns[name][first : first + AT_ONCE]) for name in COLUMNS
        )

        def require(holds: NDArray[np.bool_], problem: str, first: int = first) -> None:
            if not holds.all():
                number = first + int(np.argmin(holds))
                raise DamagedError(path, f"says that document {number} {problem}")

        require((shard >= 0) & (shard < len(shards)), "is in no token file")
        room = rooms[shard]
        require((start >= 0) & (start <= room), "starts outside of its token file")
        require((lengths >= 1) & (lengths <= room - start), "ends outside of its token file")
        require(n_bytes >= 1, "has no bytes")
        require((origin >= 0) & (origin < n_files), "is of no file")
        require(np.diff(origin, prepend=last) >= 0, "is out of the order of the files")
        require(row >= 0, "is of no row")
        require(hashed >= 0, "has no hash")
        last = origin[-1]
