"""Tokenised documents on disk: memory-mapped token files and a document index.

A corpus is tokenised once per host into ``<cache_dir>/<key>/``, under a lock, in a temporary folder
that is renamed when complete: a folder that exists is complete. The key hashes the files and every
setting that changes a token. ``manifest.json`` holds size and checksum of every other file, and
they are checked before anything is mapped.

    <key>/manifest.json  tokenizer.json  {train,held_out}/index.npz  {train,held_out}/00000.bin ...
"""

from __future__ import annotations

import hashlib
import json
import shutil
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress
from tokenizers import Tokenizer

from train import corpus
from train.config import ConfigError, DataConfig
from train.tokenizer import bos_id, encode, load_tokenizer, train_tokenizer

FORMAT = 1
SPLITS = ("train", "held_out")
BATCH_DOCUMENTS = 64
SHARD_TOKENS = 2**27


class DamagedShardsError(RuntimeError):
    """A tokenised corpus differs from its manifest."""


@dataclass(frozen=True)
class Documents:
    """One split of a tokenised corpus. Every document starts with the BOS token.

    ``lengths`` (n,) int64: tokens per document, BOS included; ``n_bytes`` (n,) int64: UTF-8 bytes.
    """

    shards: tuple[NDArray[np.generic], ...]
    shard: NDArray[np.int64]
    start: NDArray[np.int64]
    lengths: NDArray[np.int64]
    n_bytes: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.lengths)

    def tokens(self, document: int, start: int, stop: int) -> NDArray[np.int64]:
        """Tokens ``[start, stop)`` of a document; ``stop`` may exceed its length."""
        base = int(self.start[document])
        stop = min(stop, int(self.lengths[document]))
        return self.shards[self.shard[document]][base + start : base + stop].astype(np.int64)


@dataclass(frozen=True)
class Corpus:
    """A tokenised corpus. ``digest`` identifies its contents, on whatever host it was made."""

    train: Documents
    held_out: Documents
    tokenizer: Tokenizer
    digest: str


def open_corpus(data: DataConfig) -> Corpus:
    """The tokenised corpus of these settings, made first where the cache does not hold it.

    Any number of processes may call this at once: one of them tokenises, showing its progress, and
    the others wait.
    """
    sources = corpus.find_sources(data)
    cache = Path(data.cache_dir).expanduser()
    folder = cache / cache_key(data, sources)
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            _build(data, sources, folder)
    return load_corpus(folder, verify=data.verify)


def cache_key(data: DataConfig, sources: list[corpus.Source]) -> str:
    """Twenty hexadecimal digits that differ whenever a token of the corpus could."""
    tokenizer = Path(data.tokenizer).expanduser().read_bytes() if data.tokenizer else b""
    settings = [
        FORMAT,
        corpus.fingerprint(sources),
        hashlib.sha256(tokenizer).hexdigest(),
        data.vocab_size if data.tokenizer is None else None,
        data.bos_token,
        data.held_out,
        data.text_field,
    ]
    return hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:20]


def load_corpus(folder: Path, verify: bool) -> Corpus:
    """Map a tokenised corpus; ``DamagedShardsError`` when a file is not what the manifest says.

    Sizes are always compared, checksums of the token files only with ``verify``.
    """
    remedy = f"delete {folder} and start again to rebuild it"
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise DamagedShardsError(f"{folder}/manifest.json: {error}; {remedy}") from None
    for name, expected in manifest["files"].items():
        path = folder / name
        size = path.stat().st_size if path.exists() else None
        if size != expected["size"]:
            raise DamagedShardsError(f"{path} has {size} bytes, not {expected['size']}; {remedy}")
        if (verify or path.suffix != ".bin") and checksum(path) != expected["crc32"]:
            raise DamagedShardsError(f"{path} differs from its checksum; {remedy}")
    dtype = np.dtype(manifest["dtype"])
    splits = [_open_split(folder / split, dtype) for split in SPLITS]
    content = json.dumps(manifest["files"], sort_keys=True).encode()
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    return Corpus(*splits, tokenizer=tokenizer, digest=hashlib.sha256(content).hexdigest()[:20])


def checksum(path: Path) -> int:
    """CRC-32 of a file, read in pieces."""
    value = 0
    with path.open("rb") as file:
        while block := file.read(2**22):
            value = zlib.crc32(block, value)
    return value


def _open_split(folder: Path, dtype: np.dtype[Any]) -> Documents:
    with np.load(folder / "index.npz") as index:
        columns = {name: index[name] for name in ("shard", "start", "lengths", "n_bytes")}
    shards = tuple(np.memmap(p, dtype, mode="r") for p in sorted(folder.glob("*.bin")))
    return Documents(shards, **columns)


