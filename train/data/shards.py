"""A tokenised corpus: built once per host and cached.

It is built under a lock in a temporary folder, which is renamed when it is complete, so a folder
without ``.tmp`` is complete. Its name is a hash of the files and of every config value that changes
a token. ``load_corpus`` checks the files against the manifest and the indices against the files,
in one process of each host.

    <key>/manifest.json  tokenizer.json  files.json  {train,held_out}/...  (see documents.py)
          chat_template.jinja of conversations
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock
from numpy.typing import NDArray
from rich.console import Console
from tokenizers import Tokenizer

from train.config import ConfigError, DataConfig
from train.data import corpus
from train.data.build import FORMAT, VALIDATION, write_corpus
from train.data.documents import Documents, open_split
from train.data.manifest import (
    DamagedError,
    Manifest,
    read_manifest,
    sync_folder,
    verify,
)
from train.data.splits import HELD_OUT, SPLITS, TRAIN, EmptySplitError
from train.data.tokenizer import (
    LONGEST_PRE_TOKEN,
    SPECIAL_AS_TEXT,
    ignored_settings,
    load_tokenizer,
    vocabulary_size,
)
from train.host import once
from train.paths import discard, expand, make_folder, require_removal, unusable
from train.sections.data import NO_EOS, PLAIN
from train.text.chat import TEMPLATE, read_template
from train.text.files import LeftOut

# A byte-level tokenizer has fewer if it does not know the language: most bytes are tokens of their
# own. A tokenizer has more if it drops text. Whole words with three bytes a letter are in between.
USUAL_BYTES_PER_TOKEN = (1.5, 16.0)


@dataclass(frozen=True)
class Corpus:
    """A tokenised corpus. ``digest`` identifies its contents on any host.

    Training leaves out ``copies`` documents, whose texts are in ``data.validation_path``.
    ``left_out`` are the files and documents that are not read. ``chat_template`` is that of
    conversations.
    """

    train: Documents
    held_out: Documents
    tokenizer: Tokenizer
    digest: str
    copies: int
    left_out: LeftOut
    chat_template: str | None = None


def open_corpus(data: DataConfig) -> Corpus:
    """Open the tokenised corpus of ``data``; build it if the cache does not hold it.

    Any number of processes may call this at once: one per host tokenises and shows its progress,
    the others wait. Rank 0 prints what is unusual about the text and the tokenizer.
    """
    left_out = LeftOut()
    files = corpus.all_files(data, left_out)
    cache = expand("data.cache_dir", data.cache_dir)
    folder = cache / cache_key(data, files)
    with _readable(folder):
        complete = folder.exists()
    if not complete:  # a complete one needs no lock, so it may be another user's
        try:
            _lock_and_build(data, files, folder)
        except EmptySplitError as error:
            error.args = ("; ".join([str(error), *left_out.lines()]),)
            raise
    weights = {source.name: source.weight for source in corpus.sources_of(data)}
    with _readable(folder):
        opened = load_corpus(folder, weights, checksums=data.verify)
    if os.environ.get("RANK", "0") == "0":
        unread = [*left_out.lines(), *opened.left_out.lines()]
        for line in [*unread, *_switched_off(data), *_unusual_lengths(data, opened)]:
            print(line, flush=True)
        if opened.copies:
            print(f"{opened.copies:,} documents are left out: data.validation_path has their text")
    return opened


@contextlib.contextmanager
def _readable(folder: Path) -> Iterator[None]:
    """Convert an ``OSError`` to the ``ConfigError`` that the cache ``folder`` cannot be read.

    Each process prints its own: one alone may lack memory or file handles.
    """
    try:
        yield
    except OSError as error:
        problem = unusable("data.cache_dir", folder, "read", error)
        problem.found_by_all = False
        raise problem from None


def _switched_off(data: DataConfig) -> list[str]:
    """A line on the settings in the tokenizer's file that are ignored."""
    ignored = ignored_settings(_tokenizer_file(data))
    if not ignored:
        return []
    values = ", ".join(f"{key} ({_values(value)})" for key, value in ignored.items())
    return [f"data.tokenizer={data.tokenizer}: switched off, as they change tokens: {values}"]


def _values(value: Any) -> str:
    return (
        ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else f"{value}"
    )


def _unusual_lengths(data: DataConfig, opened: Corpus) -> list[str]:
    """A line for each source whose bytes per token of text are far from usual."""
    low, high = USUAL_BYTES_PER_TOKEN
    sizes: dict[str, NDArray[np.int64]] = {}
    for split in (opened.train, opened.held_out):
        if split.loss is not None:
            continue  # these are the bytes of some of the tokens
        slices = map(slice, split.bounds, split.bounds[1:])
        for name, own in zip(split.sources, slices, strict=True):
            given = f"data.sources.{name}" if name else f"data.path={data.path}"
            if split is opened.held_out and data.validation_path is not None:
                given = f"data.validation_path={data.validation_path}"
            n, n_bytes = own.stop - own.start, int(split.n_bytes[own].sum())
            size = np.array([n_bytes, int(split.lengths[own].sum()) - n * (1 + split.has_eos)])
            sizes[given] = sizes.get(given, 0) + size
    lines = []
    for given, (n_bytes, n_tokens) in sizes.items():
        ratio = n_bytes / max(n_tokens, 1)
        if not low <= ratio <= high:
            remedy = "data.vocab_size" if data.tokenizer is None else "data.tokenizer"
            lines.append(
                f"{given}: {ratio:.2f} bytes per token, usual are {low:g} to {high:g}; check that "
                f"{remedy} fits this text"
            )
    return lines


