"""``mode=rope``: losses by position under other settings of RoPE, without training.

The weights stay; frequencies and the attention factor change. Text beyond the run's length
(``data.seq_len=8192 data.piece_len=null``) shows with which to extend it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import sys
from typing import NoReturn

from rich.console import Console
from rich.table import Table

from train.config import Config, ConfigError, RopeConfig
from train.data.position_buckets import bucket_label
from train.engine.parallel import choose_device, join, require_agreement, shutdown
from train.log.plots import plot_losses
from train.model.rope import attention_factor, rope_frequencies
from train.model.transformer import Transformer
from train.run.affinity import set_affinity
from train.run.failure import FailureReport
from train.run.run_config import read_config
from train.run.run_folder import RunFolder, write_atomically
from train.tasks.evaluate import Evaluation, evaluate
from train.tasks.load_model import load_model, read_tokenizer
from train.tasks.text_loss import read_text, require_own_text, summary_of


def run(config: Config) -> NoReturn:
    """Evaluate every setting, write ``rope.json`` and ``.png``, print a table, and end the process.

    ``ConfigError`` passes through. Any other failure is reported in one line with the rank.
    """
    rank = int(os.environ.get("RANK", "0"))
    folder, report, parallel = RunFolder(config), FailureReport(rank, sys.stderr), None
    try:
        device = choose_device(config)
        set_affinity(config.parallel, device)
        settings = settings_of(config, read_config(folder.config))
        documents, text = read_text(config, read_tokenizer(folder))
        parallel = join(config.parallel, device)
        plain = json.dumps(dataclasses.asdict(config))
        digest = hashlib.sha256(f"{plain} {text}".encode()).hexdigest()[:12]
        require_agreement(parallel, {"configuration or text": digest})
        console = Console(quiet=rank != 0, markup=False, highlight=False)
        loaded = load_model(config, folder, parallel, config.rope.checkpoint, console.print)
        if config.eval.path is None:
            require_own_text(config, text, loaded.checkpoint)
        results = {}
        for label, rope in settings.items():
            set_rope(loaded.model.transformer, rope)
            results[label] = evaluate(loaded.model, documents, config, parallel, config.eval.bytes)
        if rank == 0:
            _report(results, settings, folder, console)
        shutdown(parallel, 0)
    except ConfigError:
        raise
    except Exception as error:  # the outermost frame: every error must name its rank
        report.report(error, folder.log(rank), config)
    shutdown(parallel, 1)


def settings_of(config: Config, trained: Config) -> dict[str, RopeConfig]:
    """The settings to evaluate, by label: that of ``config``, then those of the section ``rope``.

    Their base is the model's, their original length that of the documents in ``trained``, the
    settings that the run was trained with.
    """
    own = config.model.rope
    length = trained.data.longest_document()
    found = {"as it is": own}
    for kind in config.rope.types:
        for factor in config.rope.factors:
            rope = RopeConfig(kind, own.theta, factor, original_len=length)
            found[f"{kind} {factor:g}"] = rope
    for theta in config.rope.thetas:
        found[f"theta {theta:g}"] = RopeConfig(theta=theta)
    return found


def set_rope(transformer: Transformer, rope: RopeConfig) -> None:
    """Give a model other frequencies and another attention factor."""
    transformer.frequencies = rope_frequencies(transformer.config.resolved_head_dim(), rope)
    transformer.attention_factor = attention_factor(rope)


def _report(
    results: dict[str, Evaluation],
    settings: dict[str, RopeConfig],
    folder: RunFolder,
    console: Console,
) -> None:
    path, plot = (folder.path / f"rope.{kind}" for kind in ("json", "png"))
    rows = [
        {"label": label, "rope": dataclasses.asdict(settings[label]), **summary_of(result)}
        for label, result in results.items()
    ]
    write_atomically(path, json.dumps(rows, indent=1) + "\n")
    first = next(iter(results.values()))
    filled = [bucket for bucket, tokens in enumerate(first.bucket_tokens) if tokens][-3:]
    table = Table("RoPE", "nats per byte", *(f"at {bucket_label(bucket)}" for bucket in filled))
    for label, result in results.items():
        losses = (f"{result.loss_by_bucket[bucket]:.3f}" for bucket in filled)
        table.add_row(label, f"{result.nats_per_byte:.4f}", *losses)
    console.print(table)
    try:
        plot_losses(plot, {label: result.loss_by_bucket for label, result in results.items()})
    except ModuleNotFoundError as error:
        console.print(f"no plot: {error}; pip install 'ringfa3[plots]'", soft_wrap=True)
    console.print(f"written to {path}", soft_wrap=True)
