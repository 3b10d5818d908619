"""``mode=eval``: the loss of a checkpoint on a text, by position in the document."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

from rich.table import Table

from train.config import Config
from train.data.documents import Documents
from train.data.position_buckets import bucket_label
from train.log.plots import draw, plot_losses
from train.log.units import in_words
from train.paths import expand
from train.probes.measure import Subject, run_probe
from train.run.run_folder import write_atomically
from train.tasks.evaluate import Evaluation, evaluate


def run(config: Config) -> NoReturn:
    """Evaluate, print a table, write ``eval-NAME.json`` and ``.png``, and end as ``run_probe``."""
    run_probe(config, config.eval.checkpoint, lambda documents, _: documents, _measure)


def _measure(subject: Subject, documents: Documents) -> None:
    config, parallel = subject.config, subject.parallel
    result = evaluate(subject.loaded.model, documents, config, parallel, config.eval.bytes)
    if parallel.rank == 0:
        _report(subject, result)


def summary_of(result: Evaluation) -> dict[str, Any]:
    """The part of ``eval-NAME.json`` that depends only on the model and the text."""
    losses = [None if math.isnan(loss) else loss for loss in result.loss_by_bucket]
    return {
        **result.units,
        "nats_per_token": result.nats_per_token,
        "bytes": result.n_bytes,
        "tokens": result.tokens,
        **result.by_source,
        "by_position": [
            {"positions": bucket_label(bucket), "tokens": tokens, "nats_per_token": loss}
            for bucket, (tokens, loss) in enumerate(zip(result.bucket_tokens, losses, strict=True))
        ],
    }


def _report(subject: Subject, result: Evaluation) -> None:
    path, console = subject.config.eval.path, subject.console
    checkpoint = subject.loaded.checkpoint
    name = subject.config.eval.name or (expand("eval.path", path).stem if path else "held-out")
    path_json, plot = (subject.folder.path / f"eval-{name}.{suffix}" for suffix in ("json", "png"))
    summary = {"text": path, "checkpoint": str(checkpoint), **summary_of(result)}
    write_atomically(path_json, json.dumps(summary, indent=1) + "\n")
    console.print(
        f"{path or 'held out'}: {result.n_bytes:,} bytes, {result.tokens:,} tokens predicted by "
        f"{checkpoint}",
    )
    table = Table("position", "tokens", "nats per token")
    for row in summary["by_position"]:
        if row["tokens"]:
            table.add_row(row["positions"], f"{row['tokens']:,}", f"{row['nats_per_token']:.3f}")
    console.print(table)
    console.print(in_words(result.nats_per_token, result.nats_per_byte))
    title = f"Loss of {path or 'the held-out text'} by position"
    draw(lambda: plot_losses(plot, title, {path or "held out": result.loss_by_bucket}), console)
    console.print(f"written to {path_json}")
