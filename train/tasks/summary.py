"""The summary of a finished run: its results and the baselines as JSON, plots and a table."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from train.config import Config
from train.data.shards import Corpus
from train.engine.parallel import ParallelLayout
from train.engine.train_state import TrainState
from train.log.plots import draw, plot_run
from train.log.smoothing import mean, window_of
from train.log.units import both_units, with_bits
from train.run.run_folder import RunFolder, write_atomically
from train.tasks.baselines import BASELINES, measure_baselines
from train.tasks.evaluate import Evaluation, budget_of

ROWS = {
    "this model": ("nats_per_byte", "train_nats_per_byte"),
    "this model, current token only": ("nats_per_byte_self_only",),
    **{name: (key,) for key, name in BASELINES.items()},
}


def summarise(
    config: Config,
    corpus: Corpus,
    parallel: ParallelLayout,
    state: TrainState,
    losses: Sequence[float | None],
    full: Evaluation,
    alone: Evaluation,
    short: Evaluation | None = None,
) -> dict[str, Any]:
    """The contents of ``summary.json``.

    In ``alone`` each token attended only to itself. ``short`` read documents in windows of
    ``train.final_eval_len`` tokens. ``losses`` are the training losses of all steps in nats per
    byte; ``train_nats_per_byte`` is the mean of the last ones.
    """
    last_steps = window_of(state.step)
    train = mean(losses[-last_steps:])
    return {
        **both_units(full.nats_per_byte),
        "train_nats_per_byte": train if math.isfinite(train) else None,
        "train_last_steps": last_steps,
        "nats_per_byte_self_only": alone.nats_per_byte,
        **measure_baselines(corpus, budget_of(config, "final_eval_bytes")),
        "train_seconds": state.seconds,
        "steps": state.step,
        "skipped": state.spike_filter.skipped,
        "world_size": parallel.world,
        "cp": parallel.cp,
        "seq_len": config.data.seq_len,
        "held_out_bytes": full.n_bytes,
        "held_out_tokens": full.tokens,
        **full.by_source,
        **_of_lengths(config, full, short),
    }


def _of_lengths(config: Config, full: Evaluation, short: Evaluation | None) -> dict[str, Any]:
    """The entries for ``train.final_eval_last`` and ``final_eval_len``, if they are given."""
    found: dict[str, Any] = {}
    if config.train.final_eval_last is not None:
        found["last"] = _last(config, config.data.piece_len or config.data.seq_len, full)
    if short is not None:
        found["short"] = {
            "length": config.train.final_eval_len,
            "nats_per_byte": short.nats_per_byte,
            "nats_per_token": sum(short.bucket_losses) / max(1, short.tokens),
        }
        if config.train.final_eval_last is not None:
            found["short_last"] = _last(config, config.train.final_eval_len, short)
    return found


def _last(config: Config, length: int, result: Evaluation) -> dict[str, Any]:
    mean = result.last_loss / result.last_tokens if result.last_tokens else None
    first = length - config.train.final_eval_last
    return {
        "positions": [first, length - 1],
        "tokens": result.last_tokens,
        "nats_per_token": mean,
    }


def write_summary(
    folder: RunFolder,
    summary: dict[str, Any],
    full: Evaluation,
    alone: Evaluation,
    console: Console,
) -> None:
    """Write ``summary.json`` and the plots, and print the table."""
    write_atomically(folder.summary, json.dumps(summary, indent=1) + "\n")
    baselines = {name: summary[key] for key, name in BASELINES.items()}
    by_bucket = full.loss_by_bucket, alone.loss_by_bucket
    draw(lambda: plot_run(folder.path, *by_bucket, baselines), console)
    title = f"Nats per byte (bits per byte). Held out: {summary['held_out_bytes']:,} bytes"
    if summary["baseline_bytes"] < summary["held_out_bytes"]:
        title += f" (baselines: {summary['baseline_bytes']:,})"
    title += f"; train: the last {summary['train_last_steps']} steps"
    table = Table("", "held out", "train", title=title, title_justify="left")
    for label, keys in ROWS.items():
        table.add_row(label, *(_number(summary[key]) for key in keys))
    console.print(table)
    console.print(
        f"{summary['steps']} steps in {summary['train_seconds']:.0f} s; everything is in "
        f"{folder.path}",
        soft_wrap=True,
    )


def _number(value: float | None) -> str:
    return "" if value is None else with_bits(value, 3)
