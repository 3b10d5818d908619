"""``mode=eval``: the loss of a checkpoint on a text, by position in the document."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from train.config import Config, ConfigError, DataConfig
from train.data.corpus import find_files, read_documents
from train.data.documents import Documents
from train.data.position_buckets import bucket_label
from train.data.shards import open_corpus
from train.data.tokenizer import bos_id, encode
from train.engine.checkpoint import read_facts
from train.engine.parallel import choose_device, join, require_agreement, shutdown
from train.log.plots import plot_losses
from train.run.affinity import set_affinity
from train.run.failure import FailureReport
from train.run.run_folder import RunFolder
from train.tasks.evaluate import Evaluation, evaluate
from train.tasks.load_model import load_model, read_tokenizer

BATCH_DOCUMENTS = 64
PATH_KEY = "eval.path"


def run(config: Config) -> NoReturn:
    """Evaluate, print a table, write ``eval-NAME.json`` and ``.png``, and end the process.

    ``ConfigError`` passes through. Any other failure is reported in one line with the rank, as in
    training.
    """
    rank = int(os.environ.get("RANK", "0"))
    folder, report, parallel = RunFolder(config), FailureReport(rank, sys.stderr), None
    try:
        device = choose_device(config)
        set_affinity(config.parallel, device)
        documents, text = read_text(config, read_tokenizer(folder))
        parallel = join(config.parallel, device)
        plain = json.dumps(dataclasses.asdict(config))
        digest = hashlib.sha256(f"{plain} {text}".encode()).hexdigest()[:12]
        require_agreement(parallel, {"configuration or text": digest})
        console = Console(quiet=rank != 0, markup=False, highlight=False)
        loaded = load_model(config, folder, parallel, config.eval.checkpoint, console.print)
        if config.eval.path is None:
            require_own_text(config, text, loaded.checkpoint)
        result = evaluate(loaded.model, documents, config, parallel, config.eval.bytes)
        if rank == 0:
            _report(config, folder, loaded.checkpoint, result, console)
        shutdown(parallel, 0)
    except ConfigError:
        raise
    except Exception as error:  # the outermost frame: every error must name its rank
        report.report(error, folder.log(rank), config)
    shutdown(parallel, 1)


def read_text(config: Config, tokenizer: Tokenizer) -> tuple[Documents, str]:
    """The documents of ``eval.path``, or the held-out documents of the run, and their digest.

    Raises ``ConfigError`` if there are none, or if the run's text has changed.
    """
    if config.eval.path is not None:
        data = dataclasses.replace(config.data, path=config.eval.path, sources={})
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
    if read_facts(checkpoint)["corpus"] != digest:
        names = ", ".join(config.data.sources)
        place = f"data.sources ({names})" if names else f"data.path={config.data.path}"
        raise ConfigError(
            f"{place} is not what {checkpoint} was trained on: its files or the settings of data "
            f"have changed; restore them, or name the text with {PATH_KEY}=..."
        )


def tokenised(data: DataConfig, tokenizer: Tokenizer) -> Documents:
    """Tokenise every document of ``data.path`` (the value of ``eval.path``) in memory.

    Raises ``ConfigError`` for a file that is not UTF-8.
    """
    bos, files = bos_id(tokenizer, data.bos_token), find_files(data, PATH_KEY)
    rows, facts = [], []
    for origin, file in enumerate(files):
        try:
            texts = list(read_documents(file))
        except UnicodeDecodeError:
            raise ConfigError(f"{PATH_KEY}: {file.path} is not UTF-8 text") from None
        for start in range(0, len(texts), BATCH_DOCUMENTS):
            batch = texts[start : start + BATCH_DOCUMENTS]
            for document, ids in zip(
                batch, encode(tokenizer, [d.text for d in batch]), strict=True
            ):
                rows.append(np.array([bos, *ids], np.uint32))
                facts.append((len(ids) + 1, document.n_bytes, origin, document.row))
    if not rows:
        raise ConfigError(f"{PATH_KEY}={data.path} holds no text")
    lengths, n_bytes, origins, numbers = np.array(facts, np.int64).T
    return Documents(
        shards=(np.concatenate(rows),),
        shard=np.zeros(len(rows), np.int64),
        start=np.cumsum(lengths) - lengths,
        lengths=lengths,
        n_bytes=n_bytes,
        origin=origins,
        row=numbers,
        files=[file.label for file in files],
        sources={"": 1.0},
        bounds=(0, len(rows)),
        vocab_size=tokenizer.get_vocab_size(),
    )


def summary_of(result: Evaluation) -> dict[str, Any]:
    """The part of ``eval-NAME.json`` that depends only on the model and the text."""
    losses = [None if math.isnan(loss) else loss for loss in result.loss_by_bucket]
    return {
        "nats_per_byte": result.nats_per_byte,
        "nats_per_token": sum(result.bucket_losses) / max(1, result.tokens),
        "bytes": result.n_bytes,
        "tokens": result.tokens,
        **result.by_source,
        "by_position": [
            {"positions": bucket_label(bucket), "tokens": tokens, "nats_per_token": loss}
            for bucket, (tokens, loss) in enumerate(zip(result.bucket_tokens, losses, strict=True))
        ],
    }


def _report(
    config: Config, folder: RunFolder, checkpoint: Path, result: Evaluation, console: Console
) -> None:
    path = config.eval.path
    name = config.eval.name or (Path(path).expanduser().stem if path else "held-out")
    path_json, plot = (folder.path / f"eval-{name}.{kind}" for kind in ("json", "png"))
    summary = {"text": path, "checkpoint": str(checkpoint), **summary_of(result)}
    path_json.write_text(json.dumps(summary, indent=1) + "\n")
    console.print(
        f"{path or 'held out'}: {result.n_bytes:,} bytes, {result.tokens:,} tokens predicted by "
        f"{checkpoint}",
        soft_wrap=True,
    )
    table = Table("position", "tokens", "nats per token")
    for row in summary["by_position"]:
        if row["tokens"]:
            table.add_row(row["positions"], f"{row['tokens']:,}", f"{row['nats_per_token']:.3f}")
    console.print(table)
    console.print(
        f"{summary['nats_per_byte']:.4f} nats per byte, {summary['nats_per_token']:.4f} per token"
    )
    try:
        plot_losses(plot, {path or "held out": result.loss_by_bucket})
    except ModuleNotFoundError as error:
        console.print(f"no plot: {error}; pip install 'ringfa3[plots]'", soft_wrap=True)
    console.print(f"written to {path_json}", soft_wrap=True)
