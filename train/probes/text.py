"""The text that a probe reads: that of ``eval.path``, or the held-out split of the run."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from train.config import Config, ConfigError, DataConfig
from train.data.corpus import find_files, read_files
from train.data.documents import Documents
from train.data.encoder import DocumentEncoder
from train.data.shards import open_corpus
from train.data.tokenizer import vocabulary_size
from train.engine.stored_checkpoint import read_manifest_metadata
from train.run.run_folder import RunFolder, read_config
from train.text.files import LeftOut

PATH_KEY = "eval.path"


def read_text(config: Config, tokenizer: Tokenizer) -> tuple[Documents, str]:
    """The documents of ``eval.path``, or the held-out documents of the run, and their digest.

    Raises ``ConfigError`` if there are none, or if the run's text has changed.
    """
    if config.eval.path is not None:
        data = dataclasses.replace(config.data, path=config.eval.path, sources={})
        folder = RunFolder(config)
        own = folder.chat_template  # of the training, unless the command line gives another
        if own.is_file() and data.chat_template == read_config(folder.config).data.chat_template:
            data.chat_template = str(own)
        documents = tokenised(data, tokenizer)
        return documents, hashlib.sha256(documents.shards[0].tobytes()).hexdigest()[:12]
    corpus = open_corpus(config.data)
    if corpus.tokenizer.to_str() != tokenizer.to_str():
        raise ConfigError(
            f"data.path={config.data.path} is not what this run was trained on any more: another "
            f"tokenizer comes out of it; name the text with eval.path=..."
        )
    return corpus.held_out, corpus.digest


def require_own_text(config: Config, digest: str, checkpoint: Path) -> None:
    """Raise ``ConfigError`` unless ``checkpoint`` was trained on the corpus with this digest.

    Otherwise its training may have seen the held-out split.
    """
    if read_manifest_metadata(checkpoint)["corpus"] != digest:
        names = ", ".join(config.data.sources)
        given = f"data.sources ({names})" if names else f"data.path={config.data.path}"
        raise ConfigError(
            f"{given} is not what {checkpoint} was trained on: its files, the settings of data or "
            f"the version of the trainer have changed; restore them, or name the text with "
            f"{PATH_KEY}=..."
        )


def tokenised(data: DataConfig, tokenizer: Tokenizer) -> Documents:
    """Tokenise every document of ``data.path`` (the value of ``eval.path``) in memory.

    Raises ``ConfigError`` if a file is left out: a loss is that of the whole text. Conversations
    without an answer have no loss to add, so they are dropped.
    """
    left_out = LeftOut()
    encoder, files = DocumentEncoder(tokenizer, data), find_files(data, PATH_KEY, left_out)
    rows, columns, losses = [], [], []
    documents = read_files(files, left_out, decoder=encoder.decoder)
    for document, origin, one in encoder.stream(documents):
        if one.has_loss:
            rows.append(np.array(one.ids, np.uint32))
            if one.loss is not None:
                losses.append(one.loss)
            hashed = document.hash(data.held_out_salt)
            columns.append((len(one.ids), one.n_bytes, origin, document.row, hashed))
    if left_out.found:
        raise ConfigError("; ".join(left_out.lines()))
    if not rows:
        raise ConfigError(f"{PATH_KEY}={data.path} holds no text with loss")
    lengths, n_bytes, origins, numbers, hashes = np.array(columns, np.int64).T
    return Documents(
        shards=(np.concatenate(rows),),
        shard=np.zeros(len(rows), np.int64),
        start=np.cumsum(lengths) - lengths,
        lengths=lengths,
        n_bytes=n_bytes,
        origin=origins,
        row=numbers,
        hash=hashes,
        files=[file.label for file in files],
        sources={"": 1.0},
        bounds=(0, len(rows)),
        vocab_size=vocabulary_size(tokenizer),
        has_eos=encoder.eos is not None,
        loss=(np.packbits(np.concatenate(losses)),) if losses else None,
    )
