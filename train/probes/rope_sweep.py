"""``mode=rope``: losses by position under other settings of RoPE, without training.

The weights stay; frequencies and the attention factor change. On text beyond the run's length
(``data.seq_len=8192 data.max_doc_len=null``) the losses show with which setting to extend the run.
"""

from __future__ import annotations

import dataclasses
import json
from typing import NoReturn

from rich.table import Table
from tokenizers import Tokenizer

from train.config import Config
from train.data.documents import Documents
from train.data.position_buckets import bucket_label
from train.log.plots import draw, plot_losses
from train.log.units import UNITS, cells
from train.model.rope import attention_factor, rope_frequencies
from train.model.transformer import Transformer
from train.probes.measure import Subject, run_probe
from train.probes.text_loss import summary_of
from train.run.run_folder import RunFolder, read_config, write_atomically
from train.sections.model import RopeConfig
from train.tasks.evaluate import Evaluation, evaluate


def run(config: Config) -> NoReturn:
    """Evaluate every setting, write ``rope.json`` and ``.png``, print a table, and end as
    ``run_probe``.
    """

    def prepare(documents: Documents, _: Tokenizer) -> tuple[Documents, dict[str, RopeConfig]]:
        return documents, settings_of(config, read_config(RunFolder(config).config))

    run_probe(config, config.rope.checkpoint, prepare, _measure)


def _measure(subject: Subject, prepared: tuple[Documents, dict[str, RopeConfig]]) -> None:
    config, parallel, model = subject.config, subject.parallel, subject.loaded.model
    documents, settings = prepared
    results = {}
    for label, rope in settings.items():
        set_rope(model.transformer, rope)
        results[label] = evaluate(model, documents, config, parallel, config.eval.bytes)
    if parallel.rank == 0:
        _report(subject, results, settings)


def settings_of(config: Config, trained: Config) -> dict[str, RopeConfig]:
    """The settings to evaluate, by label: that of ``config``, then those of the section ``rope``.

    ``trained`` are the settings that the run was trained with. Scaled settings take their base from
    the model and their original length from the documents of ``trained``.
    """
    own = config.model.rope
    length = trained.data.longest_document()
    found = {"as it is": own}
    for rope_type in config.rope.types:
        for factor in config.rope.factors:
            rope = RopeConfig(rope_type, own.theta, factor, original_len=length)
            found[f"{rope_type} {factor:g}"] = rope
    for theta in config.rope.thetas:
        found[f"theta {theta:g}"] = RopeConfig(theta=theta)
    return found


def set_rope(transformer: Transformer, rope: RopeConfig) -> None:
    """Set the frequencies and the attention factor of a model to those of ``rope``."""
    transformer.frequencies = rope_frequencies(transformer.config.resolved_head_dim(), rope)
    transformer.attention_factor = attention_factor(rope)


def _report(
    subject: Subject, results: dict[str, Evaluation], settings: dict[str, RopeConfig]
) -> None:
    console = subject.console
    path, plot = (subject.folder.path / f"rope.{suffix}" for suffix in ("json", "png"))
    rows = [
        {"label": label, "rope": dataclasses.asdict(settings[label]), **summary_of(result)}
        for label, result in results.items()
    ]
    write_atomically(path, json.dumps(rows, indent=1) + "\n")
    first = next(iter(results.values()))
    filled = [bucket for bucket, tokens in enumerate(first.bucket_tokens) if tokens][-3:]
    at_positions = (f"at {bucket_label(bucket)}" for bucket in filled)
    table = Table("RoPE", *UNITS, *at_positions, title_justify="left")
    table.title = "At positions: nats per token"
    for label, result in results.items():
        losses = (f"{result.loss_by_bucket[bucket]:.3f}" for bucket in filled)
        table.add_row(label, *cells(result.nats_per_token, result.nats_per_byte), *losses)
    console.print(table)
    losses_of = {label: result.loss_by_bucket for label, result in results.items()}
    draw(lambda: plot_losses(plot, "Loss by position and RoPE", losses_of), console)
    console.print(f"written to {path}")