def _build(data: DataConfig, sources: list[corpus.Source], folder: Path) -> None:
    """Tokenise ``sources`` into ``folder``, which appears only when it is complete."""
    temporary = folder.with_suffix(".tmp")
    shutil.rmtree(temporary, ignore_errors=True)  # what a killed build left; the lock is ours
    temporary.mkdir()
    try:
        _write(data, sources, temporary, Console(markup=False, highlight=False))
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write(data: DataConfig, sources: list[corpus.Source], folder: Path, console: Console) -> None:
    total = sum(source.path.stat().st_size for source in sources)
    unreadable: set[Path] = set()
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task(
            "Tokenising the corpus", total=total * (1 if data.tokenizer else 2)
        )

        def documents() -> Iterator[corpus.Document]:
            for source in sources:
                try:
                    yield from corpus.read_documents(source, data.text_field)
                except UnicodeDecodeError:
                    unreadable.add(source.path)
                progress.advance(task, source.path.stat().st_size)

        if data.tokenizer:
            tokenizer = load_tokenizer(Path(data.tokenizer).expanduser())
        else:
            training = (
                d.text for d in documents() if not corpus.is_held_out(d.name, data.held_out)
            )
            tokenizer = train_tokenizer(training, data.vocab_size, data.bos_token)
        tokenizer.save(str(folder / "tokenizer.json"))
        dtype = np.dtype(np.uint16 if tokenizer.get_vocab_size() <= 2**16 else np.uint32)
        _write_splits(data, documents(), folder, tokenizer, dtype)
    for path in sorted(unreadable):
        console.print(f"left out, not UTF-8: {path}", soft_wrap=True)
    files = {
        path.relative_to(folder).as_posix(): {"size": path.stat().st_size, "crc32": checksum(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    manifest = {"format": FORMAT, "dtype": dtype.name, "files": files}
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1))


def _write_splits(
    data: DataConfig,
    documents: Iterator[corpus.Document],
    folder: Path,
    tokenizer: Tokenizer,
    dtype: np.dtype[Any],
) -> None:
    bos = bos_id(tokenizer, data.bos_token)
    writers = {split: SplitWriter(folder / split, dtype, bos) for split in SPLITS}
    while batch := list(islice(documents, BATCH_DOCUMENTS)):
        for document, ids in zip(batch, encode(tokenizer, [d.text for d in batch]), strict=True):
            split = SPLITS[corpus.is_held_out(document.name, data.held_out)]
            writers[split].add(ids, document.n_bytes)
    for split, writer in writers.items():
        if not writer.lengths:
            n = sum(len(writer.lengths) for writer in writers.values())
            raise ConfigError(
                f"data.held_out={data.held_out} leaves the split {split} empty ({n} documents in "
                f"all); add documents (a long file can be cut into several) or change the share"
            )
        writer.close()


class SplitWriter:
    """Writes the documents of one split: token files of about ``shard_tokens`` and the index."""

    def __init__(
        self, folder: Path, dtype: np.dtype[Any], bos: int, shard_tokens: int = SHARD_TOKENS
    ) -> None:
        folder.mkdir()
        self.folder, self.dtype, self.bos, self.shard_tokens = folder, dtype, bos, shard_tokens
        self.shard: list[int] = []
        self.start: list[int] = []
        self.lengths: list[int] = []
        self.n_bytes: list[int] = []
        self._shards = 0
        self._written = 0
        self._file = (folder / "00000.bin").open("wb")

    def add(self, ids: list[int], n_bytes: int) -> None:
        """Append a document: BOS and ``ids``. A document never straddles two files."""
        if self._written >= self.shard_tokens:
            self._file.close()
            self._shards, self._written = self._shards + 1, 0
            self._file = (self.folder / f"{self._shards:05d}.bin").open("wb")
        self._file.write(np.array([self.bos, *ids], self.dtype).tobytes())
        self.shard.append(self._shards)
        self.start.append(self._written)
        self.lengths.append(len(ids) + 1)
        self.n_bytes.append(n_bytes)
        self._written += len(ids) + 1

    def close(self) -> None:
        """Complete the files; nothing may be added after."""
        self._file.close()
        columns = {"shard": self.shard, "start": self.start}
        columns |= {"lengths": self.lengths, "n_bytes": self.n_bytes}
        arrays = {name: np.array(values, np.int64) for name, values in columns.items()}
        np.savez(self.folder / "index.npz", **arrays)