def _tokenizer_file(data: DataConfig) -> bytes:
    return expand("data.tokenizer", data.tokenizer).read_bytes() if data.tokenizer else b""


def cache_key(data: DataConfig, files: list[corpus.TextFile]) -> str:
    """Twenty hexadecimal digits, a hash of everything that can change a token of the corpus."""
    tokenizer = _tokenizer_file(data)
    settings = [
        FORMAT,
        corpus.fingerprint(files),
        hashlib.sha256(tokenizer).hexdigest(),
        data.vocab_size if data.tokenizer is None else None,
        data.bos_token,
        data.held_out,
        data.held_out_salt,
    ]
    if data.tokenizer is None:  # earlier versions trained without this cut
        settings.append({"longest_pre_token": LONGEST_PRE_TOKEN})
    if data.eos_token != NO_EOS:  # earlier versions had neither this key nor the next
        settings.append({"eos": data.eos_token})
    if data.special_tokens != SPECIAL_AS_TEXT:
        settings.append({"special_tokens": data.special_tokens})
    if any(file.source.reading.data_format != PLAIN for file in files):
        settings.append({"chat_template": read_template(data)})
    if ignored := ignored_settings(tokenizer):  # earlier versions applied them
        settings.append({"ignored": ignored})
    return hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:20]


def load_corpus(folder: Path, weights: dict[str, float], checksums: bool) -> Corpus:
    """Open a tokenised corpus; ``DamagedError`` with the remedy if its files are damaged.

    Sizes are always compared, checksums of the token files only with ``checksums``. ``weights``
    maps sources to their weights, which change no token. Processes of a host that call this at
    once wait for the first of them, which alone checks.
    """

    def damage() -> str:
        try:
            manifest = verify(folder, lambda name: checksums or not name.endswith(".bin"))
            _open(folder, manifest, weights, check=True)
        except DamagedError as error:
            return json.dumps([str(error.path), error.problem])
        return ""

    names = ["corpus", str(folder.resolve()), FORMAT, checksums, sorted(weights)]
    if found := once(names, damage):
        path, problem = json.loads(found)
        remedy = f"delete {folder} and start again to rebuild it"
        raise DamagedError(Path(path), f"{problem}; {remedy}")
    return _open(folder, read_manifest(folder), weights, check=False)


def _open(folder: Path, manifest: Manifest, weights: dict[str, float], check: bool) -> Corpus:
    metadata = manifest.metadata
    if metadata.get("format") != FORMAT:
        raise DamagedError(folder, f"has format {metadata.get('format')}, not {FORMAT}")
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    files = {TRAIN: json.loads((folder / "files.json").read_text())}
    if set(files[TRAIN]) != set(weights):
        raise DamagedError(folder / "files.json", f"is of the sources {', '.join(files[TRAIN])}")
    if VALIDATION in manifest.files:
        files[HELD_OUT] = {"": json.loads((folder / VALIDATION).read_text())}
    content = json.dumps({name: asdict(entry) for name, entry in manifest.files.items()})
    digest = hashlib.sha256(content.encode()).hexdigest()[:20]
    splits = []
    for split in SPLITS:
        sizes = []
        while entry := manifest.files.get(f"{split}/{len(sizes):05d}.bin"):
            sizes.append(entry.size)
        names = files.get(split, files[TRAIN])
        of_split = {source: weights.get(source, 1.0) for source in names}
        where = (folder / split, sizes, metadata["dtype"], vocabulary_size(tokenizer))
        has = {
            "has_eos": "eos" in metadata,
            "has_loss": f"{split}/00000.loss.bin" in manifest.files,
        }
        own = f"{digest} {split}"
        splits.append(open_split(*where, names, of_split, **has, digest=own, check=check))
    copies, left_out = metadata.get("copies", 0), LeftOut(metadata.get("left_out", []))
    template = (folder / TEMPLATE).read_text("utf-8") if TEMPLATE in manifest.files else None
    return Corpus(*splits, tokenizer, digest, copies, left_out, template)


def _lock_and_build(data: DataConfig, files: list[corpus.TextFile], folder: Path) -> None:
    """Build ``folder`` unless another process does; ``ConfigError`` if the disk refuses."""
    make_folder("data.cache_dir", folder.parent)
    try:
        with FileLock(f"{folder}.lock"):
            if not folder.exists():
                _build(data, files, folder)
    except OSError as error:
        named = error.filename
        if named is not None and not Path(os.fsdecode(named)).is_relative_to(folder.parent):
            raise  # a file of the text
        problem = unusable("data.cache_dir", folder.parent, "written to", error)
        problem.found_by_all = False
        raise problem from None


def _build(data: DataConfig, files: list[corpus.TextFile], folder: Path) -> None:
    """Tokenise ``files`` into a temporary folder, and rename it to ``folder``.

    Locks may have no effect between hosts that share the cache. Each host therefore has its own
    temporary folder, and the first to finish wins.
    """
    temporary = folder.with_name(f"{folder.name}.{socket.gethostname()}.tmp")
    try:
        # A killed build may have left files. No other process uses them: this one holds the lock.
        require_removal(temporary)
        temporary.mkdir()
        write_corpus(data, files, temporary, Console(markup=False, highlight=False))
        try:
            temporary.rename(folder)
        except OSError:
            if not folder.exists():
                raise
        sync_folder(folder.parent)
    except ConfigError as error:
        error.found_by_all = False
        raise
    finally:
        discard(temporary)
