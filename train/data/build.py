"""Files of text -> the files of a tokenised corpus (see ``train.data.shards``)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import Progress

from train.config import DataConfig
from train.data import corpus
from train.data.documents import SplitWriter
from train.data.encoder import DocumentEncoder, trained_eos
from train.data.manifest import write_manifest
from train.data.splits import SPLITS, TRAIN, DocumentSplits
from train.data.tokenizer import load_tokenizer, train_tokenizer, vocabulary_size
from train.paths import expand
from train.sections.data import PLAIN
from train.text.chat import TEMPLATE, read_template
from train.text.files import LeftOut
from train.text.token_ids import IdDecoder

VALIDATION = "validation.json"  # the names of its files, as files.json has them by source
FORMAT = 3  # version of the files in the folder; part of its name


class Assigned(NamedTuple):
    """The split of a document, the number of its file in that split, and the hash of its text."""

    split: str
    origin: int
    hashed: int


def write_corpus(
    data: DataConfig, files: list[corpus.TextFile], folder: Path, console: Console
) -> None:
    """Read and tokenise ``files``, those of ``data.validation_path`` first, into an empty folder.

    Raises ``ConfigError`` for text that cannot be used, ``EmptySplitError`` for an empty split.
    """
    total = sum(file.path.stat().st_size for file in files)
    n_validation = sum(file.source.validation for file in files)
    with Progress(console=console, transient=True) as progress:
        passes = 1 if data.tokenizer else 2
        task = progress.add_task("Tokenising the corpus", total=total * passes)
        done = 0

        def documents(
            splits: DocumentSplits, left_out: LeftOut, decoder: IdDecoder | None = None
        ) -> Iterator[tuple[corpus.Document, Assigned]]:
            def show(n_bytes: int) -> None:
                progress.update(task, completed=done + n_bytes)

            for document, index in corpus.read_files(files, left_out, show, decoder):
                split, hashed = splits.assign(document)
                origin = index if document.file.source.validation else index - n_validation
                if split is not None:
                    yield document, Assigned(split, origin, hashed)

        if data.tokenizer:
            tokenizer = load_tokenizer(expand("data.tokenizer", data.tokenizer))
        else:
            both = documents(DocumentSplits(data), LeftOut())
            training = (document.text for document, assigned in both if assigned.split == TRAIN)
            tokenizer = train_tokenizer(
                training, data.vocab_size, data.bos_token, console.print, trained_eos(data)
            )
            done = total
        encoder = DocumentEncoder(tokenizer, data)
        (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
        dtype = np.dtype(np.uint16 if vocabulary_size(tokenizer) <= 2**16 else np.uint32)
        splits, left_out = DocumentSplits(data), LeftOut()
        with_loss = any(file.source.reading.data_format != PLAIN for file in files)
        writers = {split: SplitWriter(folder / split, dtype, with_loss) for split in SPLITS}
        encoded = encoder.stream(documents(splits, left_out, encoder.decoder))
        for document, (split, origin, hashed), one in encoded:
            if one.has_loss:
                writers[split].add(one.ids, one.n_bytes, origin, document.row, hashed, one.loss)
            else:
                splits.leave_out(document, split, hashed)
                key = document.file.source.reading.path_key
                left_out.add(key, "a record without an answer", document.name)
        for writer in writers.values():
            writer.close()
        splits.require_documents(left_out)
    by_source = groupby(files[n_validation:], key=lambda file: file.source.name)
    names = {source: [file.name for file in own] for source, own in by_source}
    (folder / "files.json").write_text(json.dumps(names))
    if n_validation:
        (folder / VALIDATION).write_text(json.dumps([file.name for file in files[:n_validation]]))
    metadata: dict[str, Any] = {"format": FORMAT, "dtype": dtype.name}
    if encoder.eos is not None:
        metadata["eos"] = encoder.eos
    if copies := sum(splits.copies.values()):
        metadata["copies"] = copies
    if left_out.found:
        metadata["left_out"] = left_out.listed()
    template = read_template(data) if with_loss else None
    if template is not None:
        (folder / TEMPLATE).write_text(template, encoding="utf-8")
    write_manifest(folder, metadata)
